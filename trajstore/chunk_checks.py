"""Checks of what the arrays of a run hold: shard by shard, chunk by chunk, as jobs for threads."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from trajstore.bits import NATIVE_TYPES, NativeType, narrow
from trajstore.codecs import unfold
from trajstore.documents import Problem, block_rows, is_series
from trajstore.errors import FormatError, InvalidArgument
from trajstore.foreign import open_foreign
from trajstore.inspection import Inspection
from trajstore.metadata import chunk_key
from trajstore.schema import STEP, VARIABLES
from trajstore.stored import StoredArray

__all__ = ["Found", "Job", "array_jobs", "size_of_shards"]

Array = npt.NDArray[Any]

_BATCH = 4 << 20
_ABSENT = (1 << 64) - 1


@dataclass(kw_only=True)
class Found:
    """What checks have found.

    Attributes
    ----------
    problems : list of Problem
    row0 : list of str
        Sentences on what row 0 holds, if it is the state before any step.
    notes : list of str
    steps : dict of int to ndarray
        Values of `step`, by their first row.
    shards, chunks, bytes : int
        Checked.
    """

    problems: list[Problem] = field(default_factory=list)
    row0: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    steps: dict[int, Array] = field(default_factory=dict)
    shards: int = 0
    chunks: int = 0
    bytes: int = 0

    def add(self, other: Found) -> None:
        """Add what another check has found; a sentence on row 0 only once."""
        self.problems += other.problems
        self.row0 += [sentence for sentence in other.row0 if sentence not in self.row0]
        self.notes += other.notes
        self.steps |= other.steps
        self.shards += other.shards
        self.chunks += other.chunks
        self.bytes += other.bytes


Job = Callable[[], Found]


class _Shard:
    """An open shard; closed when the last job that reads it is done."""

    def __init__(self, path: Path) -> None:
        self.number = -1
        self.path = path
        self.number = os.open(path, os.O_RDONLY)

    def __del__(self) -> None:
        if self.number >= 0:
            os.close(self.number)


def size_of_shards(inspection: Inspection) -> int:
    """Bytes of the shards of the committed rows, those that are there."""
    size = 0
    for name, document in inspection.arrays.items():
        if not is_series(name) or inspection.stored(name) is None:
            continue
        for block in range(-(-inspection.rows // block_rows(document))):
            path = inspection.path / chunk_key(name, block, len(document["shape"]))
            with contextlib.suppress(OSError):  # which is a problem of its own
                size += path.stat().st_size
    return size


def array_jobs(inspection: Inspection, name: str, found: Found) -> Iterator[Job]:
    """Checks of an array, to be done in any thread.

    Parameters
    ----------
    inspection : Inspection
    name : str
    found : Found
        Takes what is found meanwhile: missing shards, and what does not cover a shard.
    """
    stored = inspection.stored(name)
    if stored is None:
        yield from _foreign_jobs(inspection, name, found)
        return
    native = NATIVE_TYPES.get(
        inspection.arrays[name]["attributes"].get("native_dtype"), stored.chain.native
    )
    for block in range(-(-inspection.rows // stored.shard[0])):
        path = inspection.path / chunk_key(name, block, stored.ndim)
        try:
            shard = _Shard(path)
        except OSError as error:
            missing = isinstance(error, FileNotFoundError)
            found.problems.append(
                Problem(
                    array=name,
                    block=block,
                    path=path,
                    message="the shard is missing" if missing else f"cannot be read: {error}",
                    # What the system refuses today it may give tomorrow.
                    remedy="cut" if missing else "none",
                )
            )
            continue
        found.shards += 1
        where = _index(found, stored, shard, block)
        batch: list[int] = []
        size = 0
        # In the order of the file.
        for number in sorted(range(len(where)), key=lambda number: where[number]):
            batch.append(number)
            size += where[number][1]
            if size >= _BATCH:
                yield _job(stored, native, shard, block, where, batch)
                batch, size = [], 0
        if batch:
            yield _job(stored, native, shard, block, where, batch)


def _index(
    found: Found, stored: StoredArray, shard: _Shard, block: int
) -> dict[int, tuple[int, int]]:
    """Offset and length of each chunk that can be read; report what does not cover the shard."""
    size = os.fstat(shard.number).st_size
    end = size - stored.index_length

    def report(message: str, first: int, stop: int, remedy: Literal["cut", "none"] = "cut") -> None:
        found.problems.append(
            Problem(
                array=stored.name,
                block=block,
                first_byte=first,
                stop_byte=stop,
                path=shard.path,
                message=message,
                remedy=remedy,
            )
        )

    if end < 0:
        torn = f"the shard has {size} bytes, too few for its index of {stored.index_length}"
        report(torn, 0, size)
        return {}
    try:
        index = stored.index(shard.number, block)
    except FormatError:
        report("the index is broken", end, size)
        return {}
    except OSError as error:
        report(f"the index cannot be read: {error}", end, size, "none")
        return {}
    found.bytes += stored.index_length
    entries = [(int(offset), int(length)) for offset, length in index]
    where: dict[int, tuple[int, int]] = {}
    at = 0
    for number in sorted(range(len(entries)), key=lambda number: entries[number]):
        offset, length = entries[number]
        if (offset, length) == (_ABSENT, _ABSENT):
            report(f"chunk {number} is not stored", end, size)
            continue
        if offset + length > end:
            report(f"chunk {number} ends beyond the chunks", offset, offset + length)
            continue
        if offset != at:
            fault = "belong to no chunk" if offset > at else "belong to two chunks"
            report(f"bytes of the shard {fault}", min(at, offset), max(at, offset), "none")
        at = max(at, offset + length)
        where[number] = offset, length
    if at < end:
        report("bytes of the shard belong to no chunk", at, end, "none")
    return where


def _job(
    stored: StoredArray,
    native: NativeType,
    shard: _Shard,
    block: int,
    where: dict[int, tuple[int, int]],
    numbers: list[int],
) -> Job:
    def run() -> Found:
        found = Found()
        for number in numbers:
            offset, length = where[number]
            found.chunks += 1
            found.bytes += length
            remedy: Literal["cut", "none"] = "none"
            try:
                data = os.pread(shard.number, length, offset)
                if len(data) != length:
                    raise ValueError("the file ends before it")
                values = stored.decoder.unpack(data)
                fault = _fault(stored, native, values)
            except OSError as error:
                fault = f"cannot be read: {error}"
            except (ValueError, RuntimeError) as error:
                fault, remedy = f"a broken chunk ({error})", "cut"
            if fault:
                found.problems.append(
                    Problem(
                        array=stored.name,
                        block=block,
                        first_byte=offset,
                        stop_byte=offset + length,
                        path=shard.path,
                        message=fault,
                        remedy=remedy,
                    )
                )
                continue
            if stored.name == STEP.name:
                first = block * stored.shard[0] + number * stored.chunk[0]
                if first < stored.shape[0]:
                    rows = stored.shape[0] - first
                    found.steps[first] = values.view(np.int64)[:rows].copy()
            elif block == 0:
                row = _row0(stored, number, values)
                found.row0 += () if row is None else _row0_notes(stored.name, row)
        return found

    return run


def _fault(stored: StoredArray, native: NativeType, values: Array) -> str | None:
    """What is wrong with values whose checksum fits."""
    if stored.chain.kind == "delta" or native.itemsize == stored.chain.itemsize:
        return None
    return _not_native(values, native)


def _not_native(values: Array, native: NativeType) -> str | None:
    """Say so if bits of float32 are not all of a 16-bit type."""
    if native.name == "bfloat16":
        exact = int(np.bitwise_or.reduce(values, axis=None)) & 0xFFFF == 0
    else:
        try:
            narrow(values.view(np.float32), native)
            exact = True
        except InvalidArgument:
            exact = False
    return None if exact else f"holds values that are not {native.name}, as native_dtype says"


def _row0(stored: StoredArray, number: int, values: Array) -> Array | None:
    """Values of the first row of the array in a chunk, without the padding."""
    grid = [whole // part for whole, part in zip(stored.shard, stored.chunk, strict=True)]
    first, *at = (int(position) for position in np.unravel_index(number, grid))
    if first:
        return None
    chain = stored.chain
    if chain.kind == "delta":
        row = np.empty((1, *stored.chunk[1:]), f"u{chain.native.stored.itemsize}")
        unfold(values[:1], chain.native, row)
        row = row[0, ...]
    else:
        row = values[0, ...]
    window = tuple(
        slice(max(0, length - position * part))
        for position, part, length in zip(at, stored.chunk[1:], stored.shape[1:], strict=True)
    )
    return row[window].view(chain.native.stored)


def _row0_notes(name: str, row: Array) -> Iterator[str]:
    kind = VARIABLES[name].row0
    if kind == "nan" and not np.isnan(row).all():
        yield f"{name} holds numbers in row 0, before any step; NaN is the convention"
    elif kind == "zero" and row.any():
        yield f"{name} is not 0 in row 0, before any step, as is the convention"


def _foreign_jobs(inspection: Inspection, name: str, found: Found) -> Iterator[Job]:
    """Checks of an array that is stored in a way of its own: zarr reads it, block by block."""
    array = open_foreign(inspection, name, found.problems, found.notes)
    if array is None:
        return
    native = NATIVE_TYPES.get(str(array.attrs.get("native_dtype")))
    rows = block_rows(inspection.arrays[name])
    for block in range(-(-inspection.rows // rows)):
        span = slice(block * rows, min((block + 1) * rows, inspection.rows))

        def run(span: slice = span, block: int = block) -> Found:
            found = Found(chunks=1)
            try:
                values = np.asarray(array[span])
                if len(values) != span.stop - span.start:
                    raise ValueError(f"{len(values)} rows of {span.stop - span.start} are there")
            except Exception as error:  # whatever its codecs raise
                fault: str | None = f"cannot be read ({error})"
            else:
                fault = None
                if native is not None and native.itemsize < values.itemsize:
                    fault = _not_native(values.view(f"u{values.itemsize}"), native)
            if fault:
                path = inspection.path / name
                found.problems.append(Problem(array=name, block=block, path=path, message=fault))
            elif name == STEP.name:
                found.steps[span.start] = values
            elif block == 0:
                found.row0 += _row0_notes(name, values[0])
            return found

        yield run
