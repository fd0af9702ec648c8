"""Results as tables and files.

``run_summary``
    The results of `summary`, as a Dataset.
``summary_table``
    Summaries of several runs as one table, one line per run.
``write_results``
    Write results to Zarr, NetCDF or CSV, or describe them in numbers.
"""
