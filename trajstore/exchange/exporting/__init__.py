"""Runs as files for other programs.

``export_hdf5``
    Runs as HDF5 files with the names that users of HDF5 give: W, grad_W, momentum_W, losses.
``export_layout``
    Runs as the files of the notebooks: tensors, numbers and texts of a layout.
``export_native``
    Runs as safetensors files with their own names and types, and all that an import needs.
``export``
    Runs, or parts of them, as files for other programs, or as runs again: what chooses the format.
``export_run``
    A selection of a run as a run again, with blocks of another size.
``export_zarr``
    A selection of a run as ordinary Zarr: a Dataset that every reader of Zarr v3 opens.
``exported_file``
    What a file will hold of a run, whatever its format: tensors, texts, and what to say of them.
``to_torch``
    A selection of a run as torch tensors. The only place of the store that needs torch.
``variable_tensor``
    A selection of a recorded variable as the tensor of a file.
"""
