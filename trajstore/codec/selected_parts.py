"""What a selection takes of each of the parts that an axis is divided into."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

__all__ = ["Pick", "hull_of", "outer_positions", "picks", "positions", "within_hull"]

Array = npt.NDArray[Any]


@dataclass(frozen=True, kw_only=True)
class Pick:
    """What a selection takes of one part, along one axis.

    Attributes
    ----------
    window : slice
        Of the part: from the first position that is taken to the last.
    taken : ndarray of int or None
        Positions within the window; None for all of them, in order.
    place : slice or ndarray of int
        Where they go in the result.
    """

    window: slice
    taken: Array | None
    place: slice | Array


def positions(place: slice | Array) -> Array:
    """Positions that a `Pick.place` stands for."""
    return np.arange(place.start, place.stop) if isinstance(place, slice) else place


def picks(wanted: Array | range, part: int) -> dict[int, Pick]:
    """What positions along an axis take of its parts of that length, by the part's number.

    Parameters
    ----------
    wanted : ndarray of int or range
        At least one position.
    part : int
    """
    first, count = int(wanted[0]), len(wanted)
    stop = first + count
    found: dict[int, Pick] = {}
    if _is_consecutive(wanted):
        for number in range(first // part, (stop - 1) // part + 1):
            at = number * part
            low, high = max(first, at), min(stop, at + part)
            found[number] = Pick(
                window=slice(low - at, high - at),
                taken=None,
                place=slice(low - first, high - first),
            )
        return found
    every = np.asarray(wanted)
    numbers = every // part
    order = np.argsort(numbers, kind="stable")
    parts, starts = np.unique(numbers[order], return_index=True)
    for number, place in zip(parts.tolist(), np.split(order, starts[1:]), strict=True):
        within = every[place] - number * part
        low, high = int(within.min()), int(within.max()) + 1
        found[number] = Pick(window=slice(low, high), taken=within - low, place=place)
    return found


def _is_consecutive(wanted: Array | range) -> bool:
    if isinstance(wanted, range):
        return wanted.step == 1
    return np.array_equal(wanted, np.arange(wanted[0], wanted[0] + len(wanted)))


def hull_of(item: Any, length: int) -> range:
    """All positions between the first and the last that are selected along an axis.

    Parameters
    ----------
    item : int, slice, or sequence of int or bool
    length : int
        Of the axis.
    """
    taken = np.arange(length)[item]
    return range(int(taken.min()), int(taken.max()) + 1) if taken.size else range(0)


def within_hull(item: Any, hull: range) -> Any:
    """The same selection, of what lies within its `hull_of`."""
    if isinstance(item, slice):
        return slice(None, None, item.step)
    array = np.asarray(item)
    return array[hull.start : hull.stop] if array.dtype == bool else array - hull.start


def outer_positions(
    selection: Sequence[Any], shape: Sequence[int]
) -> tuple[list[Array | range], tuple[int, ...]] | None:
    """Positions along each axis, where each axis is selected by itself.

    Parameters
    ----------
    selection : sequence of int, slice or ndarray of int
        One for each axis, as NumPy takes them.
    shape : sequence of int
        What is selected from.

    Returns
    -------
    positions : list of range or ndarray of int
    shape : tuple of int
        Of what NumPy returns for the selection.
    or None
        If points are selected: several axes together.
    """
    arrays = [item for item in selection if isinstance(item, np.ndarray)]
    if len(arrays) > 1 and not _is_mesh(arrays, len(selection)):
        return None
    along: list[Array | range] = []
    out: list[int] = []
    for item, length in zip(selection, shape, strict=True):
        if isinstance(item, slice):
            along.append(range(*item.indices(length)))
        elif isinstance(item, np.ndarray):
            if item.ndim == 0 or (len(arrays) == 1 and item.ndim != 1):
                return None
            along.append(np.flatnonzero(item) if item.dtype == bool else item.ravel())
        else:
            along.append(range(int(item), int(item) + 1))
            continue
        out.append(len(along[-1]))
    return along, tuple(out)


def _is_mesh(arrays: Sequence[Array], axes: int) -> bool:
    """Whether they select as `numpy.ix_` does, one array for each axis."""
    return len(arrays) == axes and all(
        array.dtype != bool
        and array.ndim == axes
        and all(length == 1 for at, length in enumerate(array.shape) if at != axis)
        for axis, array in enumerate(arrays)
    )
