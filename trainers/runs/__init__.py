"""Trainings from a configuration: planned, run, checkpointed and resumed.

``run_plan`` says what a run will cost, and ``timed_steps`` how long it will take. ``record`` makes
it: ``training_setup`` puts ``model``, ``optimizer`` and examples together, which a Trainer or a
plain loop over ``batches`` trains, a ``recorded_training`` has a recorder attached, and
``checkpoint_schedule`` says when a
``checkpoint`` of the ``training_state`` is due. Before a run goes on, ``resume_checks`` compares
what is asked for with what was, and where there is no checkpoint, ``retraining`` reaches the last
row once more, if the ``recorded_rates`` are those of its configurations.

``fork`` goes on from any step with other settings: ``fork_settings`` says with which, and
``forked_state`` makes the state over.
"""
