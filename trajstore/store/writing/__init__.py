"""Writing a run.

``annotated_run``
    Annotations: a run gets more coordinates of its tokens; its rows stay.
``block_commits``
    The rows of an open run on their way to readers: blocks that are full, and the unfinished one.
``block_writer``
    From blocks to files, behind the training.
``branched_run``
    A run that begins with the first rows of another: by hard link, where nothing of them changes.
``commit``
    The commit: the documents by which the rows of written shards become part of a run.
``commit_timer``
    When rows are committed that are no whole block yet: so many seconds after the last commit.
``create``
    Where a run may be created, and its folder: whole and empty, or not there at all.
``new_run``
    What a new run is made of: its coordinates, checked, and all that it holds before a first row.
``replay_encoding``
    The rule by which a new run computes W and the moments.
``resumed_run``
    A run that is there, as a writer goes on with it: what is kept of it, and how it is stored.
``shared_run``
    A run that several processes write: planned, begun and committed by the first of them.
``token_share``
    The tokens of a run that one of several processes writes.
``writer``
    `RunWriter`: rows in, blocks out, each with an atomic commit.
"""
