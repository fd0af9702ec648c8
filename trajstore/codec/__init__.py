"""Bits to bytes: how a block is encoded, checked and decoded.

The path of one chunk: ``codec_chain``, named by the metadata of the run, encodes it. It computes
differences along step (``delta``) or to a prediction over tokens (``predicted_rows``), compresses
them with Blosc, and appends a ``crc32c_check``. ``shard`` joins the chunks of a block to one object
(``block_form``), with an index and the ``block_label``, which names its place. ``chunk_decoder``
checks a chunk, decompresses the selected part, and adds the differences. ``scratch_memory`` holds
the intermediate results; each thread reuses its own.

``computed_rows`` computes W and the moments from the gradient and stored corrections;
``adam_loop`` is its compiled loop, ``prediction_loop`` that of ``predicted_rows``.

All readers use ``open_block``, which reads only the parts of chunks that it needs
(``selected_parts``), from a ``block_object``: a file, bytes, or a key of a store. zarr and xarray
read through ``block_codec``, which zarr finds by its entry point, and ``selected_block``.
"""
