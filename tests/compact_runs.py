"""Runs of the encoding `compact` from the sample run, whose optimizer has a rule."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import xarray as xr

from trajstore import export

RULE_ARRAYS = ("W", "exp_avg", "exp_avg_sq")


def sample_part(sample: Path, path: Path, rows: int = 22, **options: Any) -> Path:
    """The first rows of the sample run in blocks of 8, of the encoding `compact`."""
    options = {"block_rows": 8, "encoding": "compact"} | options
    export(sample, path, steps=f"0:{rows}", **options)
    return path


def same_bits(one: Path, other: Path, rows: int | None = None) -> xr.Dataset:
    """The second run; what it holds are, bit for bit, the first rows of the first."""
    ds, whole = xr.open_zarr(other).load(), xr.open_zarr(one).load().isel(step=slice(rows))
    for name in ds.variables:
        assert ds[name].dtype == whole[name].dtype, name
        assert ds[name].values.tobytes() == whole[name].values.tobytes(), name
    return ds
