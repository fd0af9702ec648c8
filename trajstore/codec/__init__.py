"""Bits to bytes: how one block is encoded, checked and decoded.

The path of one chunk: ``codec_chain``, as described in the run's metadata, computes differences
along step (``delta``) or to a prediction over tokens (``predicted_rows``). Blosc compresses them,
and ``crc32c_check`` appends a checksum. The chunks of a block are one object. ``block_form``
defines its end: the ``block_label``, which records the block's place, and an index. To read,
``chunk_decoder`` checks a chunk, decompresses the selected part with Blosc, and sums the
differences. ``scratch_memory`` provides reusable buffers for each thread.

If W and the moments are computed from the gradient, ``computed_rows`` stores their corrections.

zarr and xarray read through ``block_codec``, which zarr finds by its entry point. It reads only the
parts of chunks that a selection needs (``selected_parts``).
"""
