"""Steps at which tokens stop moving, bit for bit."""

from __future__ import annotations

import functools
import math
from typing import Any, Literal

import dask.array as da
import numpy as np
import numpy.typing as npt
import xarray as xr

from trajstore.analysis.motion.moving_elements import moved_elements
from trajstore.analysis.motion.unchanged import MIN_UNCHANGED
from trajstore.analysis.scan.block_tasks import over_hidden, per_row
from trajstore.analysis.scan.flags import flag_attributes
from trajstore.analysis.scan.lattice_points import lattice_attributes
from trajstore.analysis.scan.quantity import quantity
from trajstore.analysis.scan.scan import Scan
from trajstore.errors import InvalidArgument
from trajstore.populations.masks import populations

__all__ = ["freeze"]

# Facts about a token in consecutive rows. Rows are indices within the run; −1 means none.
_FIRST, _LAST, _MOVES, _THAWS = range(4)


def _stretch(
    moved: npt.NDArray[np.bool_],
    rows: npt.NDArray[np.int64],
    steps: npt.NDArray[np.int64],
    min_unchanged: int,
) -> npt.NDArray[np.int64]:
    """Summary of consecutive rows: (1, 4, token)."""
    result = np.zeros((1, 4, moved.shape[1]), np.int64)
    result[0, [_FIRST, _LAST]] = -1
    first, last, _, thaws = result[0]
    for row, moves in zip(rows.ravel(), moved, strict=True):
        thaws += moves & (last >= 0) & (steps[row - 1] - steps[last] >= min_unchanged)
        first[moves & (first < 0)] = row
        last[moves] = row
    result[0, _MOVES] = moved.sum(0)
    return result


def _join(
    stretches: npt.NDArray[np.int64], steps: npt.NDArray[np.int64], min_unchanged: int
) -> npt.NDArray[np.int64]:
    """Summary of consecutive stretches, (stretch, 4, token), as one: (4, token)."""
    result = np.zeros(stretches.shape[1:], np.int64)
    result[[_FIRST, _LAST]] = -1
    for stretch in stretches:
        moves = stretch[_FIRST] >= 0
        again = moves & (result[_LAST] >= 0)
        unchanged = steps[np.maximum(stretch[_FIRST], 1) - 1] - steps[np.maximum(result[_LAST], 0)]
        result[_THAWS] += stretch[_THAWS] + (again & (unchanged >= min_unchanged))
        result[_MOVES] += stretch[_MOVES]
        result[_FIRST] = np.where(result[_FIRST] < 0, stretch[_FIRST], result[_FIRST])
        result[_LAST] = np.where(moves, stretch[_LAST], result[_LAST])
    return result


def _fraction(counts: npt.NDArray[Any], groups: npt.NDArray[np.bool_]) -> npt.NDArray[Any]:
    """Mean of flags or counts over each group: (…, token) to (…, population); NaN if empty."""
    sizes = groups.sum(-1)
    with np.errstate(invalid="ignore"):
        return np.asarray((counts.astype(np.int64) @ groups.T.astype(np.int64)) / sizes)


def _frozen_fraction(
    frozen_since: npt.NDArray[np.int64],
    steps: npt.NDArray[np.int64],
    groups: npt.NDArray[np.bool_],
) -> npt.NDArray[Any]:
    """Fraction of each group that is frozen at each step: (step, population)."""
    frozen = frozen_since >= 0
    counts = [
        np.searchsorted(np.sort(frozen_since[group][frozen[group]]), steps, side="right")
        for group in groups
    ]
    elements = math.prod(frozen_since.shape[1:])
    with np.errstate(invalid="ignore"):
        return np.asarray(np.stack(counts, -1) / (groups.sum(-1) * elements))


def _last_rows(
    block: npt.NDArray[Any], boundary: npt.NDArray[Any], rows: npt.NDArray[np.int64]
) -> npt.NDArray[np.int64]:
    """Last row of a block at which each element moved, (1, token, hidden); −1 means none."""
    result = np.full((1, *block.shape[1:]), -1, np.int64)
    before = np.ascontiguousarray(boundary[0])
    for row, values in zip(rows.ravel(), block, strict=True):
        now = np.ascontiguousarray(values)
        result[0][moved_elements(before, now)] = row
        before = now
    return result


