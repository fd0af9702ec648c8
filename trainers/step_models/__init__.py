"""Models and optimizers of recorded steps, from runs that hold all parameters."""
