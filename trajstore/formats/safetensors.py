"""safetensors files, and the tensors that any format writes part by part.

Source: the format's specification. An 8-byte little-endian length, a JSON header padded with
spaces, then the data; each tensor is ``{"dtype", "shape", "data_offsets": [begin, end]}`` relative
to the data, and together they cover it without holes or overlaps. The library of the format checks
the header. Values are read here, as bits: the library needs ml_dtypes for bfloat16, and maps the
whole file.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from safetensors import SafetensorError, safe_open

from trajstore.errors import FormatError, InvalidArgument
from trajstore.formats.array_file import ArrayFile, read_rows
from trajstore.strict_json import parse
from trajstore.threads import Progress, in_parallel
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


_NAMES = {
    "bfloat16": "BF16",
    "float16": "F16",
    "float32": "F32",
    "float64": "F64",
    "int64": "I64",
    "int32": "I32",
    "int16": "I16",
    "int8": "I8",
    "uint64": "U64",
    "uint32": "U32",
    "uint16": "U16",
    "uint8": "U8",
    "bool": "BOOL",
}
_DTYPES = {name: dtype for dtype, name in _NAMES.items()}

_LONGEST_HEADER = 16 << 20
_PIECE = 4 << 20
_MOST_DIMS = 8
_MOST_VALUES = 1 << 59


@dataclass(frozen=True, kw_only=True)
class Entry:
    """A tensor as announced by the header.

    Attributes
    ----------
    dtype : str
        Name in torch, or the format's own name of a type that no run has.
    shape : tuple of int
    begin, end : int
        Positions in the file, in bytes.
    """

    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int


class SafetensorsFile(ArrayFile):
    """A safetensors file. Its attributes are its metadata.

    Attributes
    ----------
    entries : dict of str to Entry
    """

    format = "safetensors"
    _expected = "a valid safetensors file, or was cut short"
    _unsound = (SafetensorError, ValueError)
    _unsound_values = (EOFError,)

    def _open(self) -> None:
        self._file = self._files.enter_context(self.path.open("rb"))
        length = int.from_bytes(self._file.read(8), "little")
        if length > _LONGEST_HEADER:
            raise ValueError(
                f"it announces a header of {length} bytes, expected at most {_LONGEST_HEADER}"
            )
        try:
            with safe_open(self.path, framework="numpy"):
                header = parse(self._file.read(length).decode())
        except SafetensorError as error:
            text = str(error).removeprefix("Error while deserializing header: ")
            raise ValueError(text) from None
        self.attributes = header.pop("__metadata__", None) or {}
        self.entries = {key: _entry(key, entry, 8 + length) for key, entry in header.items()}
        self._arrays = {key: (entry.shape, entry.dtype) for key, entry in self.entries.items()}

    def _values(self, key: str, rows: slice, outer: int | None) -> Array:
        entry = self.entries[key]
        if entry.dtype not in _NAMES:
            raise FormatError(
                f"{self.path}: {key} has type {entry.dtype}, expected one of {', '.join(_NAMES)}"
            )
        item = item_type(entry.dtype).newbyteorder("<")
        return read_rows(self._file, item, entry.shape, entry.begin, rows, outer)

    def pieces(self, key: str) -> Iterator[bytes]:
        """Bytes of a tensor of any type, a few MiB at a time.

        Raises
        ------
        FormatError
            If the file has become shorter.
        """
        entry = self.entries[key]
        self._file.seek(entry.begin)
        left = entry.end - entry.begin
        with self._checked(key):
            while left:
                piece = self._file.read(min(left, _PIECE))
                if not piece:
                    raise EOFError("it was cut short")
                left -= len(piece)
                yield piece


def _entry(key: str, entry: dict[str, Any], data: int) -> Entry:
    dtype, shape, (begin, end) = entry["dtype"], entry["shape"], entry["data_offsets"]
    # The library allows any number of axes, and any lengths next to a length of 0.
    if len(shape) > _MOST_DIMS or math.prod(max(length, 1) for length in shape) > _MOST_VALUES:
        raise ValueError(f"{key} has shape {shape}")
    return Entry(
        dtype=_DTYPES.get(dtype, dtype), shape=tuple(shape), begin=data + begin, end=data + end
    )


def write_safetensors(
    path: Path,
    tensors: Sequence[Tensor],
    metadata: Mapping[str, str],
    on_progress: Progress | None = None,
) -> dict[str, int]:
    """Write a file, part by part, each at its position.

    Memory holds a few parts only. The space is allocated first, so that a full disk is found before
    anything is decoded.

    Parameters
    ----------
    path : Path
        An existing file, which is overwritten.
    tensors : sequence of Tensor
    metadata : mapping of str to str
    on_progress : callable, optional

    Returns
    -------
    dict of str to int
        Numbers of rounded values, by key.
    """
    kinds = {tensor.key: (tensor.dtype, tensor.shape) for tensor in tensors}
    offsets = _begin(path, kinds, metadata)
    with path.open("r+b", buffering=0) as file:
        jobs = (
            partial(_write_part, file.fileno(), tensor, where, offsets[tensor.key])
            for tensor in sorted(tensors, key=lambda tensor: offsets[tensor.key])
            for where in tensor.parts()
        )
        return counted(tensors, in_parallel(jobs), on_progress)


@dataclass(frozen=True, kw_only=True)
class FilledArray:
    """An array in a file, filled by assignment to its parts, also from other processes.

    Attributes
    ----------
    path : Path
    dtype : dtype
    shape : tuple of int
    offset : int
        Its position in the file, in bytes.
    """

    path: Path
    dtype: np.dtype[Any]
    shape: tuple[int, ...]
    offset: int

    def __setitem__(self, where: Any, values: Array) -> None:
        if values.size:
            mapped = np.memmap(self.path, self.dtype, "r+", self.offset, self.shape or (1,))
            mapped.reshape(self.shape)[where] = values
            mapped.flush()


def begin_safetensors(
    path: Path, arrays: Mapping[str, tuple[str, tuple[int, ...]]], metadata: Mapping[str, str]
) -> dict[str, FilledArray]:
    """Begin a file of zeros, and return its arrays, to be filled in any order.

    Parameters
    ----------
    path : Path
        An existing file, which is overwritten.
    arrays : mapping of str to tuple
        Type (a name of NumPy) and shape of each array.
    metadata : mapping of str to str

    Raises
    ------
    InvalidArgument
        If the format has no such type.
    """
    for key, (dtype, _) in arrays.items():
        if dtype not in _NAMES:
            raise InvalidArgument(
                f"{key} has type {dtype}, which safetensors files cannot hold; export to HDF5"
            )
    offsets = _begin(path, arrays, metadata)
    return {
        key: FilledArray(path=path, dtype=np.dtype(dtype), shape=shape, offset=offsets[key])
        for key, (dtype, shape) in arrays.items()
    }


def _begin(
    path: Path, arrays: Mapping[str, tuple[str, tuple[int, ...]]], metadata: Mapping[str, str]
) -> dict[str, int]:
    """Allocate a file and write its header. Return the position of each array."""
    header: dict[str, Any] = {"__metadata__": dict(metadata)} if metadata else {}
    begins, end = {}, 0
    # The widest types first, so that each is aligned.
    for key in sorted(arrays, key=lambda key: (-item_type(arrays[key][0]).itemsize, key)):
        dtype, shape = arrays[key]
        begins[key], end = end, end + math.prod(shape) * item_type(dtype).itemsize
        header[key] = {
            "dtype": _NAMES[dtype],
            "shape": list(shape),
            "data_offsets": [begins[key], end],
        }
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    data = 8 + len(text)
    with path.open("r+b", buffering=0) as file:
        _claim(file.fileno(), data + end)
        _write_all(file.fileno(), len(text).to_bytes(8, "little") + text, 0)
    return {key: data + begin for key, begin in begins.items()}


def _write_part(number: int, tensor: Tensor, where: Where, offset: int) -> tuple[str, int, int]:
    """Read a part and write it; return its key, its bytes, and the number of rounded values."""
    bits, rounded = tensor.read(where)
    little = np.ascontiguousarray(bits, bits.dtype.newbyteorder("<"))
    beyond = (tensor.shape[tensor.outer + axis :] for axis in (1, 2))
    row, token = (math.prod(shape) * little.itemsize for shape in beyond)
    at = offset + sum(part.start * size for part, size in zip(where, (row, token), strict=False))
    is_split = len(where) == 2 and len(little) > 0 and little[0].nbytes < row
    for values in little if is_split else [little]:
        _write_all(number, values.reshape(-1).view(np.uint8).data, at)
        at += row
    return tensor.key, bits.nbytes, rounded


def _write_all(number: int, data: bytes | memoryview, offset: int) -> None:
    view = memoryview(data)
    while view:
        count = os.pwrite(number, view, offset)
        view, offset = view[count:], offset + count


def _claim(number: int, size: int) -> None:
    if hasattr(os, "posix_fallocate"):
        os.posix_fallocate(number, 0, size)
    else:  # macOS lacks it: the file grows while it is written
        os.ftruncate(number, size)
