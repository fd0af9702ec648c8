"""Runs to and from files of other programs.

``layouts``
    The layouts of the notebooks' files, and names in trajstore's own: names, types, alignment.
``selection``
    Which steps, tokens and variables are exported.
``exporting``
    Runs as files, Zarr, tensors.
``importing``
    Files as runs.
``guessing``
    Which array of a file holds which variable.
"""
