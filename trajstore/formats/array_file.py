"""Base of every format, named arrays that are read by rows, and NumPy's files, `.npy` and `.npz`.

A format checks a file completely before it reads a value. Pickled objects are never read.
"""

from __future__ import annotations

import math
import os
import shutil
import struct
import tokenize
import warnings
import zipfile
import zlib
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from functools import cached_property
from pathlib import Path
from tempfile import TemporaryFile
from typing import IO, Any, Self

import numpy as np
import numpy.typing as npt

from trajstore.errors import FormatError, RunNotFound, TrajstoreError
from trajstore.units import format_bytes
from trajstore.values.native_types import NATIVE_TYPES, widen

Array = npt.NDArray[Any]

_ALWAYS_EXPANDED = 1 << 30
_EXPANDED_AT_MOST = 200
_LARGEST_TABLE = 64 << 20
_LONGEST_NUMBER = 64


class ArrayFile:
    """A file of named arrays, open for reading; a context manager.

    A format has a subclass with `_open` and `_values`. `_open` checks the size of every array, and
    fills `_arrays`.

    Parameters
    ----------
    path : path-like
    is_folder : bool
        True if it must be a folder, False for a file.

    Attributes
    ----------
    path : Path
    format : str
        One of safetensors, hdf5, npz, npy, torch, checkpoint and folder.
    keys : tuple of str
        Names of the arrays.
    attributes : dict
        Strings, numbers and lists of numbers besides the arrays.
    unread : dict of str to str
        Content that cannot be read, with reasons: ``{"names": "a variable-length string"}``.

    Raises
    ------
    RunNotFound
        If the path does not exist.
    FormatError
        If it is not a file of the format, or an array is not stored as announced.
    """

    format: str
    _expected = ""
    """The format in words, for messages."""
    _unsound: tuple[type[Exception], ...] = ()
    """Errors of the library when it opens a damaged file."""
    _unsound_values: tuple[type[Exception], ...] = ()
    """Errors of the library when it reads values of a damaged file."""

    def __init__(self, path: str | os.PathLike[str], *, is_folder: bool = False) -> None:
        self.path = Path(path)
        self._arrays: dict[str, tuple[tuple[int, ...], str]] = {}
        self.attributes: dict[str, Any] = {}
        self.unread: dict[str, str] = {}
        if not (self.path.is_dir() if is_folder else self.path.is_file()):
            raise RunNotFound(f"there is no {'folder' if is_folder else 'file'} at {path}")
        with ExitStack() as files, self._checked():
            self._files = files
            self._open()
            self._files = files.pop_all()
        self.keys = tuple(self._arrays)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self._files.close()

    def shape(self, key: str) -> tuple[int, ...]:
        """Shape of an array."""
        return self._arrays[key][0]

    def dtype(self, key: str) -> str:
        """Type of an array, by its name in NumPy and ml_dtypes: bfloat16, uint16, bool, …."""
        return self._arrays[key][1]

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
        with self._checked(key):
            values = self._values(key, slice(start, stop), outer)
        values = values.astype(values.dtype.newbyteorder("="), copy=False)
        native = NATIVE_TYPES.get(values.dtype.name)
        if native is None:
            return values
        return np.ascontiguousarray(values).view(native.bits).reshape(values.shape)

    def _open(self) -> None:
        """Open and check the file. `_files` closes what is entered there.

        `_arrays` holds the shape and type of each array afterwards.
        """
        raise NotImplementedError

    def _values(self, key: str, rows: slice, outer: int | None) -> Array:
        """Values as the library returns them, for `read`."""
        raise NotImplementedError

    @contextmanager
    def _checked(self, key: str = "") -> Iterator[None]:
        """Name the file, and the key whose values are read, in errors of the library."""
        unsound = self._unsound_values if key else self._unsound
        try:
            yield
        except TrajstoreError:
            raise
        except unsound as error:
            fault = f"cannot read {key} ({error})" if key else error
            raise FormatError(f"{self.path} is not {self._expected}: {fault}") from None


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
            f"most {format_bytes(_LARGEST_TABLE)}; omit it with map='ignore={key}'"
        )
    values = file.read(key)
    if dtype not in NATIVE_TYPES:
        return values
    native = NATIVE_TYPES[dtype]
    return np.asarray(widen(np.atleast_1d(values), native)).reshape(values.shape)


