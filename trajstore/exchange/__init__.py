"""Export and import of runs: files of other programs.

``layouts``
    Layouts of the notebooks' files (names, types, alignment), and names in native files.
``selection``
    Selection of the steps, tokens and variables to export.
``exporting``
    From runs to files, Zarr and tensors.
``importing``
    From files to runs.
``usual_names``
    Usual names of arrays and numbers in files.
"""
