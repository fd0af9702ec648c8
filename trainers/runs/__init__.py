"""Trainings from a configuration: planned, run, checkpointed and resumed.

``run_plan`` says what a run will cost. ``record`` makes it: ``training_setup`` puts ``model``,
``optimizer`` and examples together, a Trainer or the ``pytorch_loop`` trains, and
``checkpoint_schedule`` says when a ``checkpoint`` of the ``training_state`` is due. Before a run
goes on, ``resume_checks`` compares what is asked for with what was.
"""
