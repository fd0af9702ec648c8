"""Follow a run that another process records.

``run_follower`` reopens a run that has grown, been cut or been replaced, and reads new rows
within a budget. ``followed_runs`` follows several runs, and waits for those of a sweep.
``measures`` holds the collected values: bounded curves, the recording rate, and a few numbers per
row. Following writes nothing and takes no lock.
"""
