"""Fraction of the updates of each parameter of the model that a step lost."""

from __future__ import annotations

from collections.abc import Sequence

import dask.array as da
import numpy as np
import xarray as xr

from trajstore.analysis.scan.block_tasks import Array, measure
from trajstore.store.reading.run_info import parameter_dataset


def lost_by_parameter(ds: xr.Dataset, rows: Sequence[int]) -> xr.DataArray:
    """Fraction of a parameter's elements with a gradient ≠ 0 that a step did not change.

    Parameters
    ----------
    ds : Dataset
        A run of the tier ``everything``.
    rows : sequence of int
        Rows after the first. Each is read with the row before it, and no other row is.

    Returns
    -------
    DataArray, float64 (row, parameter)
        As ``param_update_lost``, from 0 to 1. NaN if the parameter has no gradient, or a gradient
        of zeros or with NaN. Also NaN if no step was taken, the learning rate is 0, or the row
        before is not the step before.
    """
    names = [entry["name"] for entry in ds.attrs["parameters"]]
    small = [name for name in ("params_lr", "params_count", "lr", "skipped") if name in ds]
    ds = ds[["W", "grad", "params", "params_grad", *small]]
    counts, known = [], []
    for row in rows:
        pair = ds.isel(step=slice(row - 1, row + 1))
        pair = pair.assign(pair[small].load())  # once, not for each parameter
        ones = [parameter_dataset(pair, name) for name in names]
        counts.append(da.stack([_counts(one) for one in ones]))
        known.append([_is_taken(one) for one in ones])
    counted = xr.DataArray(da.stack(counts), dims=("row", "parameter", "kind"))
    wanted, lost, nan = (counted.isel(kind=kind) for kind in range(3))
    fraction: xr.DataArray = (lost / wanted.where(wanted > 0)).where((nan == 0) & np.array(known))
    return fraction.assign_coords(parameter=names)


def _count_kernel(before: Array, after: Array, gradient: Array) -> Array:
    wanted = gradient != 0
    lost = wanted & (before == after)
    return np.array([[[wanted.sum(), lost.sum(), np.isnan(gradient).sum()]]])


def _counts(pair: xr.Dataset) -> da.Array:
    """Elements of a parameter with a gradient, of these the unchanged ones, and NaN: (3)."""
    before, after = pair["W"].data
    gradient = pair["grad"].data[1].rechunk(before.chunks)  # blocks are paired by position
    counts = measure(
        _count_kernel,
        "rck",
        *((array, "rc") for array in (before, after, gradient)),
        dtype=np.int64,
        sizes={"r": 1, "c": 1, "k": 3},
    )
    return counts.sum((0, 1))


def _is_taken(pair: xr.Dataset) -> bool:
    """True if the optimizer took the step between two rows, with a rate that is not 0."""
    last = pair.isel(step=1)
    return bool(
        np.diff(pair["step"].values) == 1
        and ("lr" not in last or last["lr"].values != 0)
        and ("skipped" not in last or last["skipped"].values != 1)
    )
