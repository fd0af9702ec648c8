"""Metadata of a run: names, shapes, codecs, attributes, digests.

``block_plan``
    The planner: how many rows make a block, how tokens are split into chunks, what memory it takes.
``document_form``
    The form of a run's documents: their members, types and values.
``fingerprint``
    Digests of the stored content of a run, updated with each block.
``fork_provenance``
    Optimizers of a fork's steps, from its provenance.
``object_keys``
    Names of the objects of a run, and of the files next to it.
``repairs``
    Values and arrays that repairs removed from a run.
``schema_check``
    Comparison of the arrays' metadata with the schema, so that values are read as recorded.
``stretches``
    Stretches of a run: the steps trained with one configuration.
``zarr_json``
    The `zarr.json` documents of a run.
"""
