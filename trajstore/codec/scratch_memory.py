"""Reused memory for intermediate results. Fresh memory costs as much as the computation in it."""

from __future__ import annotations

import math
import threading
from typing import Any

import numpy as np
import numpy.typing as npt

_SMALL = 16 << 10  # bytes that the allocator provides without a system call


class _Scratch(threading.local):
    def __init__(self) -> None:
        self._buffers: dict[str, npt.NDArray[np.uint8]] = {}

    def array(self, name: str, shape: tuple[int, ...], dtype: npt.DTypeLike) -> npt.NDArray[Any]:
        """Uninitialized array of this thread, valid until the next call with the same name.

        Parameters
        ----------
        name : str
            Purpose of the array. Arrays of different names do not overlap.
        shape : tuple of int
        dtype : data-type
        """
        dtype = np.dtype(dtype)
        size = math.prod(shape) * dtype.itemsize
        if size <= _SMALL:
            return np.empty(shape, dtype)
        buffer = self._buffers.get(name)
        if buffer is None or buffer.size < size:
            buffer = self._buffers[name] = np.empty(size, np.uint8)
        return buffer[:size].view(dtype).reshape(shape)


scratch = _Scratch()
"""Scratch memory; each thread has its own."""
