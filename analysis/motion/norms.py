"""Norms over the hidden dimension: gradients and displacements."""

from __future__ import annotations

from typing import Literal

import dask.array as da
import numpy as np
import xarray as xr

from trajstore.analysis.scan import input_checks
from trajstore.analysis.scan.block_tasks import Array, measure
from trajstore.analysis.scan.input_checks import hold_only_changes
from trajstore.analysis.scan.quantity import quantity
from trajstore.analysis.scan.rows import measure_rows
from trajstore.analysis.scan.scan import Scan
from trajstore.errors import InvalidArgument
from trajstore.values.norms import result_dtype


def check_order(order: float) -> float:
    """Order of a norm as a number.

    Raises
    ------
    InvalidArgument
        If it is not 1, 2 or inf.
    """
    if order not in (1, 2, np.inf):
        raise InvalidArgument(f"got a norm of order {order!r}, expected 1, 2 or inf")
    return float(order)


def order_label(order: float) -> str:
    """Label of a norm of the given order."""
    return "Linf" if np.isinf(order) else f"L{order:.0f}"


def _measured(
    scan: Scan, name: str, *reference: tuple[da.Array, str], order: float = 2
) -> xr.DataArray:
    blocks = scan.blocks(name)
    dtype = result_dtype(blocks.dtype)
    data = measure(measure_rows, "st", blocks, *reference, order=order, dtype=dtype)
    return scan.wrap(data, name)


@quantity()
def grad_norms(scan: Scan, ord: float = 2) -> xr.DataArray:
    """Norm of each token's gradient, ‖grad_t,i‖.

    Parameters
    ----------
    ds : Dataset
        With ``grad`` (step, token, hidden). For order 2, a stored ``grad_token_norm`` is used
        instead of the gradients.
    ord : {1, 2, inf}
        Order of the norm.

    Returns
    -------
    DataArray, float32 (step, token)
        Accumulated in float64. NaN at row 0, before the first step.

    Raises
    ------
    VariableNotRecorded
        If the run holds no gradients.
    InvalidArgument
        For any other order.

    Examples
    --------
    >>> norms = grad_norms(ds)  # lazy
    >>> norms.sel(step=1, token=[ord("e"), ord("z")]).values.round(4)
    array([0.0916, 0.0087], dtype=float32)
    """
    order = check_order(ord)
    ds = scan.ds
    source = "grad_token_norm" if order == 2 and "grad_token_norm" in ds else "grad"
    if source == "grad":
        norms = _measured(scan, source, order=order)
    else:
        norms = ds[source].transpose("step", "token").drop_attrs()
    return norms.rename("grad_norms").assign_attrs(
        long_name=f"{order_label(order)} norm of the gradient",
        units=ds[source].attrs.get("units", "nat"),
    )


def _cumulated(blocks: da.Array) -> da.Array:
    """Cumulative sum of the changes after the first row, in float64: W relative to it."""
    # The change that led to the first row is not part of the displacement from it.
    later = np.arange(len(blocks)) > 0
    begin = measure(_without_first, "sth", blocks, later, dtype=np.float64)
    return da.cumsum(begin, axis=0, method="sequential")


def _without_first(block: Array, later: Array) -> Array:
    wide = block.astype(np.float64)
    wide[~later.ravel()] = 0
    return wide


@quantity()
def displacement(scan: Scan, since: int | Literal["first", "previous"] = "first") -> xr.DataArray:
    """Distance of each token from a reference row, ‖W_t − W_since‖₂.

    Parameters
    ----------
    ds : Dataset
        With ``W`` (step, token, hidden), or ``delta`` of every step. Without W, the changes are
        added in float64, with the precision of the file.
    since : int, 'first' or 'previous'
        Step of the reference, the first row, or the previous row. For ``'previous'``, a stored
        ``W_step_norm`` is used if the Dataset holds every row of the run.

    Returns
    -------
    DataArray, float32 (step, token)
        Computed in float64. With ``since='previous'`` it has one row fewer, and each row has the
        step of the later of its two rows.

    Raises
    ------
    StepNotFound
        If the run has no row for the step.
    InvalidArgument
        For any other `since`.

    Examples
    --------
    >>> displacement(ds).sel(step=[0, 1, 20], token=ord("e")).values.round(4)
    array([0.    , 0.0156, 0.2031], dtype=float32)
    """
    if since == "first":
        scan.require_rows(1, "displacement")
        since = int(scan.steps[0])
    if since == "previous":
        distance = scan.step_norm()
        origin = "the previous row"
    else:
        row = input_checks.row_of_step(scan.ds, int(since))
        distance = (
            _by_changes(scan, row)
            if hold_only_changes(scan.ds)
            else _measured(scan, "W", (scan.blocks("W")[row], "th"))
        )
        origin = f"step {since}"
    return distance.rename("displacement").assign_attrs(
        long_name=f"distance from {origin}", units=scan.units
    )


def _by_changes(scan: Scan, row: int) -> xr.DataArray:
    """Distance from a row, computed from recorded changes."""
    changes = scan.recorded()
    places = _cumulated(changes.blocks)
    data = measure(measure_rows, "st", places, (places[row], "th"), order=2, dtype=np.float64)
    return scan.wrap(data.astype(result_dtype(changes.blocks.dtype)), changes.variable)
