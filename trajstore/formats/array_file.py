"""What every format offers to whoever reads a file: named arrays, by rows, and what is beside."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol, Self

import numpy as np
import numpy.typing as npt

from trajstore.byte_sizes import format_bytes
from trajstore.errors import FormatError, RunNotFound
from trajstore.values.native_types import NATIVE_TYPES, widen

__all__ = [
    "ArrayFile",
    "OpenedFile",
    "check_expansion",
    "is_number",
    "plain_number",
    "row_range",
    "values_of",
]

Array = npt.NDArray[Any]

_ALWAYS_EXPANDED = 1 << 30
_EXPANDED_AT_MOST = 200
_LARGEST_TABLE = 64 << 20


class ArrayFile(Protocol):
    """A file of named arrays, open for reading, every one of them checked to be there.

    Attributes
    ----------
    path : Path
    """

    path: Path

    @property
    def format(self) -> str:
        """One of safetensors, hdf5, npz, npy, torch, checkpoint and folder."""

    @property
    def keys(self) -> tuple[str, ...]:
        """Names of the arrays."""

    @property
    def attributes(self) -> Mapping[str, Any]:
        """Texts, numbers and lists of numbers beside the arrays."""

    @property
    def passed_over(self) -> Mapping[str, str]:
        """What it holds and does not offer, and why: ``{"names": "a text of any length"}``."""

    def shape(self, key: str) -> tuple[int, ...]:
        """Shape of an array."""

    def dtype(self, key: str) -> str:
        """Type of an array as NumPy and ml_dtypes call it: bfloat16, uint16, bool, …."""

    def read(
        self, key: str, start: int | None = None, stop: int | None = None, outer: int | None = None
    ) -> Array:
        """Values of an array; of floating-point numbers, their bits.

        Parameters
        ----------
        key : str
        start, stop : int, optional
            Rows to read; all without them.
        outer : int, optional
            Place along a first axis that lies before the rows.

        Raises
        ------
        FormatError
            If they cannot be read.
        """

    def __enter__(self) -> Self:
        """The file itself."""

    def __exit__(self, *error: object) -> None:
        """Close it."""


class OpenedFile:
    """What the readers of all formats have in common: a context manager of something that exists.

    Parameters
    ----------
    path : path-like
    is_folder : bool
        Whether it must be a folder, not a file.

    Raises
    ------
    RunNotFound
        If there is none.
    """

    def __init__(self, path: str | os.PathLike[str], *, is_folder: bool = False) -> None:
        self.path = Path(path)
        self.attributes: dict[str, Any] = {}
        self.passed_over: dict[str, str] = {}
        if not (self.path.is_dir() if is_folder else self.path.is_file()):
            raise RunNotFound(f"there is no {'folder' if is_folder else 'file'} at {path}")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self._close()

    def _close(self) -> None:
        raise NotImplementedError


def check_expansion(path: Path, decoded: int) -> None:
    """Refuse a compressed file of which nearly nothing is there, and that takes minutes to decode.

    Deflate makes at most 1,032 bytes of one; recorded trainings become 2 to 20 times as large.

    Parameters
    ----------
    path : Path
    decoded : int
        Bytes of all its arrays.

    Raises
    ------
    FormatError
        If they are more than 1 GiB, and more than 200 times what the file has.
    """
    size = path.stat().st_size
    if decoded > max(_ALWAYS_EXPANDED, _EXPANDED_AT_MOST * size):
        raise FormatError(
            f"{path} has {format_bytes(size)}, and its arrays would be {format_bytes(decoded)} "
            f"when they are decompressed, more than {_EXPANDED_AT_MOST} times as much; if that is "
            "meant, write it without compression (h5repack -f NONE, numpy.savez)"
        )


def values_of(file: ArrayFile, key: str) -> Array:
    """All values of an array as numbers: floating-point ones in their stored form.

    Raises
    ------
    FormatError
        If they cannot be read, or take more than 64 MiB: what is read as a whole are labels and
        tables of tokens.
    """
    count, dtype = math.prod(file.shape(key)), file.dtype(key)
    itemsize = 8 if dtype not in NATIVE_TYPES else NATIVE_TYPES[dtype].itemsize
    if count * itemsize > _LARGEST_TABLE:
        raise FormatError(
            f"{file.path}: {key} has shape {file.shape(key)}, and a table or a label for each row "
            f"takes at most {format_bytes(_LARGEST_TABLE)}; leave it out with --map ignore={key}"
        )
    values = file.read(key)
    if dtype not in NATIVE_TYPES:
        return values
    native = NATIVE_TYPES[dtype]
    return np.asarray(widen(np.atleast_1d(values), native)).reshape(values.shape)


def is_number(dtype: str) -> bool:
    """Whether a type is one of numbers or truths."""
    return dtype in NATIVE_TYPES or dtype == "bool" or "int" in dtype


def plain_number(held: Any) -> int | float | bool | None:
    """A value of NumPy as one of Python; None if it is not finite.

    Of a float the shortest decimal that is this number, as 0.001 was written.
    """
    if not isinstance(held, np.floating):
        value: int | bool = held.item()
        return value
    return float(str(held)) if np.isfinite(held) else None


def row_range(
    shape: tuple[int, ...], start: int | None, stop: int | None, outer: int | None
) -> tuple[tuple[int, ...], int]:
    """Shape of some rows of an array, and how many values lie before them.

    Parameters
    ----------
    shape : tuple of int
    start, stop : int, optional
        Rows; all without them.
    outer : int, optional
        Place along a first axis that lies before the rows.

    Examples
    --------
    >>> row_range((40, 6, 2), 10, 12, None)
    ((2, 6, 2), 120)
    >>> row_range((3, 40, 6, 2), 10, 12, 1)
    ((2, 6, 2), 600)
    """
    before = 0
    if outer is not None:
        shape = shape[1:]
        before = outer * math.prod(shape)
    if start is None or stop is None:
        return shape, before
    return (stop - start, *shape[1:]), before + start * math.prod(shape[1:])
