"""NumPy's files: `.npy` with one array, `.npz` with several. Pickled objects are never read."""

from __future__ import annotations

import math
import os
import shutil
import struct
import tokenize
import warnings
import zipfile
import zlib
from functools import cached_property
from tempfile import TemporaryFile
from typing import IO, Any

import numpy as np
import numpy.typing as npt

from trajstore.formats.array_file import ArrayFile, check_expansion, read_rows

Array = npt.NDArray[Any]

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
