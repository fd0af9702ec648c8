"""Selections along the axes of an array, divided into those of its parts, such as chunks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]


@dataclass(frozen=True, kw_only=True)
class Pick:
    """Selected positions of one part, along one axis.

    Attributes
    ----------
    window : slice
        Range of the part from the first selected position to the last.
    taken : ndarray of int or None
        Selected positions within the window; None for all of them, in order.
    place : slice or ndarray of int
        Their positions in the result.
    """

    window: slice
    taken: Array | None
    place: slice | Array


def positions(place: slice | Array) -> Array:
    """Positions of a `Pick.place`."""
    return np.arange(place.start, place.stop) if isinstance(place, slice) else place


def picks(wanted: Array | range, part: int) -> dict[int, Pick]:
    """Selected positions of each part of an axis, by the number of the part.

    Parameters
    ----------
    wanted : ndarray of int or range
        Selected positions along the axis, at least one.
    part : int
        Length of a part.
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
    """All positions from the first selected one to the last, along an axis.

    Parameters
    ----------
    item : int, slice, or sequence of int or bool
    length : int
        Length of the axis.
    """
    taken = np.arange(length)[item]
    return range(int(taken.min()), int(taken.max()) + 1) if taken.size else range(0)


def within_hull(item: Any, hull: range) -> Any:
    """The same selection, relative to its `hull_of`."""
    if isinstance(item, slice):
        return slice(None, None, item.step)
    array = np.asarray(item)
    return array[hull.start : hull.stop] if array.dtype == bool else array - hull.start


def outer_positions(
    selection: Sequence[Any], shape: Sequence[int]
) -> tuple[list[Array | range], tuple[int, ...]] | None:
    """Positions along each axis, if each axis is selected independently.

    Parameters
    ----------
    selection : sequence of int, slice or ndarray of int
        One item for each axis, with the meaning it has in NumPy.
    shape : sequence of int
        Shape of the array.

    Returns
    -------
    positions : list of range or ndarray of int
    shape : tuple of int
        Shape that NumPy returns for the selection.
    or None
        If the selection is of points, along several axes together.
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
    """True if they select as `numpy.ix_` does, with one array for each axis."""
    return len(arrays) == axes and all(
        array.dtype != bool
        and array.ndim == axes
        and all(length == 1 for at, length in enumerate(array.shape) if at != axis)
        for axis, array in enumerate(arrays)
    )
