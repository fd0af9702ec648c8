"""NumPy's files: `.npy` with one array, `.npz` with several. Pickled objects are never read."""

from __future__ import annotations

import math
import os
import struct
import tokenize
import warnings
import zipfile
import zlib
from typing import IO, Any

import numpy as np
import numpy.typing as npt

from trajstore.byte_sizes import DEFAULT_MEMORY
from trajstore.errors import FormatError
from trajstore.formats.array_file import OpenedFile, check_expansion, row_range
from trajstore.formats.fortran_rows import FortranRows
from trajstore.values.native_types import NATIVE_TYPES

__all__ = ["NpyFile", "NpzFile"]

Array = npt.NDArray[Any]

_UNSOUND = (
    OSError, ValueError, EOFError, zipfile.BadZipFile, zlib.error, NotImplementedError,
    RuntimeError, KeyError, SyntaxError, TypeError, tokenize.TokenError, struct.error,
    MemoryError, OverflowError, IndexError, AttributeError,
)  # fmt: skip
"""Errors of zipfile, zlib and numpy.lib.format when they read a damaged file.

zipfile raises NotImplementedError for an unknown compression or version.
"""

_PICKLED = "it holds Python objects, which could run code and are never loaded"
_DEFLATED_AT_MOST = 1100
"""Bytes to which one deflated byte can expand, at most."""


class _Pickled(ValueError):
    """An array of Python objects."""


class _Member:
    """One array in NumPy's format, in an open file.

    Attributes
    ----------
    shape : tuple of int
    dtype : numpy.dtype
        Type in the file.
    rows : FortranRows, optional
        Reader of the rows of an array in Fortran order.
    """

    rows: FortranRows | None = None

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
            self.shape, self.is_fortran, self.dtype = read(file)
        self._begin = file.tell()
        if any(length < 0 for length in self.shape):
            raise ValueError(f"it has shape {self.shape}")
        need = math.prod(self.shape) * self.dtype.itemsize
        if self.dtype.hasobject:
            raise _Pickled(_PICKLED)
        if size - self._begin != need:
            raise ValueError(f"it needs {need} bytes, but holds {size - self._begin}")

    @property
    def name(self) -> str:
        """Type. NumPy writes bfloat16 as two bytes without a type, here uint16."""
        return "uint16" if self.dtype.kind == "V" and self.dtype.itemsize == 2 else self.dtype.name

    def read(self, start: int | None, stop: int | None, outer: int | None) -> Array:
        shape, offset = row_range(self.shape, start, stop, outer)
        if self.rows is not None:
            values = self.rows.read(start, stop, outer)
        else:
            values = self._bytes(math.prod(shape), offset).reshape(shape)
        if self.dtype.kind == "V":
            return values.view(np.uint16)
        values = values.astype(self.dtype.newbyteorder("="), copy=False)
        if self.name in NATIVE_TYPES:
            return values.reshape(-1).view(NATIVE_TYPES[self.name].bits).reshape(values.shape)
        return values

    def hold_rows(self, memory: int) -> None:
        """Read rows in Fortran order, with `memory` bytes for the rows held at once."""
        self.rows = FortranRows(tuple(self.shape), self.dtype, self._bytes, memory)

    @property
    def is_scattered(self) -> bool:
        """True if the values of a row are not contiguous."""
        return bool(self.is_fortran) and len(self.shape) > 1

    def _bytes(self, count: int, before: int) -> Array:
        values = np.empty(count, self.dtype)
        view = values.view(np.uint8).data
        self._file.seek(self._begin + before * self.dtype.itemsize)
        while view:
            some = self._file.read(min(len(view), 1 << 20))
            if not some:
                raise ValueError("it was cut short")
            view[: len(some)] = some
            view = view[len(some) :]
        return values


