"""Rows of arrays in Fortran order, in which the values of a row are scattered.

One pass over the array collects as many rows as fit into the memory. The array is therefore read
once per part of that size, and never held whole.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

__all__ = ["FortranRows"]

Array = npt.NDArray[Any]

_PIECE = 1 << 20


class FortranRows:
    """Rows of one array in Fortran order.

    Parameters
    ----------
    shape : tuple of int
    dtype : numpy.dtype
    values : callable
        Reads a number of values (first argument) after a number of skipped values (second
        argument), in the order of the file.
    memory : int
        Bytes of rows that may be held. One row is held even if it is larger.
    """

    def __init__(
        self,
        shape: tuple[int, ...],
        dtype: np.dtype[Any],
        values: Callable[[int, int], Array],
        memory: int,
    ) -> None:
        self._shape = shape
        self._dtype = dtype
        self._values = values
        self._memory = memory
        self._at: tuple[int | None, int, int] = (None, 0, 0)
        self._held: Array | None = None

    def read(self, start: int | None, stop: int | None, outer: int | None) -> Array:
        """Read rows from `start` up to `stop` (default: all) at one position of a first axis."""
        shape = self._shape if outer is None else self._shape[1:]
        whole = start is None or stop is None
        first, last = (0, shape[0]) if start is None or stop is None else (start, stop)
        last = min(last, shape[0])
        if whole:
            return self._in_order(self._pass(first, last, outer), shape)
        held_outer, begin, end = self._at
        if self._held is None or outer != held_outer or first < begin or last > end:
            row = max(1, math.prod(shape[1:]) * self._dtype.itemsize)
            end = min(max(last, first + self._memory // row), shape[0])
            self._held = None  # frees the memory for the next rows
            self._held, self._at = self._pass(first, end, outer), (outer, first, end)
            begin = first
        return self._in_order(self._held[first - begin : last - begin], shape)

    def _pass(self, first: int, last: int, outer: int | None) -> Array:
        """Rows from one pass over the array, each in the order of the file."""
        shape = self._shape if outer is None else self._shape[1:]
        outers = 1 if outer is None else self._shape[0]
        columns, along = math.prod(shape[1:]), shape[0] * outers
        rows = np.empty((max(last - first, 0), columns), self._dtype)
        step = max(1, _PIECE // max(1, along * self._dtype.itemsize))
        for column in range(0, columns, step):
            count = min(step, columns - column)
            piece = self._values(count * along, column * along).reshape(count, shape[0], outers)
            rows[:, column : column + count] = piece[:, first:last, outer or 0].T
        return rows

    @staticmethod
    def _in_order(rows: Array, shape: tuple[int, ...]) -> Array:
        # In the other axes, too, the first index changes fastest.
        parts = rows.reshape(len(rows), *reversed(shape[1:]))
        return np.ascontiguousarray(parts.transpose(0, *range(parts.ndim - 1, 0, -1)))
