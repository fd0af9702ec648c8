"""Common file formats, without knowledge of runs; `trajstore.exchange` interprets the arrays.

A new format needs a subclass of `array_file.ArrayFile` and an entry in `open_file`.
"""
