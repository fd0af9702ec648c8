"""Memory for intermediate results, used again: fresh memory costs as much as what is done in it."""

from __future__ import annotations

import math
import threading
from typing import Any

import numpy as np
import numpy.typing as npt

__all__ = ["scratch"]

_SMALL = 16 << 10  # bytes that the allocator has at hand


class _Scratch(threading.local):
    def __init__(self) -> None:
        self._buffers: dict[str, npt.NDArray[np.uint8]] = {}

    def array(self, name: str, shape: tuple[int, ...], dtype: npt.DTypeLike) -> npt.NDArray[Any]:
        """Uninitialised array of this thread, valid until the next call with that name.

        Parameters
        ----------
        name : str
            Of its purpose; arrays of different names do not overlap.
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
"""Of each thread its own."""
