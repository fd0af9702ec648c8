"""Runs as files for other programs.

``export``
    Runs, or parts of them, as files, as Zarr or as runs again: the function that picks the format.
``export_layout``
    Runs as the files of the notebooks: tensors, numbers and texts of a layout.
``export_native``
    Files with all of a run: safetensors with its own names, HDF5 with those that its users know.
``export_run``
    A selection of a run as a run again, with blocks of another size.
``export_zarr``
    A selection of a run as ordinary Zarr: a Dataset that every reader of Zarr v3 opens.
``exported_file``
    What a file will hold of a run, whatever its format: tensors, texts, and notes for its reader.
``to_torch``
    A selection of a run as torch tensors. The only place of the store that needs torch.
"""
