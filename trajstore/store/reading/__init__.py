"""Reading a run.

``array_reader``
    Stored arrays, read without zarr: native bits, labels, indices.
``checked_metadata``
    The metadata of a run, checked and compared with the stored objects.
``open_group``
    The Zarr group of a run, checked.
``open_run``
    Opening a run: the Dataset that `xr.open_zarr` returns, with checks.
``open_runs``
    Opening many runs: one lazy Dataset along `run`.
``recorded_parameters``
    Single parameters of a run that holds the state of the whole model.
``run_info``
    Facts about a run, which `trajstore info` prints.
``run_paths``
    Paths of runs, from names, patterns and folders.
``run_settings``
    Settings of runs, those that differ between runs, and labels made from them.
``run_table``
    A table of several runs: their facts, and the settings in which they differ.
``tiled_reader``
    Reading for exporters, in tiles that fit into memory and are fast to decode.
``unzipped_run``
    A run in a zip file, unpacked for what reads a folder.
``xarray_engine``
    xarray's engine `trajstore`: a run as a lazy Dataset, `xr.open_dataset(path)`.
"""
