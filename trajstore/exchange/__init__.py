"""Export and import of runs: files of other programs.

``layouts``
    Layouts of the notebooks' files (names, types, alignment), and names in native files.
``selection``
    Selection of the steps, tokens and variables to export.
``exporting``
    From runs to files, Zarr and tensors.
``importing``
    From files to runs.
``guessing``
    Detection of the variable that each array of a file holds.
"""
