"""Metadata of a run: names, shapes, codecs, attributes, digests.

``array_metadata``
    The metadata of an array, made from a few facts and compared with them.
``block_plan``
    The planner: how many rows make a block, how tokens are split into chunks, what memory it takes.
``metadata_form``
    The form of the root's metadata: its members, their types and possible values.
``fingerprint``
    Digests of the stored content of a run, updated with each block.
``fork_provenance``
    Optimizers of a fork's steps, from its provenance.
``object_keys``
    Names of the objects of a run, and of the files next to it.
``segments``
    Segments of a run: the steps trained with one configuration.
``zarr_json``
    The `zarr.json` metadata of a run.
"""
