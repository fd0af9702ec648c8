"""Models of recorded steps, from runs that hold all parameters.

``recorded_parameters`` finds the parameters of a run and reads their rows. ``step_model`` builds
the model and sets its parameters to those of a step. ``optimizer_state`` builds the state dict of
the optimizer, and ``restore`` sets both in a loop of the user. ``run_tokenizer`` finds the
tokenizer, and ``checkout`` writes all of them to a folder.
"""
