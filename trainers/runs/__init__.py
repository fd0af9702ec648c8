"""Training runs from a configuration: planned, run, checkpointed and resumed.

``run_plan`` computes the cost of a run, and ``timed_steps`` measures its duration. ``record``
trains and records it, and ``matrix_runs`` names its runs. ``training_setup`` builds ``model``,
``optimizer`` and examples for a Trainer or for a plain loop over ``batches``. ``recorded_training``
attaches a recorder. ``checkpoint_schedule`` decides when to write a ``checkpoint`` of the
``training_state``.

Before a run resumes, ``resume_checks`` compares the configurations. A row that holds everything
replaces a checkpoint (``row_checkpoint``); ``proven_steps`` trains steps again from such rows.
Without a checkpoint, ``retraining`` repeats the training up to the last row, if the
``recorded_rates`` agree with its configurations.

``fork`` continues from any step with other settings: ``fork_settings`` checks them, and
``forked_state`` converts the state.
"""
