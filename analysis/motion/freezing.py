"""Steps at which tokens stop moving, bit for bit, and the elements that move last."""

from __future__ import annotations

import functools
import math
from typing import Any, Literal

import dask.array as da
import numpy as np
import numpy.typing as npt
import xarray as xr

from trajstore.analysis.scan.block_tasks import DIMS, Array, along, fold, measure
from trajstore.analysis.scan.quantity import quantity
from trajstore.analysis.scan.result_variables import ResultVariable, dataset, record_of
from trajstore.analysis.scan.rows import (
    changed_vectors,
    moved_elements,
    moved_vectors,
    tiles,
    with_lattice_attributes,
)
from trajstore.analysis.scan.scan import Scan
from trajstore.arguments import Count
from trajstore.populations import populations
from trajstore.schema import MIN_UNCHANGED

_NEVER = {-1: "never"}
_LAST = ResultVariable("i8", "last step with motion", flags=_NEVER)
_LAST_OF_MEDIAN = ResultVariable("i8", "last step with motion of the median element", flags=_NEVER)
_SINCE = ResultVariable("i8", "first recorded step after the last motion", flags={-1: "not_frozen"})


def _follow(
    state: npt.NDArray[np.int64] | None,
    moved: npt.NDArray[np.bool_],
    rows: npt.NDArray[np.int64],
    steps: npt.NDArray[np.int64],
    min_unchanged: int,
) -> npt.NDArray[np.int64]:
    """Row of the last motion (−1 means none), thaws and moves after more rows, (3, token)."""
    if state is None:
        state = np.repeat([[-1], [0], [0]], moved.shape[1], axis=1)
    last, thaws, moves = result = state.copy()
    for row, moving in zip(rows.ravel(), moved, strict=True):
        thaws += moving & (last >= 0) & (steps[row - 1] - steps[last] >= min_unchanged)
        last[moving] = row
    moves += moved.sum(0)
    return result


