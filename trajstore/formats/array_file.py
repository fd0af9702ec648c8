"""Interface of every format: named arrays, read by rows, and attributes."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import IO, Any, Protocol, Self

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
    "read_rows",
    "values_of",
]

Array = npt.NDArray[Any]

_ALWAYS_EXPANDED = 1 << 30
_EXPANDED_AT_MOST = 200
_LARGEST_TABLE = 64 << 20


class ArrayFile(Protocol):
    """A file of named arrays, open for reading. The size of every array has been checked.

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
        """Strings, numbers and lists of numbers besides the arrays."""

    @property
    def unread(self) -> Mapping[str, str]:
        """Content that cannot be read, with reasons: ``{"names": "a variable-length string"}``."""

    def shape(self, key: str) -> tuple[int, ...]:
        """Shape of an array."""

    def dtype(self, key: str) -> str:
        """Type of an array, by its name in NumPy and ml_dtypes: bfloat16, uint16, bool, …."""

    def read(
        self, key: str, start: int | None = None, stop: int | None = None, outer: int | None = None
    ) -> Array:
        """Read values of an array; floating-point numbers as their bits.

        Parameters
        ----------
        key : str
        start, stop : int, optional
            Rows to read. Default: all.
        outer : int, optional
            Position along a first axis before the rows.

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
    """Base of the readers of all formats: a context manager for an existing path.

    Parameters
    ----------
    path : path-like
    is_folder : bool
        True if it must be a folder, False for a file.

    Raises
    ------
    RunNotFound
        If the path does not exist.
    """

    def __init__(self, path: str | os.PathLike[str], *, is_folder: bool = False) -> None:
        self.path = Path(path)
        self.attributes: dict[str, Any] = {}
        self.unread: dict[str, str] = {}
        if not (self.path.is_dir() if is_folder else self.path.is_file()):
            raise RunNotFound(f"there is no {'folder' if is_folder else 'file'} at {path}")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self._close()

    def _close(self) -> None:
        raise NotImplementedError


def check_expansion(path: Path, decoded: int) -> None:
    """Refuse a small compressed file that expands enormously and takes minutes to decode.

    Deflate expands a byte to at most 1,032 bytes; recorded trainings expand by 2 to 20.

    Parameters
    ----------
    path : Path
    decoded : int
        Bytes of all its arrays.

    Raises
    ------
    FormatError
        If these are more than 1 GiB, and more than 200 times the size of the file.
    """
    size = path.stat().st_size
    if decoded > max(_ALWAYS_EXPANDED, _EXPANDED_AT_MOST * size):
        raise FormatError(
            f"{path} has {format_bytes(size)}, but its arrays would expand to "
            f"{format_bytes(decoded)}, more than {_EXPANDED_AT_MOST} times as much; if this is "
            "correct, write it without compression (h5repack -f NONE, numpy.savez)"
        )


def values_of(file: ArrayFile, key: str) -> Array:
    """All values of an array as numbers; floating-point numbers in their stored type.

    Raises
    ------
    FormatError
        If they cannot be read, or need more than 64 MiB. Only labels and tables of tokens are read
        whole.
    """
    count, dtype = math.prod(file.shape(key)), file.dtype(key)
    itemsize = 8 if dtype not in NATIVE_TYPES else NATIVE_TYPES[dtype].itemsize
    if count * itemsize > _LARGEST_TABLE:
        raise FormatError(
            f"{file.path}: {key} has shape {file.shape(key)}, but tables and labels may have at "
            f"most {format_bytes(_LARGEST_TABLE)}; omit it with --map ignore={key}"
        )
    values = file.read(key)
    if dtype not in NATIVE_TYPES:
        return values
    native = NATIVE_TYPES[dtype]
    return np.asarray(widen(np.atleast_1d(values), native)).reshape(values.shape)


def is_number(dtype: str) -> bool:
    """True for types of numbers and booleans."""
    return dtype in NATIVE_TYPES or dtype == "bool" or "int" in dtype


def plain_number(held: Any) -> int | float | bool | None:
    """A NumPy value as a Python number; None if it is not finite.

    A float becomes the shortest decimal that rounds to it, such as 0.001.
    """
    if not isinstance(held, np.floating):
        value: int | bool = held.item()
        return value
    return float(str(held)) if np.isfinite(held) else None


def read_rows(
    file: IO[bytes],
    dtype: np.dtype[Any],
    shape: tuple[int, ...],
    offset: int,
    start: int | None = None,
    stop: int | None = None,
    outer: int | None = None,
) -> Array:
    """Rows of an array that a file holds in C order, in the byte order of the machine.

    Parameters
    ----------
    file : binary file
    dtype : numpy.dtype
        Type in the file.
    shape : tuple of int
    offset : int
        Position of the array in the file, in bytes.
    start, stop : int, optional
        Rows. Default: all.
    outer : int, optional
        Position along a first axis before the rows.

    Raises
    ------
    EOFError
        If the file ends before the rows do.
    """
    if outer is not None:
        shape = shape[1:]
        offset += outer * math.prod(shape) * dtype.itemsize
    if start is not None and stop is not None:
        offset += start * math.prod(shape[1:]) * dtype.itemsize
        shape = (stop - start, *shape[1:])
    need = math.prod(shape) * dtype.itemsize
    file.seek(offset)
    data = file.read(need)
    if len(data) < need:
        raise EOFError("it was cut short")
    values = np.frombuffer(data, dtype).reshape(shape)
    return values.astype(dtype.newbyteorder("="), copy=False)
