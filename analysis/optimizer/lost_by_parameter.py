"""Fraction of the updates of each parameter of the model that a step lost."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import xarray as xr

from trajstore.store.reading.recorded_parameters import parameter_dataset

__all__ = ["lost_by_parameter"]


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
        As ``param_update_lost``: NaN without a gradient, for a gradient of zeros or with NaN, a
        learning rate of 0, a skipped step, and a row whose step does not follow that of the row
        before.
    """
    names = [entry["name"] for entry in ds.attrs["parameters"]]
    found = []
    for row in rows:
        pair = ds.isel(step=slice(row - 1, row + 1))
        found.append(
            xr.concat([_lost(parameter_dataset(pair, name)) for name in names], "parameter")
        )
    return xr.concat(found, "row").assign_coords(parameter=names)


def _lost(pair: xr.Dataset) -> xr.DataArray:
    """The fraction of one parameter in the step between two rows."""
    before, after = pair["W"].isel(step=0, drop=True), pair["W"].isel(step=1, drop=True)
    last = pair.isel(step=1, drop=True)
    with_gradient = last["grad"] != 0
    wanted = with_gradient.sum()
    known = last["grad"].notnull().all()
    if "lr" in last:
        known &= last["lr"] != 0
    if "skipped" in last:
        known &= last["skipped"] != 1
    if np.diff(pair["step"].values) != 1:
        known &= False
    lost = (with_gradient & (before == after)).sum()
    fraction: xr.DataArray = (lost / wanted.where(wanted > 0)).where(known)
    return fraction
