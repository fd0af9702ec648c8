"""Tensors to write, whose parts are read one after another."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from trajstore.threads import Progress
from trajstore.values.native_types import NATIVE_TYPES

Array = npt.NDArray[Any]

Where = tuple[slice, ...]
"""Position of a part in the first one or two dimensions from the rows on."""


@dataclass(frozen=True, kw_only=True)
class Tensor:
    """A tensor to write.

    Attributes
    ----------
    key : str
        Name in the file.
    dtype : str
        bfloat16, float16, float32, float64, int64, int32 or bool.
    shape : tuple of int
    parts : callable
        Returns the positions of the parts that cover it.
    read : callable
        Returns the bits of a part, and the number of rounded values.
    outer : int
        Number of axes before that of the rows. Parts count the rows across them.
    """

    key: str
    dtype: str
    shape: tuple[int, ...]
    parts: Callable[[], Iterable[Where]]
    read: Callable[[Where], tuple[Array, int]]
    outer: int = 0

    @property
    def nbytes(self) -> int:
        """Bytes of all its values."""
        return math.prod(self.shape) * item_type(self.dtype).itemsize


def counted(
    tensors: Iterable[Tensor],
    written: Iterable[tuple[str, int, int]],
    on_progress: Progress | None,
) -> dict[str, int]:
    """Numbers of rounded values, by key.

    Parameters
    ----------
    tensors : iterable of Tensor
    written : iterable of tuple
        Key, bytes and number of rounded values of each part, as soon as it is written.
    on_progress : callable, optional
    """
    sizes = {tensor.key: tensor.nbytes for tensor in tensors}
    rounded, done, total = dict.fromkeys(sizes, 0), 0, sum(sizes.values())
    for key, size, changed in written:
        rounded[key] += changed
        done += size
        if on_progress is not None:
            on_progress(done, total)
    assert done == total, f"{done} bytes were written, {total} announced"
    return rounded


def item_type(dtype: str) -> np.dtype[Any]:
    """NumPy type of the bits of one value."""
    return NATIVE_TYPES[dtype].bits if dtype in NATIVE_TYPES else np.dtype(dtype)


def constant(key: str, dtype: str, value: npt.ArrayLike) -> Tensor:
    """Tensor of values in memory."""
    array = np.ascontiguousarray(np.asarray(value, dtype)).reshape(np.shape(value))
    return Tensor(
        key=key, dtype=dtype, shape=array.shape, parts=lambda: [()], read=lambda where: (array, 0)
    )
