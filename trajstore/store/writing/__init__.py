"""Writing a run.

``annotated_run``
    Annotations: more token coordinates for a run, which keeps its rows.
``block_commits``
    Buffers and commits of the blocks of an open run, both full and unfinished.
``block_writer``
    Encoding and writing of blocks in background threads.
``commit``
    The commit: it writes the metadata that make the rows of written shards part of a run.
``commit_timer``
    Commits of unfinished blocks, a given number of seconds after the last commit.
``create``
    Creation of a run: checks of its path, and atomic creation of its folder.
``linked_run``
    A new run of hard links to the blocks of another one, with other metadata.
``new_run``
    Content of a new run before its first row: metadata and checked coordinates.
``compact_encoding``
    The rule by which a new run computes W and the moments.
``ready_memory``
    Memory of the blocks, which a thread asks for before the rows come.
``resumed_run``
    A stored run that a writer resumes: its kept rows and its layout.
``shared_run``
    A run that several processes write. The first one plans, creates and commits it.
``token_share``
    The tokens of a run that one of several processes writes.
``writer``
    `RunWriter`: it takes rows and writes blocks, each with an atomic commit.
"""
