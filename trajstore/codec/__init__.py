"""Bits to bytes and back: how the chunks of a block are encoded, checked, selected and decoded.

`block_codec`, which zarr finds by its entry point, and `array_reader` of `trajstore.store` select
with `array_selection`, and read with `open_block`.
"""
