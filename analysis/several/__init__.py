"""Several runs.

``divergence``
    How far several runs go apart.
``many_runs``
    Several runs in one Dataset, along `run`: each by itself, and functions of one run on all.
``run_comparison``
    Where two runs part, and how far they go.
"""
