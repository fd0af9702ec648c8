"""Results as tables and files.

``summary_tables``
    The tables that the notebooks print at their end.
``write_results``
    Analysis results to files, block by block: Zarr, NetCDF or CSV, by the ending of the name.
"""
