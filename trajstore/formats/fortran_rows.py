"""Rows of arrays in Fortran order, whose rows lie scattered over the whole array.

A pass over the array collects as many rows as may be held; so it is gone over once for each part of
that size, and never held as a whole.
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
        Reads so many values of the array that follow another number of them, in the order of the
        file.
    memory : int
        Bytes of rows that may be held; one row is, whatever its size.
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
        """Rows from `start` up to `stop`, all without them, of one place along a first axis."""
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
            self._held = None  # before the next ones are there
            self._held, self._at = self._pass(first, end, outer), (outer, first, end)
            begin = first
        return self._in_order(self._held[first - begin : last - begin], shape)

    def _pass(self, first: int, last: int, outer: int | None) -> Array:
        """Rows, collected in one pass over the array, each in the order of the file."""
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
        # Of the axes after the rows, too, the first runs fastest.
        parts = rows.reshape(len(rows), *reversed(shape[1:]))
        return np.ascontiguousarray(parts.transpose(0, *range(parts.ndim - 1, 0, -1)))
