"""What a file will hold: tensors, each made of parts that are read when their turn comes."""

from __future__ import annotations

import math
import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from trajstore.bits import NATIVE_TYPES, NativeType
from trajstore.conversion import convert
from trajstore.selection import Selection
from trajstore.source import Series

__all__ = ["Part", "Progress", "Tensor", "constant", "in_parallel", "item_type", "series_tensor"]

Array = npt.NDArray[Any]
T = TypeVar("T")

Progress = Callable[[int, int], None]
"""Called with the bytes that are done, and those there are."""


@dataclass(frozen=True, kw_only=True)
class Part:
    """Part of a tensor.

    Attributes
    ----------
    where : tuple of slice
        Its place, in the first one or two dimensions.
    read : callable
        Returns its bits, and how many values had to be rounded.
    """

    where: tuple[slice, ...]
    read: Callable[[], tuple[Array, int]]


@dataclass(frozen=True, kw_only=True)
class Tensor:
    """A tensor to be.

    Attributes
    ----------
    key : str
        Its name in the file.
    dtype : str
        bfloat16, float16, float32, float64, int64, int32 or bool.
    shape : tuple of int
    parts : callable
        Yields parts that cover it.
    """

    key: str
    dtype: str
    shape: tuple[int, ...]
    parts: Callable[[], Iterator[Part]]

    @property
    def nbytes(self) -> int:
        """Bytes of all its values."""
        return math.prod(self.shape) * item_type(self.dtype).itemsize


def item_type(dtype: str) -> np.dtype[Any]:
    """NumPy type of the bits of one value."""
    return NATIVE_TYPES[dtype].bits if dtype in NATIVE_TYPES else np.dtype(dtype)


def constant(key: str, dtype: str, value: npt.ArrayLike) -> Tensor:
    """Tensor of values that are already at hand."""
    array = np.ascontiguousarray(np.asarray(value, dtype)).reshape(np.shape(value))

    def parts() -> Iterator[Part]:
        yield Part(where=(), read=lambda: (array, 0))

    return Tensor(key=key, dtype=dtype, shape=array.shape, parts=parts)


def series_tensor(
    key: str,
    series: Series,
    selection: Selection,
    *,
    dtype: NativeType | None = None,
    rows: Array | None = None,
    finish: Callable[[Array, slice], None] | None = None,
) -> Tensor:
    """Tensor of a selection of a variable.

    Parameters
    ----------
    key : str
    series : Series
    selection : Selection
    dtype : NativeType, optional
        Type in the file; the native one without it.
    rows : ndarray of int, optional
        Positions along ``step`` instead of those of the selection, as many.
    finish : callable, optional
        Called with the bits of a part and its rows, to change them in place.
    """
    wanted = dtype or series.native
    exact = wanted.name == series.native.name
    tokens = selection.tokens if "token" in series.dims else None
    shape = (len(selection.rows), *series.shape[1:])
    if tokens is not None:
        shape = (shape[0], len(tokens), *shape[2:])

    def parts() -> Iterator[Part]:
        for tile in series.tiles(selection.rows if rows is None else rows, tokens, native=exact):

            def read(
                values: Callable[[], Array] = tile.read, at: slice = tile.where[0]
            ) -> tuple[Array, int]:
                bits, changed = values(), 0
                if not exact:
                    bits, changed = convert(bits, series.native, wanted)
                if finish is not None:
                    bits = bits if bits.flags.writeable else bits.copy()
                    finish(bits, at)
                return bits, changed

            yield Part(where=tile.where, read=read)

    return Tensor(key=key, dtype=wanted.name, shape=shape, parts=parts)


def in_parallel(jobs: Iterable[Callable[[], T]], threads: int | None = None) -> Iterator[T]:
    """Results of jobs, in order, a few of them running ahead in threads.

    Decoding and writing release the interpreter's lock. When a job fails, or the caller stops, no
    further one is begun.

    Parameters
    ----------
    jobs : iterable of callable
    threads : int, optional
        Without it as many as there are processors, at most 8.
    """
    threads = threads or min(os.cpu_count() or 1, 8)
    waiting: deque[Future[T]] = deque()
    pool = ThreadPoolExecutor(threads, thread_name_prefix="trajstore-job")
    try:
        for job in jobs:
            waiting.append(pool.submit(job))
            if len(waiting) > threads:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()
    finally:
        pool.shutdown(wait=True, cancel_futures=True)
