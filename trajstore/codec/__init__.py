"""Bits to bytes: how one block is encoded, checked and decoded.

Where one chunk goes: its ``codec_chain``, which the run's metadata names, takes differences along
step (``delta``) or to a prediction over tokens (``predicted_rows``), has Blosc compress them, and
puts their ``crc32c_check`` behind. The chunks of a
block are one object, and ``block_form`` says how it ends: with the ``block_label``, by which it
knows its place, and an index. Back, ``chunk_decoder`` checks a chunk, has Blosc decompress only
what is wanted, and adds the differences up again. What lies between is in ``scratch_memory``,
which each thread uses again.

Where W and the moments follow from the gradient, ``computed_rows`` holds their corrections.

zarr and xarray come by ``block_codec``, which zarr finds by its entry point: it takes a selection,
looks up in ``selected_parts`` what that needs of each chunk, and reads no more.
"""
