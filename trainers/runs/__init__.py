"""Training runs from a configuration: planned, run, checkpointed and resumed.

``run_plan`` computes the size of a run. ``record`` trains and records it, and ``matrix_runs`` names
its runs. ``training_setup`` builds ``model``,
``optimizer`` and examples for a Trainer or for a plain loop over ``batches``. ``recorded_training``
attaches a recorder. ``run_state`` is the state after a step: taken from a training or a row,
stored in a file, and set in a training. ``checkpoint_schedule`` decides when a ``checkpoint`` is
written.

Before a run resumes, ``resume_checks`` compares the configurations. A row that holds everything
replaces a checkpoint; ``proven_steps`` trains steps again from such rows. Without a checkpoint,
``retraining`` repeats the training up to the last row.

``fork`` continues from any step with other settings, which ``fork_settings`` checks.
"""
