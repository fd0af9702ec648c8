"""The recorded gradients, applied with other settings of the optimizer.

``what_if`` makes a run of them. ``settings`` is what may be changed, ``changed_rates`` what that
makes of the learning rates and of clipping; ``planned_counterfactual`` puts that together and
refuses what is impossible. ``counterfactual_rows`` then makes row after row, with the real
optimizer, which starts from a recorded state.
"""
