"""A run on disk or in an object store.

``storage``
    The places: folders, object stores, atomic replacement, locks.
``metadata``
    The metadata: names, shapes, codecs, attributes, digests; the plan of the blocks.
``reading``
    Opening runs; arrays read past zarr.
``writing``
    Rows in, blocks out, each with an atomic commit; resumed, forked and labeled runs.

Where one step's array goes: `writing.writer` copies it to its place in a block. `block_commits`
hands a full block to `block_writer`, which encodes its chunks and puts one shard per array in
place. `commit` then replaces the metadata, the root last; from then on readers see the row.
"""
