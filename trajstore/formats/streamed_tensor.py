"""Tensors to write, as parts that are read one after another."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from trajstore.values.native_types import NATIVE_TYPES

__all__ = ["Part", "Tensor", "constant", "item_type"]

Array = npt.NDArray[Any]


@dataclass(frozen=True, kw_only=True)
class Part:
    """Part of a tensor.

    Attributes
    ----------
    where : tuple of slice
        Its position in the first one or two dimensions from the rows on.
    read : callable
        Returns its bits, and the number of rounded values.
    """

    where: tuple[slice, ...]
    read: Callable[[], tuple[Array, int]]


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
        Yields parts that cover it.
    outer : int
        Number of axes before that of the rows. Parts count the rows across them.
    """

    key: str
    dtype: str
    shape: tuple[int, ...]
    parts: Callable[[], Iterator[Part]]
    outer: int = 0

    @property
    def nbytes(self) -> int:
        """Bytes of all its values."""
        return math.prod(self.shape) * item_type(self.dtype).itemsize


def item_type(dtype: str) -> np.dtype[Any]:
    """NumPy type of the bits of one value."""
    return NATIVE_TYPES[dtype].bits if dtype in NATIVE_TYPES else np.dtype(dtype)


def constant(key: str, dtype: str, value: npt.ArrayLike) -> Tensor:
    """Tensor of values in memory."""
    array = np.ascontiguousarray(np.asarray(value, dtype)).reshape(np.shape(value))

    def parts() -> Iterator[Part]:
        yield Part(where=(), read=lambda: (array, 0))

    return Tensor(key=key, dtype=dtype, shape=array.shape, parts=parts)
