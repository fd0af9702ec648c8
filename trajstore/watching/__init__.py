"""A run that another process records, looked at from outside, as often as one likes.

``run_follower`` opens it anew when it has grown, been cut or been replaced, and reads what is new,
within a budget. ``followed_runs`` does so with several, and waits for those of a sweep.
``measures`` holds what it keeps: bounded curves, the pace of the recording, and a few numbers of
each row. Nothing is written, and nothing is locked.
"""
