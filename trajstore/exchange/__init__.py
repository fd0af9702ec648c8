"""Runs to and from files of other programs.

``layouts``
    The layouts of the notebooks' files: names, types, alignment.
``selection``
    Which steps, tokens and variables are exported.
``key_names``
    Names in trajstore's own files, which exports write and imports read.
``exporting``
    Runs as files, Zarr, tensors.
``importing``
    Files as runs.
``guessing``
    Which array of a file holds which variable.
"""