class _NumpyFile(OpenedFile):
    """Base of the two files: members that are read one by one."""

    _members: dict[str, _Member]
    _opened: list[IO[bytes] | zipfile.ZipFile]  # in the order in which they are closed

    @property
    def keys(self) -> tuple[str, ...]:
        """Names of the arrays."""
        return tuple(self._members)

    def _close(self) -> None:
        for opened in self._opened:
            opened.close()

    def _share(self, memory: int) -> None:
        """Divide the memory among the members in Fortran order."""
        scattered = [member for member in self._members.values() if member.is_scattered]
        for member in scattered:
            member.hold_rows(memory // len(scattered))

    def shape(self, key: str) -> tuple[int, ...]:
        """Shape of an array."""
        return tuple(self._members[key].shape)

    def dtype(self, key: str) -> str:
        """Type of an array."""
        return self._members[key].name

    def read(
        self, key: str, start: int | None = None, stop: int | None = None, outer: int | None = None
    ) -> Array:
        """Read an array, or its rows from `start` up to `stop`; floats as their bits.

        Parameters
        ----------
        key : str
        start, stop : int, optional
        outer : int, optional
            Position along a first axis before the rows.

        Raises
        ------
        FormatError
            If they cannot be read.
        """
        try:
            return self._members[key].read(start, stop, outer)
        except _UNSOUND as error:
            raise FormatError(
                f"{self.path} is not a valid NumPy file: cannot read {key} ({error})"
            ) from None


class NpyFile(_NumpyFile):
    """A `.npy` file, open for reading. Its array has the name of the file.

    Parameters
    ----------
    path : path-like
    memory : int
        Bytes of rows in Fortran order that may be held.

    Raises
    ------
    RunNotFound
        If the file does not exist.
    FormatError
        If it is not a `.npy` file, or its size does not match its array.
    """

    format = "npy"

    def __init__(self, path: str | os.PathLike[str], memory: int = DEFAULT_MEMORY) -> None:
        super().__init__(path)
        file = self.path.open("rb")
        self._opened = [file]
        try:
            member = _Member(file, os.fstat(file.fileno()).st_size)
        except BaseException as error:
            self._close()
            if isinstance(error, _UNSOUND):
                raise FormatError(f"{path} is not a valid .npy file: {error}") from None
            raise
        self._members = {self.path.stem: member}
        self._share(memory)


class NpzFile(_NumpyFile):
    """A `.npz` file, open for reading; a context manager.

    Compressed members are decompressed as a stream, so rows are best read in order.

    Parameters
    ----------
    path : path-like
    memory : int
        Bytes of rows in Fortran order that may be held.

    Attributes
    ----------
    unread : dict of str to str
        Members that hold Python objects.

    Raises
    ------
    RunNotFound
        If the file does not exist.
    FormatError
        If it is not a `.npz` file, or a member is not stored as announced.
    """

    format = "npz"

    def __init__(self, path: str | os.PathLike[str], memory: int = DEFAULT_MEMORY) -> None:
        super().__init__(path)
        self._members = {}
        try:
            self._zip = zipfile.ZipFile(self.path)
        except _UNSOUND as error:
            raise FormatError(f"{path} is not a valid .npz file: {error}") from None
        self._opened = [self._zip]
        try:
            for info in self._zip.infolist():
                name = info.filename.removesuffix(".npy")
                try:
                    self._members[name] = self._member(info)
                except _Pickled as error:
                    self.unread[name] = str(error)
        except BaseException as error:
            self._close()
            if isinstance(error, _UNSOUND):
                raise FormatError(f"{path} is not a valid .npz file: {error}") from None
            raise
        try:
            check_expansion(self.path, sum(info.file_size for info in self._zip.infolist()))
        except FormatError:
            self._close()
            raise
        self._share(memory)

    def _member(self, info: zipfile.ZipInfo) -> _Member:
        if not info.filename.endswith(".npy"):
            raise ValueError(f"it holds {info.filename!r}, which is not a NumPy array")
        size = self.path.stat().st_size
        if info.compress_size > size or info.file_size > _DEFLATED_AT_MOST * size:
            raise ValueError(
                f"{info.filename} announces {info.file_size} bytes, but the file has {size}"
            )
        if info.filename.removesuffix(".npy") in self._members:
            raise ValueError(f"the name {info.filename} occurs twice in it")
        opened = self._zip.open(info)
        self._opened.insert(-1, opened)
        try:
            return _Member(opened, info.file_size)
        except _UNSOUND as error:
            if isinstance(error, _Pickled):
                raise
            raise ValueError(f"{info.filename}: {error}") from None
