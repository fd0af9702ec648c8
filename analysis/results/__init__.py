"""Results as tables and files.

``run_summary``
    What `summary` reports, as a Dataset.
``write_results``
    Results written to Zarr, NetCDF or CSV, or described in numbers.
"""
