"""Export of runs for other programs.

``branched_run``
    A new run from the first rows of another one: with its blocks, or written again.
``damaged_chunks``
    Damaged inner chunks of a run, exported as NaN.
``export``
    The public function: a run, or part of it, to safetensors, HDF5, Zarr or a new run.
``export_layout``
    Files in a layout: tensors, numbers and strings.
``joined_runs``
    Arrays of several runs in one file.
``layout_columns``
    Arrays of a file in a layout.
``layout_numbers``
    Numbers of a file in a layout.
``export_run``
    A selection of a run as a new run, with blocks of another size.
``export_zarr``
    A selection of a run as ordinary Zarr: a Dataset that every reader of Zarr v3 opens.
``to_torch``
    A selection of a run as torch tensors. The only module of the store that needs torch.
"""
