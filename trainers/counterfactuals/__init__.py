"""The recorded gradients, applied with other settings of the optimizer.

``what_if`` makes a run of them. ``settings`` is what may be changed, ``changed_rates`` what that
makes of the learning rates and of clipping, and ``open_loop`` the real optimizer that goes on from
a recorded state.
"""