def labels_of(file: ArrayFile, key: str) -> Array:
    """`values_of` for labels, whose booleans have to be true or false.

    Raises
    ------
    FormatError
        As for `values_of`, and if a byte of a boolean is neither 0 nor 1.
    """
    values = values_of(file, key)
    if values.dtype == bool and values.view(np.uint8).max(initial=0) > 1:
        raise FormatError(f"{file.path}: {key} holds bytes other than 0 and 1")
    return values


def is_number(dtype: str) -> bool:
    """True for types of numbers and booleans."""
    return dtype in NATIVE_TYPES or dtype == "bool" or "int" in dtype


def number_in(value: Any) -> Any:
    """The number in a short text, as in metadata of safetensors; any other value unchanged."""
    is_short = isinstance(value, str) and len(value) <= _LONGEST_NUMBER
    for kind in (int, float) if is_short else ():
        with suppress(ValueError):
            return kind(value)
    return value


def plain_number(number: Any) -> int | float | bool | None:
    """A NumPy value as a Python number; None if it is not finite.

    A float becomes the shortest decimal that rounds to it, such as 0.001.
    """
    if not isinstance(number, np.floating):
        value: int | bool = number.item()
        return value
    return float(str(number)) if np.isfinite(number) else None


def read_rows(
    file: IO[bytes],
    dtype: np.dtype[Any],
    shape: tuple[int, ...],
    offset: int,
    rows: slice,
    outer: int | None,
) -> Array:
    """Rows of an array that a file holds in C order.

    Parameters
    ----------
    file : binary file
    dtype : numpy.dtype
        Type in the file.
    shape : tuple of int
    offset : int
        Position of the array in the file, in bytes.
    rows : slice
        Start and stop of the rows; None for all.
    outer : int or None
        Position along a first axis before the rows.

    Raises
    ------
    EOFError
        If the file ends before the rows do.
    """
    if outer is not None:
        shape = shape[1:]
        offset += outer * math.prod(shape) * dtype.itemsize
    if rows.start is not None:
        offset += rows.start * math.prod(shape[1:]) * dtype.itemsize
        shape = (rows.stop - rows.start, *shape[1:])
    need = math.prod(shape) * dtype.itemsize
    file.seek(offset)
    data = file.read(need)
    if len(data) < need:
        raise EOFError("it was cut short")
    return np.frombuffer(data, dtype).reshape(shape)


_UNSOUND: tuple[type[Exception], ...] = (
    ValueError, EOFError, zipfile.BadZipFile, zlib.error, NotImplementedError,
    RuntimeError, KeyError, SyntaxError, TypeError, tokenize.TokenError, struct.error,
    MemoryError, OverflowError, IndexError, AttributeError,
)  # fmt: skip
"""Errors of zipfile, zlib and numpy.lib.format when they read a damaged file, besides OSError.

zipfile raises NotImplementedError for an unknown compression or version.
"""

_PICKLED = "it holds Python objects, which could run code and are never loaded"
_DEFLATED_AT_MOST = 1100
"""Bytes to which one deflated byte can expand, at most."""


