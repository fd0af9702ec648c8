"""First and last steps at which curves cross levels."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import xarray as xr

from trajstore.analysis.scan import input_checks
from trajstore.analysis.scan.block_tasks import Array, Wide, measure
from trajstore.analysis.scan.input_checks import Fact, dataset
from trajstore.analysis.scan.quantity import QUANTITIES, quantity
from trajstore.analysis.scan.rows import fold
from trajstore.analysis.scan.scan import Scan
from trajstore.errors import InvalidArgument
from trajstore.schema import RECORDED

LEVELS = (0.5, 0.9, 0.99)


def _follow(state: Any, curves: Array, levels: Wide, downward: bool) -> tuple[Wide, ...]:
    """First and last row at which each level was crossed, (level, curve); −1 means none.

    Also returns the last side of each level (0 before the first number), and the number of rows.
    """
    shape = (levels.size, curves.shape[1])
    first, last, side, rows = state or (*np.full((2, *shape), -1.0), np.zeros(shape), np.zeros(()))
    for row in curves:
        now = np.where(np.isnan(row), side, np.where(row >= levels[:, None], 1.0, -1.0))
        passed = (side != 0) & (now != side) & ((now > 0) | downward)
        first = np.where(passed & (first < 0), rows, first)
        last = np.where(passed, rows, last)
        side, rows = now, rows + 1
    return first, last, side, rows


def _steps_of_both(state: tuple[Wide, ...], steps: Array) -> npt.NDArray[np.int64]:
    rows = np.stack(state[:2]).astype(np.int64)
    return np.where(rows < 0, -1, steps[rows])


def _fraction_of_change(curves: Array, ends: Array) -> Wide:
    """Values as fractions of the change from the first to the last value, (row, curve)."""
    start = np.where(np.isnan(ends[0]), ends[1], ends[0]).astype(np.float64)
    return np.asarray((curves - start) / (ends[2] - start))


@quantity()
def crossings(
    scan: Scan,
    quantity: str | xr.DataArray = "displacement",
    levels: Sequence[float] | float = LEVELS,
    of: Literal["change", "value"] = "change",
) -> xr.Dataset:
    """First and last step at which a curve crosses levels, such as 50 % of its change.

    Parameters
    ----------
    ds : Dataset
        A run.
    quantity : str or DataArray
        The curve: a quantity with default options (``displacement``), one of its variables
        (``freeze.frozen_fraction``), a recorded variable (``loss``), or an array along step.
    levels : float or sequence of float
        Levels to cross.
    of : {'change', 'value'}
        Meaning of the levels: fractions of the change from the curve's first value (or its second,
        if the first is NaN) to its last value, or values of the curve.

    Returns
    -------
    Dataset, int64 (level, …)
        ``first_crossing``, the first step at which the curve is at or beyond the level, after a
        step at which it was not; ``last_crossing``, the last such step. Fractions of the change are
        crossed from below only, values from either side. −1 if there is no crossing. The result has
        the other dimensions of the curve.

    Raises
    ------
    InvalidArgument
        If the quantity is unknown, has several variables, or does not depend on step.
    VariableNotRecorded
        If the variable was not recorded.

    Examples
    --------
    >>> crossings(ds).first_crossing.sel(token=ord("e")).values
    array([ 7, 12, 13])
    """
    curve = _curve(scan, quantity) if isinstance(quantity, str) else quantity
    wanted = np.atleast_1d(np.asarray(levels, np.float64))
    if not wanted.size or not np.isfinite(wanted).all():
        raise InvalidArgument(f"got levels={levels!r}, expected finite numbers")
    if "step" not in curve.dims or not curve.sizes["step"] or curve.dtype.kind not in "biuf":
        raise InvalidArgument(
            f"crossings require a numeric curve along step, got {curve.name} with "
            f"{dict(curve.sizes)} of {curve.dtype}"
        )
    curve = curve.transpose("step", ...)
    others = curve.shape[1:]
    data = curve.data if curve.chunks is not None else curve.chunk().data
    # One chunk along all but the first dimension after step, so that they can be merged.
    data = data.rechunk(dict.fromkeys(range(2, data.ndim), -1))
    flat = data.reshape((len(data), int(np.prod(others))))
    if of == "change":
        ends = flat[np.array([0, min(1, len(data) - 1), len(data) - 1])].rechunk({0: -1})
        flat = measure(_fraction_of_change, "sc", (flat, "sc"), (ends, "ec"), dtype=np.float64)
    found = fold(
        _follow,
        flat,
        finish=functools.partial(_steps_of_both, steps=curve["step"].values),
        sizes=(2, wanted.size),
        dtype=np.int64,
        levels=wanted,
        downward=of == "value",
    ).reshape((2, wanted.size, *others))
    coords = {
        name: values for name, values in curve.coords.items() if "step" not in values.dims
    } | {"level": wanted}
    meaning = "as a fraction of its change" if of == "change" else "as a value"
    dims = ("level", *map(str, curve.dims[1:]))
    variables = {}
    for number, which in enumerate(("first", "last")):
        text = f"{which} step at which {curve.name} crosses the level, {meaning}"
        fact = Fact("i8", text, flags={-1: "never"})
        variables[f"{which}_crossing"] = dims, found[number], fact
    return dataset(variables, coords)


def _curve(scan: Scan, quantity: str) -> xr.DataArray:
    name, _, variable = quantity.partition(".")
    if name not in QUANTITIES and not variable and name in scan.ds.data_vars:
        return scan.ds[name]
    if name in RECORDED and not variable and name not in QUANTITIES:
        input_checks.variables(scan.ds, name)  # raises with the option that records it
    if name not in QUANTITIES or name == "crossings":
        raise InvalidArgument(
            f"got quantity={quantity!r}, expected a recorded variable or one of "
            f"{', '.join(known for known in QUANTITIES if known != 'crossings')}"
        )
    found = QUANTITIES[name].function(scan)
    if isinstance(found, xr.DataArray) and not variable:
        return found
    curves = (
        [str(key) for key, array in found.data_vars.items() if "step" in array.dims]
        if isinstance(found, xr.Dataset)
        else []
    )
    if variable not in curves:
        raise InvalidArgument(
            f"got quantity={quantity!r}, expected "
            + (" or ".join(f"{name}.{curve}" for curve in curves) or name)
        )
    curve: xr.DataArray = found[variable]
    return curve
