"""Recorded gradients, applied with other settings of the optimizer.

``what_if`` writes the result as a run. ``settings`` defines what may change. ``changed_rates``
computes the learning rates and clipping factors. ``planned_counterfactual`` combines them and
raises errors before anything is written. ``counterfactual_rows`` computes the rows with the real
optimizer, which starts from a recorded state.
"""
