"""Whether the two matrices of a model are one: its unembedding is its embedding."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Protocol, TypeVar

import numpy as np

from trajstore.formats.array_file import ArrayFile

__all__ = ["Matrix", "tied"]

_BATCH = 4 << 20


class Matrix(Protocol):
    """An array of a file that is a matrix of a model."""

    @property
    def key(self) -> str:
        """Name in the file."""

    @property
    def dtype(self) -> str:
        """Type."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape."""

    @property
    def matrix(self) -> str | None:
        """E, W or neither."""


_Matrix = TypeVar("_Matrix", bound=Matrix)


def tied(file: ArrayFile, matrices: Sequence[_Matrix]) -> _Matrix | None:
    """The unembedding of a model that is its embedding; untied histories have names.

    Values are compared a few rows at a time.

    Parameters
    ----------
    file : ArrayFile
    matrices : sequence of Matrix
    """
    if len(matrices) != 2 or any("." not in one.key for one in matrices):
        return None
    one, other = sorted(matrices, key=lambda each: each.matrix or "W")
    if one.shape != other.shape or one.dtype != other.dtype:
        return None
    rows = max(1, _BATCH // (8 * max(1, math.prod(one.shape[1:]))))
    for start in range(0, one.shape[0], rows):
        stop = min(start + rows, one.shape[0])
        if not np.array_equal(file.read(one.key, start, stop), file.read(other.key, start, stop)):
            return None
    return other
