"""Recording of any training: hooks, rows, and the transfer of rows into the run.

The path of the tensors of one step:

1. A hook receives the tensor. ``forward_values`` handles the forward passes, ``step_examples``
   single examples; ``hidden_states`` passes the hidden states to both. ``step_gradients`` takes the
   gradients at the end of a backward pass, and compares them with what the optimizer consumes.
   ``step_hooks`` takes W and the optimizer's state right after the optimizer's step;
   ``followed_matrices`` finds W, its group and its rate in each step. ``module_hooks``,
   ``optimizer_hooks`` and ``watched_calls`` call them. ``joined_optimizer`` presents several
   optimizers as one.
2. ``parameter_rows`` takes the values of a step; ``first_rows`` keeps them until the run exists.
   Both take the recorded variables and tokens only (``token_selection``).
   ``device_norms`` computes summaries per token, ``model_parameters`` those of all parameters;
   ``model_state`` takes all parameters with their gradients and what the optimizer keeps of them
   (``kept_state``), joined by ``flat_vectors``; ``model_buffers`` the buffers that change;
   ``random_states`` the generators.
3. ``device_to_host`` copies the tensor into the writer's block: at once on the CPU, asynchronously
   from CUDA. At the end of the step the writer receives the complete row.
4. `trajstore.store.writing.writer` encodes complete blocks, writes and commits them.
   ``logged_rows`` gives numbers of the committed rows to a tracker.

Before the first step ``capture`` sets this up (`attach` and `capture` for a loop); ``hf_callback``
calls it for a `Trainer` of Hugging Face, ``lightning_callback`` for one of Lightning.
``options`` holds the user's options, ``parameters`` finds the matrices, and ``planned_run`` plans
the runs with their populations and ``provenance``. ``resumed_run`` opens an existing run.
``first_step`` looks for what the recording cannot answer, ``unproven_steps`` for steps that no
replay can prove, ``empty_steps`` for calls that are no steps, and ``run_notes`` collects notes.
``data_set_tokens`` counts the tokens of a Trainer's data set. ``numeric_advice`` reports types in
which the optimizer has no effect. ``torch_threads`` sets the number of threads, on which the bits
depend. ``compared_run`` compares the rows of a repeated training. ``sharding`` computes the tokens
that each process records of a sharded parameter. ``torch_internals`` holds torch's private names,
each with its reason.
"""
