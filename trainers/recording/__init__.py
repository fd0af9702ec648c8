"""Recording of any training: hooks, rows, and their way into the run.

Where the tensors of one step go:

1. A hook sees the tensor: ``forward_values`` what the forward passes make, ``step_examples`` what
   they make of single examples, ``step_hooks`` the
   gradient when the backward pass ends, and W and the moments right after the optimizer's step.
2. ``parameter_rows`` knows whether it is recorded, and of which tokens (``token_selection``);
   ``device_norms`` sums up; ``model_parameters`` does of all parameters of the model.
3. ``device_to_host`` copies it into its place in the writer's block: at once on the CPU, over the
   bus and behind the training from CUDA. When the step ends the row is handed over as a whole.
4. `trajstore.store.writing.writer` encodes full blocks, writes and commits them.

Before the first step ``capture``, for a `Trainer` called by ``hf_callback``, puts that together:
what ``options`` ask for, of the matrices that ``parameters`` finds, into the runs that
``planned_run`` plans, with their populations and ``provenance``, and, where one is to go on,
``resumed_run`` finds. ``data_set_tokens`` counts the tokens of a Trainer's data set.
``numeric_advice`` says what the types of the optimizer keep it from doing, and ``torch_threads``
sets the number of threads, on which its bits depend.
Of a training that is done again, ``compared_run`` takes the rows and compares them.
Of a parameter that is sharded over processes each records its tokens: ``sharding`` tells which.
torch's private names are in ``torch_internals``, each with its reason.
"""
