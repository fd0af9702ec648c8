"""Steps at which curves cross levels, and at which the pace of motion changes abruptly."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Annotated, Any, Literal

import numpy as np
import numpy.typing as npt
import xarray as xr

from trajstore.analysis.motion.vectors import speed
from trajstore.analysis.scan import input_checks
from trajstore.analysis.scan.block_tasks import Array, Wide, along, fold, measure
from trajstore.analysis.scan.quantity import quantities_of_one_pass, quantity
from trajstore.analysis.scan.result_variables import ResultVariable, dataset, table
from trajstore.analysis.scan.scan import Scan
from trajstore.arguments import Bound, Positive
from trajstore.errors import InvalidArgument
from trajstore.schema import RECORDED

LEVELS = (0.5, 0.9, 0.99)

_RESULTS = {
    "first_crossing": "first step at which {} crosses",
    "last_crossing": "last step at which {} crosses",
    "first_above": "first step at which {} is not below",
}


def _follow(state: Any, curves: Array, levels: Wide, downward: bool) -> tuple[Wide, ...]:
    """First and last row at which each level was crossed, and first row at or above it; −1: none.

    They are (level, curve). Also returns the last side of each level (0 before the first number),
    and the number of rows.
    """
    shape = (levels.size, curves.shape[1])
    none = np.full((3, *shape), -1.0)
    first, last, above, side, rows = state or (*none, np.zeros(shape), np.zeros(()))
    for row in curves:
        now = np.where(np.isnan(row), side, np.where(row >= levels[:, None], 1.0, -1.0))
        passed = (side != 0) & (now != side) & ((now > 0) | downward)
        first = np.where(passed & (first < 0), rows, first)
        last = np.where(passed, rows, last)
        above = np.where((now > 0) & (above < 0), rows, above)
        side, rows = now, rows + 1
    return first, last, above, side, rows


def _steps_of_rows(state: tuple[Wide, ...], steps: Array) -> npt.NDArray[np.int64]:
    rows = np.stack(state[:3]).astype(np.int64)
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
    """Steps at which a curve crosses levels, such as 50 % of its change, or first exceeds them.

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
        crossed from below only, values from either side. ``first_above``, the first step at which
        the curve is not below the level, also if it starts there. −1 if there is no such step.
        The result has the other dimensions of the curve.

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
    chosen_levels = np.atleast_1d(np.asarray(levels, np.float64))
    if not chosen_levels.size or not np.isfinite(chosen_levels).all():
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
        flat = measure(
            _fraction_of_change,
            along(flat, "step", "curve"),
            along(ends, "end", "curve"),
            dims=("step", "curve"),
            dtype=np.float64,
        )
    crossing_steps = fold(
        _follow,
        flat,
        finish=functools.partial(_steps_of_rows, steps=curve["step"].values),
        sizes=(3, chosen_levels.size),
        dtype=np.int64,
        levels=chosen_levels,
        downward=of == "value",
    ).reshape((3, chosen_levels.size, *others))
    coords = {
        name: values for name, values in curve.coords.items() if "step" not in values.dims
    } | {"level": chosen_levels}
    meaning = "as a fraction of its change" if of == "change" else "as a value"
    dims = ("level", *map(str, curve.dims[1:]))
    variables = {}
    for number, (name, which) in enumerate(_RESULTS.items()):
        text = which.format(curve.name) + f" the level, {meaning}"
        fact = ResultVariable("i8", text, flags={-1: "never"})
        variables[name] = dims, crossing_steps[number], fact
    return dataset(variables, coords)


def _curve(scan: Scan, quantity: str) -> xr.DataArray:
    name, _, variable = quantity.partition(".")
    quantities = quantities_of_one_pass()
    if name not in quantities and not variable and name in scan.ds.data_vars:
        return scan.ds[name]
    if name in RECORDED and not variable and name not in quantities:
        input_checks.require_variables(scan.ds, name)  # raises with the option that records it
    if name not in quantities or name == "crossings":
        raise InvalidArgument(
            f"got quantity={quantity!r}, expected a recorded variable or one of "
            f"{', '.join(known for known in quantities if known != 'crossings')}"
        )
    result = quantities[name].function(scan)
    if isinstance(result, xr.DataArray) and not variable:
        return result
    curves = (
        [str(key) for key, array in result.data_vars.items() if "step" in array.dims]
        if isinstance(result, xr.Dataset)
        else []
    )
    if variable not in curves:
        raise InvalidArgument(
            f"got quantity={quantity!r}, expected "
            + (" or ".join(f"{name}.{curve}" for curve in curves) or name)
        )
    curve: xr.DataArray = result[variable]
    return curve


