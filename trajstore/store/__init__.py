"""A run on disk or in an object store.

``storage``
    Places of runs: folders, object stores, atomic replacement, locks.
``metadata``
    Metadata: names, shapes, codecs, attributes, digests, the plan of the blocks.
``reading``
    Opening runs; reading arrays without zarr.
``writing``
    Writing rows in blocks, each with an atomic commit; resuming, forking and labeling runs.

The path of one step's array: `writing.writer` copies it to its place in a block. `block_commits`
passes a full block to `block_writer`, which encodes its chunks and writes one shard per array.
`commit` then replaces the metadata, the root last. From then on readers see the row.
"""
