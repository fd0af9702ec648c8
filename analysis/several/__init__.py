"""Several runs.

``differences``
    Differences of two arrays per vector: number of differing elements, and distance.
``divergence``
    Distances between several runs over time.
``many_runs``
    Several runs in one Dataset along `run`: selection, and functions applied to each run.
``run_comparison``
    First difference of two runs, and their distance.
"""