class _Member:
    """One array in NumPy's format, in an open file.

    Attributes
    ----------
    shape : tuple of int
    dtype : numpy.dtype
        Type in the file.
    is_pickled : bool
        True for an array of Python objects.
    """

    def __init__(self, file: IO[bytes], size: int) -> None:
        self._file = file
        version = np.lib.format.read_magic(file)
        read = {
            (1, 0): np.lib.format.read_array_header_1_0,
            (2, 0): np.lib.format.read_array_header_2_0,
        }.get(version)
        if read is None:
            raise ValueError(f"version {version} of NumPy's format is unknown")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # warnings about headers of Python 2
            shape, is_fortran, self.dtype = read(file)
        self.shape = tuple(shape)
        self._begin = file.tell()
        if any(length < 0 for length in self.shape):
            raise ValueError(f"it has shape {self.shape}")
        need = math.prod(self.shape) * self.dtype.itemsize
        self.is_pickled = self.dtype.hasobject
        if not self.is_pickled and size - self._begin != need:
            raise ValueError(f"it needs {need} bytes, but holds {size - self._begin}")
        self._is_scattered = is_fortran and len(self.shape) > 1 and need > 0

    @property
    def kind(self) -> tuple[tuple[int, ...], str]:
        """Shape and type. NumPy writes bfloat16 as two bytes without a type, here uint16."""
        is_bits = self.dtype.kind == "V" and self.dtype.itemsize == 2
        return self.shape, "uint16" if is_bits else self.dtype.name

    def read(self, rows: slice, outer: int | None) -> Array:
        if self._is_scattered:
            scattered = (self._mapped if outer is None else self._mapped[outer])[rows]
            # First in the order of the file, so that it is read from its begin to its end.
            values = np.ascontiguousarray(np.array(scattered, order="F"))
        else:
            values = read_rows(self._file, self.dtype, self.shape, self._begin, rows, outer)
        return values.view(np.uint16) if self.dtype.kind == "V" else values

    @cached_property
    def _mapped(self) -> Array:
        """The array in Fortran order, whose rows are scattered. A member is extracted first."""
        if not isinstance(self._file, zipfile.ZipExtFile):
            return np.memmap(self._file, self.dtype, "r", self._begin, self.shape, "F")
        with TemporaryFile() as extracted:
            self._file.seek(0)
            shutil.copyfileobj(self._file, extracted)
            return np.memmap(extracted, self.dtype, "r", self._begin, self.shape, "F")


class _NumpyFile(ArrayFile):
    """Base of the two files: members that are read one by one."""

    _unsound = (*_UNSOUND, OSError)
    _unsound_values = _UNSOUND  # an OSError is of the disk, such as a full one
    _members: dict[str, _Member]

    def _values(self, key: str, rows: slice, outer: int | None) -> Array:
        return self._members[key].read(rows, outer)


class NpyFile(_NumpyFile):
    """A `.npy` file. Its array has the name of the file."""

    format = "npy"
    _expected = "a valid .npy file"

    def _open(self) -> None:
        file = self._files.enter_context(self.path.open("rb"))
        member = _Member(file, os.fstat(file.fileno()).st_size)
        if member.is_pickled:
            raise ValueError(_PICKLED)
        self._members = {self.path.stem: member}
        self._arrays = {key: member.kind for key, member in self._members.items()}


class NpzFile(_NumpyFile):
    """A `.npz` file. Members that hold Python objects are not read.

    Compressed members are decompressed as a stream, so rows are best read in order.
    """

    format = "npz"
    _expected = "a valid .npz file"

    def _open(self) -> None:
        self._members = {}
        archive = self._files.enter_context(zipfile.ZipFile(self.path))
        for info in archive.infolist():
            name = info.filename.removesuffix(".npy")
            member = self._member(archive, info)
            if member.is_pickled:
                self.unread[name] = _PICKLED
            else:
                self._members[name] = member
        self._arrays = {key: member.kind for key, member in self._members.items()}
        check_expansion(self.path, sum(info.file_size for info in archive.infolist()))

    def _member(self, archive: zipfile.ZipFile, info: zipfile.ZipInfo) -> _Member:
        if not info.filename.endswith(".npy"):
            raise ValueError(f"it holds {info.filename!r}, which is not a NumPy array")
        size = self.path.stat().st_size
        if info.compress_size > size or info.file_size > _DEFLATED_AT_MOST * size:
            raise ValueError(
                f"{info.filename} announces {info.file_size} bytes, but the file has {size}"
            )
        if info.filename.removesuffix(".npy") in self._members:
            raise ValueError(f"the name {info.filename} occurs twice in it")
        opened = self._files.enter_context(archive.open(info))
        try:
            return _Member(opened, info.file_size)
        except self._unsound as error:
            raise ValueError(f"{info.filename}: {error}") from None