def _by_last_row(
    steps: npt.NDArray[np.int64], min_unchanged: int
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """Last motion, and start of the freeze, by the row of the last motion; the end is for −1."""
    rows = np.append(np.arange(steps.size), -1)
    unchanged = steps[-1] - steps[np.maximum(rows, 0)]
    following = steps[np.minimum(rows + 1, steps.size - 1)]
    return np.append(steps, -1), np.where(unchanged >= min_unchanged, following, -1)


def last_start(steps: npt.NDArray[np.int64], min_unchanged: int) -> int:
    """Last step at which a token can begin to be frozen; −1 if the run is too short."""
    return int(_by_last_row(steps, min_unchanged)[1].max()) if steps.size else -1


def _facts_of_tokens(
    state: npt.NDArray[np.int64], steps: npt.NDArray[np.int64], min_unchanged: int
) -> npt.NDArray[np.int64]:
    last, thaws, moves = state
    return np.stack([*(table[last] for table in _by_last_row(steps, min_unchanged)), thaws, moves])


def _unchanged_fraction(
    moving: npt.NDArray[Any], groups: npt.NDArray[np.bool_], elements: int
) -> npt.NDArray[Any]:
    """Fraction of each group that does not move, (row, population); NaN if the group is empty."""
    counts = (elements - moving.astype(np.int64)) @ groups.T.astype(np.int64)
    return np.asarray(counts / groups.sum(-1) / elements)


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
    return np.asarray(np.stack(counts, -1) / (groups.sum(-1) * elements))


def _last_rows(moved: npt.NDArray[np.bool_], rows: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """Last row of a block at which each element moved, (1, token, hidden); −1 means none."""
    result = np.full((1, *moved.shape[1:]), -1, np.int64)
    for row, moving in zip(rows.ravel(), moved, strict=True):
        result[0][moving] = row
    return result


def _lower_median(steps: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    middle = (steps.shape[-1] - 1) // 2
    return np.asarray(np.partition(steps, middle, axis=-1)[..., middle])


@quantity(measures=("moved",))
def freeze(
    scan: Scan,
    min_unchanged: Count = MIN_UNCHANGED,
    lattice: str = "native",
    per: Literal["token", "element"] = "token",
) -> xr.Dataset:
    """Last motion of each token, and the fraction of tokens that are frozen at each step.

    A token moves at a step if any bit of its row of W differs from the previous recorded row.
    −0.0 → 0.0 is not motion. With `lattice`, W is rounded first: a token moves if one of its
    elements moves to another cell. A token is frozen after its last motion, if at least
    `min_unchanged` steps without motion follow.

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
    scan.require_rows(1, "freeze")
    steps = scan.steps
    coords: dict[Any, Any] = {}
    variables: dict[str, tuple[Any, da.Array, ResultVariable]] = {}
    if per == "element":
        points = scan.points(lattice)
        moved = measure(moved_elements, points, dims=DIMS, dtype=np.bool_, by_row=True)
        last = measure(
            _last_rows,
            moved,
            np.arange(scan.rows),
            dims=DIMS,
            dtype=np.int64,
            sizes={"step": 1},
        ).max(0)
        last_motion, since = (
            last.map_blocks(functools.partial(np.take, table), dtype=np.int64)
            for table in _by_last_row(steps, min_unchanged)
        )
        median = measure(
            _lower_median, along(last_motion, "token", "hidden"), dims=("token",), dtype=np.int64
        )
        variables["median_last_motion"] = "token", median, _LAST_OF_MEDIAN
        moving = moved.sum(-1)[1:]
        motion = scan.wrap(moving, points.variable, rows=slice(1, None))
        elements = scan.ds.sizes["hidden"]
        coords = scan.coords(points.variable, ("token", "hidden"))
    else:
        motion = scan.moved(lattice).transpose("step", "token").chunk()
        last_motion, since, thaws, moves = fold(
            _follow,
            motion.data,
            np.arange(1, scan.rows),
            finish=functools.partial(_facts_of_tokens, steps=steps, min_unchanged=min_unchanged),
            sizes=(4,),
            dtype=np.int64,
            steps=steps,
            min_unchanged=min_unchanged,
        )
        variables["thaws"] = "token", thaws, ResultVariable("i8", "motions after a freeze")
        variables["moves"] = "token", moves, ResultVariable("i8", "rows with motion")
        moving, elements = motion.data, 1
    names, groups = populations(scan.ds)
    dims, sizes = ("token", "hidden")[: since.ndim], {"population": len(names)}
    unchanged = measure(
        _unchanged_fraction,
        moving.rechunk({1: -1}),
        dims=("step", "population"),
        groups=groups,
        elements=elements,
        dtype=np.float64,
        sizes=sizes,
    )
    frozen = measure(
        _frozen_fraction,
        along(since.rechunk(-1), *dims),
        dims=("step", "population"),
        steps=steps[1:],
        groups=groups,
        dtype=np.float64,
        sizes={"step": len(steps) - 1, **sizes},
    )
    still = ResultVariable("f8", f"fraction of {per}s that did not move")
    never = ResultVariable("f8", f"fraction of {per}s that never move again")
    variables |= {
        "last_motion": (dims, last_motion, _LAST),
        "frozen_since": (dims, since, _SINCE),
        "unchanged_fraction": (("step", "population"), unchanged, still),
        "frozen_fraction": (("step", "population"), frozen, never),
    }
    coords |= {name: values for name, values in motion.coords.items() if values.ndim < 2}
    result = dataset(variables, {**coords, "population": names})
    for name in {"frozen_since", "thaws", "frozen_fraction"} & set(variables):
        result[name].attrs["min_unchanged"] = min_unchanged
    return with_lattice_attributes(result, lattice)


_FACTS = {
    "last_moving_element": ResultVariable("i8", "element that moved last", flags={-1: "never"}),
    "last_motion": ResultVariable("i8", "last step with motion", flags={-1: "never"}),
    "moving_elements": ResultVariable("i8", "elements that moved at the last motion"),
    "last_moving_size": ResultVariable("f8", "size of the element that moved last"),
}
_NOTHING = np.array((-1, -1, 0, np.nan), record_of(_FACTS))


def _last_moves(block: Array, boundary: Array, steps: Array) -> npt.NDArray[np.void]:
    """Last motion of each token in consecutive rows, (1, token)."""
    rows, tokens, hidden = block.shape
    result = np.full((1, tokens), _NOTHING)
    for part in tiles(rows, tokens, hidden):
        later = np.ascontiguousarray(block[:, part])
        earlier = np.concatenate([boundary[:, part], later[:-1]])
        moved = moved_vectors(earlier, later, changed_vectors(earlier, later))
        at = np.nonzero(moved.any(0))[0]
        row = rows - 1 - moved[::-1].argmax(0)[at]
        elements = moved_elements(earlier[row, at], later[row, at])
        size = np.abs(earlier[row, at].astype(np.float64))
        # Of several, the smallest; if none is finite, the first.
        order = np.where(elements, np.nan_to_num(size, nan=np.inf), np.inf)
        none = np.isinf(order).all(-1)
        element = np.where(none, elements.argmax(-1), order.argmin(-1))
        out = result[0, part]
        out["last_motion"][at] = steps[row, 0, 0]
        out["last_moving_element"][at] = element
        out["moving_elements"][at] = elements.sum(-1)
        out["last_moving_size"][at] = size[np.arange(at.size), element]
    return result


def _latest(segments: npt.NDArray[np.void]) -> npt.NDArray[np.void]:
    """Last motion of each token in all rows: (segment, token) to (token)."""
    last = segments["last_motion"].argmax(0)
    return np.asarray(segments[last, np.arange(segments.shape[1])])


@quantity()
def last_moving_element(scan: Scan, lattice: str = "native") -> xr.Dataset:
    """Element of each token's vector that moved last, and its size.

    The spacing of a floating-point type decreases with the size of a value. Thus the smallest
    element of a vector is the last one that an update of a given size can move.

    Parameters
    ----------
    ds : Dataset
        With ``W`` (step, token, hidden), or ``cells`` for the lattice of bfloat16.
    lattice : {'native', 'bfloat16', 'float16', 'float32'}
        Round W to this type, as in `freeze`.

    Returns
    -------
    Dataset, (token)
        ``last_motion``, int64: last step with motion, as in `freeze`. ``last_moving_element``,
        int64: index along hidden of the element that moved at this step; of several the smallest,
        and of equally small ones the first. ``moving_elements``, int64: number of elements that
        moved at this step. ``last_moving_size``, float64: absolute value of the element before it
        moved. −1, −1, 0 and NaN for a token that never moved.

    Raises
    ------
    InvalidArgument
        For an unknown lattice, or if W holds values that its ``native_dtype`` does not.
    VariableNotRecorded
        If the run does not hold W.

    Examples
    --------
    >>> found = last_moving_element(ds).sel(token=ord("z")).compute()
    >>> found.last_motion.item(), found.moving_elements.item(), found.last_moving_size.item()
    (16, 4, 0.65234375)
    """
    scan.require_rows(1, "last_moving_element")
    points = scan.points(lattice)
    segments = measure(
        _last_moves,
        points,
        scan.steps,
        dims=("step", "token"),
        dtype=_FACTS,
        sizes={"step": 1},
    )
    latest = measure(_latest, segments.rechunk({0: -1}), dims=("token",), dtype=_FACTS)
    result = scan.of_tokens(latest, _FACTS, points.variable, dims=("token",))
    result["last_moving_size"].attrs["units"] = scan.units
    return with_lattice_attributes(result, lattice)
