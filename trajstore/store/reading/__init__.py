"""Reading of a run: its group, checked; lazy Datasets; arrays without zarr; facts and settings."""
