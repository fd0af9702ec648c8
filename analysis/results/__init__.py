"""Results as tables and files.

``run_summary``
    What `summary` reports, as a Dataset.
``summary_table``
    Summaries of several runs as one table: a line for each.
``write_results``
    Results written to Zarr, NetCDF or CSV, or described in numbers.
"""
