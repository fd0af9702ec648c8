"""The safetensors file format. The untrusted header is checked completely before data are read.

Source: the format's specification. An 8-byte little-endian length, a JSON header padded with
spaces, then the data; each tensor is ``{"dtype", "shape", "data_offsets": [begin, end]}`` relative
to the data, and together they cover it without holes or overlaps.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from trajstore.errors import FormatError, InvalidArgument
from trajstore.formats.array_file import OpenedFile, row_range
from trajstore.formats.streamed_tensor import Tensor, Where, item_type
from trajstore.strict_json import parse
from trajstore.threads import Progress, in_parallel

__all__ = ["Entry", "FilledArray", "SafetensorsFile", "begin_safetensors", "write_safetensors"]

Array = npt.NDArray[Any]

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
# Types of the format that NumPy lacks. A file may hold them next to imported tensors.
_OTHER_SIZES = {"F8_E5M2": 1, "F8_E4M3": 1}

_LONGEST_HEADER = 16 << 20
_PIECE = 4 << 20
_MOST_DIMS = 8


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


class SafetensorsFile(OpenedFile):
    """A safetensors file, open for reading; a context manager.

    Parameters
    ----------
    path : path-like

    Attributes
    ----------
    format : str
    entries : dict of str to Entry
    attributes : dict of str to str
        Its metadata.
    keys : tuple of str
        Names of the tensors.
    unread : dict of str to str
        Always empty.

    Raises
    ------
    RunNotFound
        If the file does not exist.
    FormatError
        If it is not a safetensors file, or its header does not match its size.
    """

    format = "safetensors"

    def __init__(self, path: str | os.PathLike[str]) -> None:
        super().__init__(path)
        self._file = self.path.open("rb", buffering=0)
        try:
            self.entries, self.attributes = self._header()
        except BaseException:
            self._file.close()
            raise
        self.keys = tuple(self.entries)

    def _close(self) -> None:
        self._file.close()

    def shape(self, key: str) -> tuple[int, ...]:
        """Shape of a tensor."""
        return self.entries[key].shape

    def dtype(self, key: str) -> str:
        """Type of a tensor, by its name in torch."""
        return self.entries[key].dtype

    def read(
        self, key: str, start: int | None = None, stop: int | None = None, outer: int | None = None
    ) -> Array:
        """Read the bits of a tensor, or of its rows from `start` up to `stop`.

        Parameters
        ----------
        key : str
        start, stop : int, optional
        outer : int, optional
            Position along a first axis before the rows.

        Raises
        ------
        FormatError
            If NumPy lacks its type, or the file has become shorter.
        """
        entry = self.entries[key]
        if entry.dtype not in _NAMES:
            raise FormatError(
                f"{self.path}: {key} has type {entry.dtype}, expected one of {', '.join(_NAMES)}"
            )
        item = item_type(entry.dtype)
        shape, offset = row_range(entry.shape, start, stop, outer)
        bits = np.empty(shape, item.newbyteorder("<"))
        view = bits.reshape(-1).view(np.uint8).data
        self._file.seek(entry.begin + offset * item.itemsize)
        while view:
            count = self._file.readinto(view)
            if not count:
                raise FormatError(f"{self.path}: the file ends within {key}; it was cut short")
            view = view[count:]
        return bits.astype(item, copy=False)

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
        while left:
            piece = self._file.read(min(left, _PIECE))
            if not piece:
                raise FormatError(f"{self.path}: the file ends within {key}; it was cut short")
            left -= len(piece)
            yield piece

    def _header(self) -> tuple[dict[str, Entry], dict[str, str]]:
        size = os.fstat(self._file.fileno()).st_size
        prefix = self._file.read(8)
        length = int.from_bytes(prefix, "little")
        if len(prefix) < 8 or length < 2 or length > size - 8:
            raise self._wrong(
                f"its first 8 bytes announce a header of {length} bytes, but it has {size} bytes"
            )
        if length > _LONGEST_HEADER:
            raise self._wrong(f"its header has {length} bytes, expected at most {_LONGEST_HEADER}")
        text = self._file.read(length)
        try:
            header = parse(text.decode())
        except ValueError as error:
            raise self._wrong(f"cannot read its header ({error})") from None
        if not isinstance(header, dict):
            raise self._wrong("its header is not a JSON object")
        metadata = header.pop("__metadata__", {})
        if not isinstance(metadata, dict) or not all(
            isinstance(value, str) for value in metadata.values()
        ):
            raise self._wrong("its metadata are not a map from strings to strings")
        data = 8 + length
        entries = {key: self._entry(key, entry, data) for key, entry in header.items()}
        at = data
        for key, entry in sorted(entries.items(), key=lambda item: (item[1].begin, item[1].end)):
            if entry.begin != at:
                fault = "overlaps the tensor before it" if entry.begin < at else "leaves a hole"
                raise self._wrong(f"{key} begins at byte {entry.begin - data} and {fault}")
            at = entry.end
        if at != size:
            raise self._wrong(
                f"its tensors need {at - data} bytes, but it holds {size - data}; it was cut "
                "short, or holds other data"
            )
        return entries, metadata

    def _entry(self, key: str, entry: Any, data: int) -> Entry:
        if not isinstance(entry, dict) or entry.keys() != {"dtype", "shape", "data_offsets"}:
            raise self._wrong(f"{key} is not described by dtype, shape and data_offsets")
        dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
        if not isinstance(dtype, str) or (dtype not in _DTYPES and dtype not in _OTHER_SIZES):
            raise self._wrong(f"{key} has the unknown type {dtype!r}")
        if not _whole_numbers(shape) or len(shape) > _MOST_DIMS:
            raise self._wrong(f"the shape of {key} is not a list of up to {_MOST_DIMS} lengths")
        if not _whole_numbers(offsets) or len(offsets) != 2:
            raise self._wrong(f"the data_offsets of {key} are not two whole numbers")
        itemsize = _OTHER_SIZES.get(dtype) or item_type(_DTYPES[dtype]).itemsize
        begin, end = offsets
        if end - begin != math.prod(shape) * itemsize:
            raise self._wrong(
                f"{key} has {end - begin} bytes, but shape {shape} of {dtype} needs "
                f"{math.prod(shape) * itemsize}"
            )
        return Entry(
            dtype=_DTYPES.get(dtype, dtype),
            shape=tuple(shape),
            begin=data + begin,
            end=data + end,
        )

    def _wrong(self, fault: str) -> FormatError:
        return FormatError(f"{self.path} is not a valid safetensors file: {fault}")


def _whole_numbers(values: Any) -> bool:
    # Huge numbers would slow the products that follow; no file has 2**63 bytes.
    return isinstance(values, list) and all(
        type(value) is int and 0 <= value < 1 << 63 for value in values
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
    rounded = dict.fromkeys(kinds, 0)
    total = sum(tensor.nbytes for tensor in tensors)
    done = 0
    with path.open("r+b", buffering=0) as file:
        jobs = (
            partial(_write_part, file.fileno(), tensor, where, offsets[tensor.key])
            for tensor in sorted(tensors, key=lambda tensor: offsets[tensor.key])
            for where in tensor.parts()
        )
        for key, size, changed in in_parallel(jobs):
            rounded[key] += changed
            done += size
            if on_progress is not None:
                on_progress(done, total)
    assert done == total, f"{done} bytes were written, {total} announced"
    return rounded


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
            raise InvalidArgument(f"{key} has type {dtype}, which safetensors files cannot hold")
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
    _write_bits(number, tensor, where, bits, offset)
    return tensor.key, bits.nbytes, rounded


def _write_bits(number: int, tensor: Tensor, where: Where, bits: Array, offset: int) -> None:
    little = np.ascontiguousarray(bits, bits.dtype.newbyteorder("<"))
    if not where:
        _write_all(number, little.reshape(-1).view(np.uint8).data, offset)
        return
    of_row = tensor.shape[tensor.outer + 1 :]
    row = math.prod(of_row) * little.itemsize
    at = offset + where[0].start * row
    if len(where) == 1 or len(little) == 0 or little[0].nbytes == row:
        _write_all(number, little.reshape(-1).view(np.uint8).data, at)
        return
    at += where[1].start * math.prod(of_row[1:]) * little.itemsize
    for values in little:
        _write_all(number, values.reshape(-1).view(np.uint8).data, at)
        at += row


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