# Changes of the mean motion by less than 5 % per row are never significant. Neither is motion below
# 1 % of the run's maximum: when nearly all tokens are frozen, one moving token is no discontinuity.
_LEAST_SCATTER = 0.05
_LEAST_MOTION = 0.01
# A median absolute deviation of normal scatter, in standard deviations.
_MAD_TO_SIGMA = 1.4826
_FEWEST_NEIGHBORS = 4


def _mean(pace: npt.NDArray[Any]) -> npt.NDArray[np.float64]:
    return np.asarray(pace.astype(np.float64).mean(-1))


_DISCONTINUITIES = {
    "mean_speed": ResultVariable("f8", "mean speed of all tokens"),
    "discontinuity_score": ResultVariable("f8", "robust z-score of the change of log mean speed"),
    "discontinuity": ResultVariable("bool", "abrupt change of pace", None),
}


def _pace(motion: npt.NDArray[Any], window: int, threshold: float) -> dict[str, npt.NDArray[Any]]:
    """Variables of `discontinuities`, from the mean speed of every row."""
    scores = _scores(motion, window)
    return dict(zip(_DISCONTINUITIES, (motion, scores, abs(scores) > threshold), strict=True))


def _scores(motion: npt.NDArray[Any], window: int) -> npt.NDArray[np.float64]:
    """Robust z-score of the change of log motion per row; NaN with too few neighbors."""
    scores = np.full(motion.shape, np.nan)
    finite = motion[np.isfinite(motion)]
    floor = _LEAST_MOTION * finite.max(initial=0)
    if floor == 0:
        return scores
    change = np.diff(np.log(np.where(np.isfinite(motion), motion, np.inf) + floor), prepend=np.nan)
    for row in range(1, motion.size):
        near = np.concatenate(
            [change[max(1, row - window) : row], change[row + 1 : row + 1 + window]]
        )
        near = near[np.isfinite(near)]
        if near.size >= _FEWEST_NEIGHBORS:
            usual = np.median(near)
            scatter = _MAD_TO_SIGMA * np.median(np.abs(near - usual)) + _LEAST_SCATTER
            scores[row] = (change[row] - usual) / scatter
    return scores


@quantity(measures=("step_norm",))
def discontinuities(
    scan: Scan, window: Annotated[int, Bound("of at least", 2)] = 10, threshold: Positive = 8.0
) -> xr.Dataset:
    """Steps at which the mean speed changes abruptly.

    A run that was resumed from a wrong checkpoint moves smoothly before and after, but its pace
    changes at the resume. The score of a row is the change of log(mean speed) from the previous
    row, minus the median change at up to `window` rows on either side, in robust standard
    deviations (1.4826 × the median absolute deviation, plus 0.05). 1 % of the run's maximum is
    added to every speed before the logarithm.

    Parameters
    ----------
    ds : Dataset
        With ``W``, or a stored ``W_step_norm``.
    window : int
        Neighbors on either side, at least 2.
    threshold : float
        Absolute score above which a row is a discontinuity. Clean runs stay below 5.

    Returns
    -------
    Dataset, (step), one row fewer than `ds`
        ``mean_speed``, float64; ``discontinuity_score``, float64, NaN with fewer than 4 neighbors;
        ``discontinuity``, bool.

    Raises
    ------
    InvalidArgument
        If `window` is below 2, or `threshold` is not positive.

    Examples
    --------
    >>> found = discontinuities(ds).compute()
    >>> found.step[found.discontinuity].values  # the dead tokens stop together
    array([10, 17])
    """
    pace = speed(scan)
    pace = pace.drop_attrs().transpose("step", "token").chunk({"token": -1})
    mean = measure(_mean, pace.data, dims=("step",), dtype=np.float64).rechunk(-1)
    measured = measure(
        _pace, mean, dims=("step",), dtype=_DISCONTINUITIES, window=window, threshold=threshold
    )
    speeds = _DISCONTINUITIES["mean_speed"]
    units = {"mean_speed": speeds._replace(units=f"{scan.units} per step")}
    coords = {name: values for name, values in pace.coords.items() if "token" not in values.dims}
    return table(measured, _DISCONTINUITIES | units, ("step",), coords)
