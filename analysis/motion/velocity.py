"""Velocity, speed and acceleration, in units of W per optimizer step."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import xarray as xr

from trajstore.analysis.scan.quantity import quantity
from trajstore.analysis.scan.scan import Scan
from trajstore.values.norms import result_dtype


def displacements(later: npt.NDArray[Any], earlier: npt.NDArray[Any]) -> npt.NDArray[np.float64]:
    """Change between two rows, for `Scan.between_rows`."""
    return np.asarray(np.subtract(later, earlier, dtype=np.float64))


def _velocity(scan: Scan) -> xr.DataArray:
    """Velocity in float64, (step, token, hidden)."""
    spacing = scan.spacing()
    return scan.between_rows(scan.recorded(), displacements, np.float64) / spacing


def _result(da: xr.DataArray, scan: Scan, name: str, long_name: str) -> xr.DataArray:
    dtype = result_dtype(scan.recorded().blocks.dtype)
    return (
        da.astype(dtype)
        .rename(name)
        .assign_attrs(long_name=long_name, units=f"{scan.units} per step")
    )


@quantity()
def velocity(scan: Scan) -> xr.DataArray:
    """Change of W per optimizer step, ΔW_t/(s_t − s_{t−1}).

    Parameters
    ----------
    ds : Dataset
        With ``W`` (step, token, hidden), or ``delta`` of every step.

    Returns
    -------
    DataArray, float32 (step, token, hidden)
        One row fewer than `ds`. Each has the step of the later of its two rows.

    Examples
    --------
    >>> velocity(ds).sel(step=1, token=ord("e")).values
    array([ 0.0078125,  0.0078125, -0.0078125,  0.0078125], dtype=float32)
    """
    return _result(_velocity(scan), scan, "velocity", "change of W per step")


@quantity(measures=("step_norm",))
def speed(scan: Scan) -> xr.DataArray:
    """Length of the velocity, ‖ΔW_t‖₂/(s_t − s_{t−1}).

    Parameters
    ----------
    ds : Dataset
        With ``W``, a stored ``W_step_norm``, or ``delta`` of every step.

    Returns
    -------
    DataArray, float32 (step, token)
        One row fewer than `ds`.

    Examples
    --------
    >>> speed(ds).sel(step=[1, 14], token=ord("e")).values  # unchanged at step 14
    array([0.015625, 0.      ], dtype=float32)
    """
    norm = scan.step_norm()
    return (
        (norm / scan.spacing())
        .astype(norm.dtype)
        .rename("speed")
        .assign_attrs(long_name="length of the velocity", units=f"{scan.units} per step")
    )


@quantity()
def acceleration(scan: Scan) -> xr.DataArray:
    """Change of the velocity from one recorded row to the next.

    Parameters
    ----------
    ds : Dataset
        With ``W`` (step, token, hidden), or ``delta`` of every step.

    Returns
    -------
    DataArray, float32 (step, token, hidden)
        Two rows fewer than `ds`. Units of W per step: the velocities are divided by the spacing
        between rows, but their difference is not.

    Examples
    --------
    >>> acceleration(ds).sel(step=14, token=ord("e")).values  # the step at which it stops
    array([-0.0078125, -0.0078125,  0.0078125, -0.0078125], dtype=float32)
    """
    velocities = _velocity(scan)
    change = velocities.isel(step=slice(1, None)) - velocities.isel(step=slice(None, -1)).drop_vars(
        "step"
    )
    return _result(change, scan, "acceleration", "change of the velocity between rows")
