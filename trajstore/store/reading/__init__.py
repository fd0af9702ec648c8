"""Reading a run.

``array_reader``
    The arrays of a run as their shards hold them: native bits, labels, indices.
``checked_documents``
    The documents of a run as they are read: checked, and compared with the stored objects.
``open_group``
    The Zarr group that a run is, checked.
``open_run``
    Opening a run: the Dataset that plain `xr.open_zarr` gives, with checks.
``open_runs``
    Opening many runs: one lazy Dataset along `run`.
``run_info``
    What a run is: the facts that `trajstore info` prints.
``run_paths``
    Which runs are meant: names, patterns, and folders of sweeps.
``run_settings``
    Settings of runs: one by its path, those that differ between runs, and labels of these.
``run_table``
    Several runs as a table: what each is, and in which settings they differ.
``stored_forms``
    Forms of the chunks of a replayed run, and corrections of what its rule gives, counted.
``tiled_reader``
    A run as exporters read it: variables in tiles, small enough to hold and large enough to be fast
``xarray_engine``
    xarray's engine `trajstore`: a run as a lazy Dataset, `xr.open_dataset(path)`.
"""
