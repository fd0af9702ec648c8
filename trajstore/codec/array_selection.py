"""What a selection of an array takes of each of its parts: blocks, objects, inner chunks.

Every reader selects with `ArraySelection`: the codec of zarr within a block, `StoredArray` within
an array. `AxisPart` is what it takes of one part along one axis.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any, NamedTuple, Self

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]


class AxisPart(NamedTuple):
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


Axes = Sequence[dict[int, AxisPart]]
"""What a selection takes of the chunks along each axis, by the number of the chunk."""


def positions(place: slice | Array) -> Array:
    """Positions of an `AxisPart.place`."""
    return np.arange(place.start, place.stop) if isinstance(place, slice) else place


def divide_axis(selected: Array | range, length: int) -> dict[int, AxisPart]:
    """Selected positions of each part of an axis, by the number of the part.

    Parameters
    ----------
    selected : ndarray of int or range
        Selected positions along the axis, at least one.
    length : int
        Length of a part.
    """
    first, count = int(selected[0]), len(selected)
    stop = first + count
    divided: dict[int, AxisPart] = {}
    if _is_consecutive(selected):
        for number in range(first // length, (stop - 1) // length + 1):
            begin = number * length
            low, high = max(first, begin), min(stop, begin + length)
            divided[number] = AxisPart(
                window=slice(low - begin, high - begin),
                taken=None,
                place=slice(low - first, high - first),
            )
        return divided
    every = np.asarray(selected)
    numbers = every // length
    order = np.argsort(numbers, kind="stable")
    parts, starts = np.unique(numbers[order], return_index=True)
    for number, place in zip(parts.tolist(), np.split(order, starts[1:]), strict=True):
        within = every[place] - number * length
        low, high = int(within.min()), int(within.max()) + 1
        divided[number] = AxisPart(window=slice(low, high), taken=within - low, place=place)
    return divided


def _is_consecutive(selected: Array | range) -> bool:
    if isinstance(selected, range):
        return selected.step == 1
    return np.array_equal(selected, np.arange(selected[0], selected[0] + len(selected)))


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
        and all(length == 1 for other, length in enumerate(array.shape) if other != axis)
        for axis, array in enumerate(arrays)
    )


@dataclass(frozen=True, kw_only=True)
class ArraySelection:
    """Selected positions of an array, or of a block of it.

    Attributes
    ----------
    along : sequence of range or ndarray of int
        Selected positions along each axis.
    shape : tuple of int
        Shape that NumPy returns for the selection; of points, for the box that contains them.
    points : tuple or None
        The selection within this box, if it is of points.
    """

    along: Sequence[Array | range]
    shape: tuple[int, ...]
    points: tuple[Any, ...] | None = None

    @classmethod
    def of(cls, selection: Any, shape: tuple[int, ...]) -> Self:
        """Selection with the meaning it has in NumPy, for an array of that shape."""
        selection = selection if isinstance(selection, tuple) else (selection,)
        selection = (*selection, *[slice(None)] * (len(shape) - len(selection)))
        outer = outer_positions(selection, shape)
        if outer is not None:
            return cls(along=outer[0], shape=outer[1])
        # The smallest box that contains the points is read; then the points are selected.
        hulls = [hull_of(*pair) for pair in zip(selection, shape, strict=True)]
        points = tuple(within_hull(item, hull) for item, hull in zip(selection, hulls, strict=True))
        return cls(along=hulls, shape=tuple(map(len, hulls)), points=points)

    @property
    def lengths(self) -> tuple[int, ...]:
        """Number of selected positions along each axis; axes of one integer are kept."""
        return tuple([len(axis) for axis in self.along])

    def chunks(self, shape: tuple[int, ...]) -> Axes:
        """What it takes of the chunks of that shape, along each axis; empty if it takes nothing."""
        if 0 in self.lengths:
            return []
        return [divide_axis(axis, part) for axis, part in zip(self.along, shape, strict=True)]

    def objects(
        self, shape: tuple[int, ...]
    ) -> Iterator[tuple[tuple[int, int], Self, tuple[Any, ...]]]:
        """Divide a selection of consecutive positions, at least one, into those of its objects.

        Parameters
        ----------
        shape : tuple of int
            Shape of an object, which divides an array along its first two axes only.

        Yields
        ------
        number : (int, int)
            Block along the first axis, and part along the second.
        selection : ArraySelection
            The selection within the object.
        place : tuple of slice
            Its place in the selected values.
        """
        divided = [divide_axis(*pair).items() for pair in zip(self.along[:2], shape, strict=False)]
        whole = list(self.along[2:])
        for numbered in product(*divided):
            along = [range(part.window.start, part.window.stop) for _, part in numbered] + whole
            selection = type(self)(along=along, shape=tuple([len(axis) for axis in along]))
            place = tuple([part.place for _, part in numbered])
            part = numbered[1][0] if len(numbered) > 1 else 0
            yield (numbered[0][0], part), selection, place

    def shaped(self, values: Array) -> Array:
        """Values of all axes, in the shape that NumPy returns."""
        values = values.reshape(self.shape)
        return values if self.points is None else np.asarray(values[self.points])
