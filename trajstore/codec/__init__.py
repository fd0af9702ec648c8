"""Bits to bytes: how one chunk is encoded, checked and decoded.

Where one chunk goes: its ``codec_chain``, which the run's metadata names, takes differences along
step (``delta``), has Blosc compress them, and puts their ``crc32c_check`` behind. Back,
``chunk_decoder`` checks that, has Blosc decompress only what is wanted (``blosc_frame`` cuts it
out), and adds the differences up again. What lies between is in ``scratch_memory``, which each
thread uses again.

zarr by itself, which finds the codec in ``delta`` by its entry point, makes and reads the same
bytes.
"""
