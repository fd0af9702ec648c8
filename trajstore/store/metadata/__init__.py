"""Metadata of a run: names, shapes, codecs, attributes, digests.

``block_plan``
    The planner: how many rows make a block, how tokens are split into chunks, what memory it takes.
``document_form``
    The form of a run's documents: their members, types and values.
``fingerprint``
    What tells one run from another: digests of all that is stored of it, row by row.
``fork_provenance``
    What a fork's provenance says of the optimizers that made its steps.
``object_keys``
    Names of the objects of a run, and of the files beside it.
``repairs``
    Values and arrays that repairs removed from a run.
``schema_check``
    Whether the arrays of a run are described as the schema has them, and so read as recorded.
``shard``
    Assembly of a shard: encoded inner chunks, and behind them what `BlockForm` says of them.
``stretches``
    The stretches of a run: from which step on each of its configurations holds.
``zarr_json``
    The `zarr.json` documents of a run.
"""
