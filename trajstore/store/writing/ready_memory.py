"""Memory of the block buffers that is there before rows are written to it.

A system gives a page of memory to a process at the first write to it, which takes ten times as long
as the write. A thread asks for the pages of the next rows ahead.
"""

from __future__ import annotations

import ctypes
import mmap
import sys
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy.typing as npt

from trajstore.threads import submit

_POPULATE_WRITE = 23  # MADV_POPULATE_WRITE of Linux 5.14; it keeps what the pages hold
_AHEAD = 16 << 20  # bytes, and at least three rows

Buffer = Mapping[str, npt.NDArray[Any]]


class ReadyMemory:
    """Asks for the memory of rows shortly before they are filled, in each buffer once.

    Without Linux, the pages come with the first write.

    Parameters
    ----------
    buffers : sequence of mapping of str to ndarray, (row, …)
        Buffers of the blocks, in turn.
    first : int
        Number of the next row.
    """

    def __init__(self, buffers: Sequence[Buffer], first: int) -> None:
        self._buffers = buffers
        arrays = list(buffers[0].values())
        self._rows = len(arrays[0])
        row = sum(array.nbytes for array in arrays) // self._rows
        self._step = max(1, _AHEAD // 2 // max(row, 1))
        self._end = (first // self._rows + len(buffers)) * self._rows  # each buffer once
        self._next = first if sys.platform == "linux" else self._end
        self._thread: ThreadPoolExecutor | None = None
        self.reach(first)

    def reach(self, row: int) -> None:
        """Ask for the rows from `row` on, the number of rows so far, if they lack their memory."""
        end = min(row + 2 * self._step + 1, self._end)
        if row + self._step < self._next or self._next >= end:
            return
        first, self._next = max(self._next, row), end
        self._thread = self._thread or ThreadPoolExecutor(1, "trajstore-memory")
        submit(self._thread, self._ask, first, end)

    def close(self) -> None:
        """Wait for the thread."""
        if self._thread is not None:
            self._thread.shutdown(cancel_futures=True)

    def _ask(self, first: int, end: int) -> None:
        call = ctypes.CDLL(None).madvise
        call.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
        for number in range(first // self._rows, -(-end // self._rows)):
            begins = number * self._rows
            rows = slice(max(first - begins, 0), end - begins)
            for array in self._buffers[number % len(self._buffers)].values():
                part = array[rows]
                begin = part.ctypes.data // mmap.PAGESIZE * mmap.PAGESIZE
                size = part.ctypes.data + part.nbytes - begin
                if part.nbytes and call(begin, size, _POPULATE_WRITE):
                    return  # an older system