def _moving(block: npt.NDArray[Any], boundary: npt.NDArray[Any]) -> npt.NDArray[np.int64]:
    """Number of elements of each token that moved, (row, token)."""
    result = np.empty(block.shape[:2], np.int64)
    before = np.ascontiguousarray(boundary[0])
    for row, values in enumerate(block):
        now = np.ascontiguousarray(values)
        result[row] = moved_elements(before, now).sum(-1)
        before = now
    return result


def _lower_median(steps: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    middle = (steps.shape[-1] - 1) // 2
    return np.asarray(np.partition(steps, middle, axis=-1)[..., middle])


def _elements(scan: Scan, lattice: str) -> tuple[xr.DataArray, xr.DataArray]:
    """Row of the last motion (token, hidden), and elements that moved (step, token)."""
    points = scan.points(lattice)
    last = da.map_blocks(
        _last_rows,
        points.blocks,
        points.boundaries,
        per_row(points.blocks, np.arange(scan.rows)),
        chunks=((1,) * points.blocks.numblocks[0], *points.blocks.chunks[1:]),
        dtype=np.int64,
        meta=np.empty((0, 0, 0), np.int64),
    ).max(0)
    moving = over_hidden(_moving, points.blocks, points.boundaries, dtype=np.int64)[1:]
    return (
        scan.wrap(last, points.variable, dims=("token", "hidden")),
        scan.wrap(moving, points.variable, rows=slice(1, None)),
    )


@quantity(measures=("moved",))
def freeze(
    scan: Scan,
    min_unchanged: int = MIN_UNCHANGED,
    lattice: str = "native",
    per: Literal["token", "element"] = "token",
) -> xr.Dataset:
    """Last motion of each token, and the fraction of tokens that are frozen at each step.

    A token moves at a step if any bit of its row of W differs from the previous recorded row.
    −0.0 → 0.0 is not motion. With `lattice`, W is rounded first: a token moves if one of its
    elements moves to another cell.

    Parameters
    ----------
    ds : Dataset
        With ``W`` (step, token, hidden). For the native lattice, a stored ``W_ulp_l1``, or
        ``delta`` of every step, suffices; for the lattice of bfloat16, ``cells``.
    min_unchanged : int
        Minimum steps without motion at the end of the run for a frozen token, at least 1. A token
        with fewer may be between two motions.
    lattice : {'native', 'bfloat16', 'float16', 'float32'}
        Round W to this type.
    per : {'token', 'element'}
        Whose motion: that of a token, which its last moving element decides, or of each element.

    Returns
    -------
    Dataset
        Per token, int64: ``last_motion``, the last step at which it moved, −1 if never;
        ``frozen_since``, the recorded step after that (the first recorded one if it never moved),
        −1 if it has been unchanged for fewer than `min_unchanged` steps; ``thaws``, how often it
        moved again after at least `min_unchanged` unchanged steps; ``moves``, the number of
        recorded rows at which it moved. Per (step, population), for every row but the first:
        ``unchanged_fraction``, the fraction that did not move at this step, and
        ``frozen_fraction``, the fraction with ``frozen_since`` ≤ step.
        Without ``is_dead``, the only population is ``all``. Per element, ``last_motion`` and
        ``frozen_since`` are (token, hidden), the fractions are those of elements, and
        ``median_last_motion`` (token) is the lower median of ``last_motion`` over hidden.

    Raises
    ------
    InvalidArgument
        If `min_unchanged` is below 1, `per` or the lattice is unknown, or W holds values that its
        ``native_dtype`` does not.

    Examples
    --------
    >>> found = freeze(ds, min_unchanged=3)
    >>> found.frozen_since.sel(token=[ord("e"), ord("z")]).values
    array([14, 17])
    >>> found.frozen_fraction.sel(step=15).to_series().round(3).to_dict()
    {'dead': 0.0, 'live': 1.0, 'all': 0.078}
    """
    if min_unchanged < 1:
        raise InvalidArgument(f"got min_unchanged={min_unchanged}, expected at least 1 step")
    if per not in ("token", "element"):
        raise InvalidArgument(f"got per={per!r}, expected 'token' or 'element'")
    scan.require_rows(1, "freeze")
    steps = scan.steps
    if per == "element":
        last, moving = _elements(scan, lattice)
        unchanged = scan.ds.sizes["hidden"] - moving
    else:
        motion = scan.moved(lattice)
        summary = scan.combine_rows(
            motion,
            functools.partial(_stretch, min_unchanged=min_unchanged),
            functools.partial(_join, min_unchanged=min_unchanged),
            4,
            steps=steps,
        )
        last, unchanged = summary.isel(fact=_LAST), ~motion

    def last_motion(rows: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        return np.where(rows < 0, -1, steps[rows])

    def frozen_since(rows: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        start = np.where(rows < 0, 0, rows)
        unchanged = steps[-1] - steps[start]
        following = steps[np.minimum(rows + 1, steps.size - 1)]
        return np.where(unchanged >= min_unchanged, following, -1)

    def steps_of(function: Any) -> xr.DataArray:
        result: xr.DataArray = xr.apply_ufunc(
            function, last, dask="parallelized", output_dtypes=[np.int64]
        )
        return result

    since = steps_of(frozen_since)
    names, groups = populations(scan.ds)
    lazy = unchanged.chunks is not None
    elements = scan.ds.sizes["hidden"] if per == "element" else 1
    unchanged_fraction = xr.apply_ufunc(
        lambda counts, groups: _fraction(counts, groups) / elements,
        unchanged.chunk({"token": -1}) if lazy else unchanged,
        groups,
        input_core_dims=[["token"], ["population", "token"]],
        output_core_dims=[["population"]],
        dask="parallelized",
        output_dtypes=[np.float64],
        dask_gufunc_kwargs={"output_sizes": {"population": len(names)}},
    )
    frozen_fraction = xr.apply_ufunc(
        lambda first: _frozen_fraction(first, steps[1:], groups),
        since.chunk({"token": -1}) if lazy else since,
        input_core_dims=[[*since.dims]],
        output_core_dims=[["step", "population"]],
        dask="parallelized",
        output_dtypes=[np.float64],
        dask_gufunc_kwargs={"output_sizes": {"step": steps.size - 1, "population": len(names)}},
    )
    step = {"units": "1", **lattice_attributes(lattice)}
    never = flag_attributes({-1: "never"})
    threshold = {**step, "min_unchanged": min_unchanged}
    found = {
        "last_motion": steps_of(last_motion).assign_attrs(
            long_name="last step with motion", **step, **never
        ),
        "frozen_since": since.assign_attrs(
            long_name="first recorded step after the last motion",
            **threshold,
            **flag_attributes({-1: "not_frozen"}),
        ),
    }
    if per == "element":
        median = xr.apply_ufunc(
            _lower_median,
            found["last_motion"],
            input_core_dims=[["hidden"]],
            dask="parallelized",
            output_dtypes=[np.int64],
        )
        found["median_last_motion"] = median.assign_attrs(
            long_name="last step with motion of the median element", **step, **never
        )
    else:
        found["thaws"] = summary.isel(fact=_THAWS).assign_attrs(
            long_name="motions after a freeze", **threshold
        )
        found["moves"] = summary.isel(fact=_MOVES).assign_attrs(
            long_name="rows with motion", **step
        )
    found["unchanged_fraction"] = unchanged_fraction.assign_attrs(
        long_name=f"fraction of {per}s that did not move", **step
    )
    found["frozen_fraction"] = frozen_fraction.assign_attrs(
        long_name=f"fraction of {per}s that never move again", **threshold
    )
    return xr.Dataset(found, coords={"population": names, "step": unchanged["step"]})
