"""A run that another process records, looked at from outside, as often as one likes.

``run_follower`` opens it anew when it has grown, been cut or been replaced, and reads what is new;
``row_measures`` makes a few numbers of each row, within a budget; a ``bounded_curve`` keeps them,
however many they become; ``recording_pace`` tells how fast it goes and when it will be done.
Nothing is written, and nothing is locked.
"""
