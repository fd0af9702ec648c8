"""Several runs.

``differences``
    Two arrays, vector by vector: in how many elements they differ, and how far they are apart.
``divergence``
    How far several runs go apart.
``many_runs``
    Several runs in one Dataset, along `run`: each by itself, and functions of one run on all.
``run_comparison``
    Where two runs part, and how far they go.
"""
