"""Checks of one shard: its label, its index, and each chunk in the index.

A shard is open only during its check. Memory holds one chunk at a time.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from trajstore.codec.block_label import ANYWHERE, BlockLabel, LabelError, digest_of
from trajstore.errors import InvalidArgument, ObjectStoreError
from trajstore.integrity.problem import Problem
from trajstore.schema import STEP, VARIABLES
from trajstore.store.reading.array_reader import StoredArray
from trajstore.store.storage.object_file import OpenObject, opened
from trajstore.store.storage.remote_path import Location, ObjectReplaced
from trajstore.values.native_types import NativeType, narrow
from trajstore.values.rounding import is_bfloat16

__all__ = ["CheckedChunks", "check_shard", "whole_chunks"]

Array = npt.NDArray[Any]

Place = tuple[str, int, int]
"""Array, block and part of a shard."""

_ABSENT = (1 << 64) - 1
_ATTEMPTS = 4
_WINDOW = 4 << 20  # bytes of one request, for sequential reads


@dataclass(kw_only=True)
class CheckedChunks:
    """Contents of checked chunks, and their problems.

    Attributes
    ----------
    problems : list of Problem
    relabeled : list of Problem
        Shards that another program wrote. Without a matching fingerprint they are problems, too.
    row0 : list of str
        Sentences on unusual values in row 0, if it is the state before any step.
    notes : list of str
    steps : dict of int to ndarray
        Values of `step`, by their first row.
    labels : dict of (str, int, int) to BlockLabel
        Labels of shards, by array, block and part.
    digests : dict of (str, int, int) to bytes
        Digests of the completely readable shards.
    shards, chunks, bytes : int
        Checked.
    """

    problems: list[Problem] = field(default_factory=list)
    relabeled: list[Problem] = field(default_factory=list)
    row0: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    steps: dict[int, Array] = field(default_factory=dict)
    labels: dict[Place, BlockLabel] = field(default_factory=dict)
    digests: dict[Place, bytes] = field(default_factory=dict)
    shards: int = 0
    chunks: int = 0
    bytes: int = 0

    def add(self, other: CheckedChunks) -> None:
        """Add the findings of another check; each sentence on row 0 once."""
        self.problems += other.problems
        self.relabeled += other.relabeled
        self.row0 += [sentence for sentence in other.row0 if sentence not in self.row0]
        self.notes += other.notes
        self.steps |= other.steps
        self.labels |= other.labels
        self.digests |= other.digests
        self.shards += other.shards
        self.chunks += other.chunks
        self.bytes += other.bytes


def check_shard(
    stored: StoredArray, native: NativeType, block: int, part: int, *, finished: bool
) -> CheckedChunks:
    """Check a shard of the committed rows; restart if it is replaced during the check.

    Parameters
    ----------
    stored : StoredArray
    native : NativeType
        Type of the values, from the array's attributes.
    block, part : int
    finished : bool
        True if no more rows are expected.

    Raises
    ------
    ObjectStoreError
        If an object store does not respond, which is no damage.
    """
    for _ in range(_ATTEMPTS - 1):
        with suppress(ObjectReplaced):
            return _check(stored, native, block, part, finished=finished)
    return _check(stored, native, block, part, finished=finished)


def _check(
    stored: StoredArray, native: NativeType, block: int, part: int, *, finished: bool
) -> CheckedChunks:
    found = CheckedChunks()
    path = stored.path / stored.key(block, part)
    try:
        with opened(path, _WINDOW) as file:
            shard = _Shard(stored, native, block, part, path, file, finished=finished)
            for chunk in _read_index(shard, found):
                _check_chunk(shard, chunk, found)
            _check_digest(shard, found)
    except ObjectStoreError:
        raise
    except OSError as error:
        missing = isinstance(error, FileNotFoundError)
        found.problems.append(
            Problem(
                array=stored.name,
                block=block,
                path=path,
                message="the shard is missing" if missing else f"cannot be read: {error}",
                # A later attempt may succeed.
                remedy="cut" if missing else "none",
            )
        )
    return found


def whole_chunks(stored: StoredArray, block: int, part: int) -> dict[int, bytes]:
    """Inner chunks of a shard that match their checksums, by their number.

    Empty if the shard is missing, its label or index is broken, or the label is that of other
    chunks.
    """
    found = CheckedChunks()
    path = stored.path / stored.key(block, part)
    whole: dict[int, bytes] = {}
    try:
        with opened(path, _WINDOW) as file:
            shard = _Shard(stored, stored.chain.native, block, part, path, file, finished=False)
            for chunk in _read_index(shard, found):
                with suppress(ValueError, RuntimeError):
                    data = _read_chunk(shard, chunk)
                    stored.form.decoder.unpack(data)
                    whole[chunk.number] = data
    except FileNotFoundError:
        return {}
    if shard.label is not None and len(whole) == math.prod(stored.form.grid):
        digest = digest_of(hashlib.sha256(whole[at]).digest() for at in sorted(whole))
        return whole if digest == shard.label.digest else {}
    return whole


class _Shard:
    """An open shard with the findings so far."""

    def __init__(
        self,
        stored: StoredArray,
        native: NativeType,
        block: int,
        part: int,
        path: Location,
        file: OpenObject,
        *,
        finished: bool,
    ) -> None:
        self.finished = finished  # no more rows are expected
        self.stored = stored
        self.native = native
        self.block = block
        self.part = part
        self.path = path
        self.file = file
        self.label: BlockLabel | None = None
        self.pieces: dict[int, bytes] = {}  # digests of its inner chunks

    @property
    def place(self) -> Place:
        """Array, block and part."""
        return self.stored.name, self.block, self.part

    def problem(
        self, message: str, first: int, stop: int, remedy: Literal["cut", "none"] = "cut"
    ) -> Problem:
        """Problem in a range of its bytes."""
        return Problem(
            array=self.stored.name,
            block=self.block,
            first_byte=first,
            stop_byte=stop,
            path=self.path,
            message=message,
            remedy=remedy,
        )


@dataclass(frozen=True, kw_only=True)
class _Chunk:
    """Number of a chunk in the index, and its byte range."""

    number: int
    offset: int
    length: int

    @property
    def stop(self) -> int:
        """First byte after the chunk."""
        return self.offset + self.length


def _read_index(shard: _Shard, found: CheckedChunks) -> list[_Chunk]:
    """Readable chunks in file order; report gaps and overlaps."""
    stored, problems = shard.stored, found.problems
    form = stored.form
    chunks: list[_Chunk] = []
    data = shard.file.end(form.tail_length)
    found.shards += 1
    size = shard.file.size
    end = max(size - form.tail_length, 0)
    if size < form.index_length:
        torn = f"the shard has {size} bytes, too few for its index of {form.index_length}"
        problems.append(shard.problem(torn, 0, size))
        return chunks
    try:
        tail = form.read_tail(data, (shard.block, shard.part))
    except LabelError as error:
        fault = f"{error}; another program may have written it"
        problems.append(shard.problem(fault, end, size))
        return chunks
    except ValueError as error:
        problems.append(shard.problem(str(error), end, size))
        return chunks
    shard.label = found.labels[shard.place] = tail.label
    if tail.label.block == ANYWHERE:
        fault = "its label has no block; another program wrote it"
        found.relabeled.append(shard.problem(fault, end, size, "none"))
    needed = min(stored.shape[0] - shard.block * stored.shard[0], stored.shard[0])
    if tail.label.rows < needed:
        short = f"it has {tail.label.rows} rows of the block, {needed} are committed"
        problems.append(shard.problem(short, end, size))
        return chunks
    written_by_us = tail.label.block != ANYWHERE
    if tail.label.rows > needed and shard.finished and written_by_us:
        longer = (
            f"it has {tail.label.rows} rows of the block, but {needed} are committed in this "
            "complete run; older documents were restored"
        )
        problems.append(shard.problem(longer, end, size, "none"))
    index = tail.index
    found.bytes += form.tail_length
    entries = [(int(offset), int(length)) for offset, length in index]
    at = 0
    for number in sorted(range(len(entries)), key=lambda number: entries[number]):
        offset, length = entries[number]
        if (offset, length) == (_ABSENT, _ABSENT):
            problems.append(shard.problem(f"chunk {number} is not stored", end, size))
            continue
        if offset + length > end:
            beyond = f"chunk {number} ends beyond the chunks"
            problems.append(shard.problem(beyond, offset, offset + length))
            continue
        if offset != at:
            fault = f"bytes of the shard belong to {'no chunk' if offset > at else 'two chunks'}"
            problems.append(shard.problem(fault, min(at, offset), max(at, offset), "none"))
        at = max(at, offset + length)
        chunks.append(_Chunk(number=number, offset=offset, length=length))
    if at < end:
        problems.append(shard.problem("bytes of the shard belong to no chunk", at, end, "none"))
    return chunks


def _check_chunk(shard: _Shard, chunk: _Chunk, found: CheckedChunks) -> None:
    found.chunks += 1
    found.bytes += chunk.length
    try:
        data = _read_chunk(shard, chunk)
        values = shard.stored.form.decoder.unpack(data)
    except ObjectStoreError:
        raise
    except OSError as error:
        message = f"cannot be read: {error}"
        found.problems.append(shard.problem(message, chunk.offset, chunk.stop, "none"))
    except (ValueError, RuntimeError) as error:
        message = f"a broken chunk ({error})"
        found.problems.append(shard.problem(message, chunk.offset, chunk.stop))
    else:
        if shard.label is not None:
            shard.pieces[chunk.number] = hashlib.sha256(data).digest()
        _check_values(shard, chunk, data, values, found)


def _read_chunk(shard: _Shard, chunk: _Chunk) -> bytes:
    data = shard.file.read(chunk.offset, chunk.length)
    if len(data) != chunk.length:
        raise ValueError("the file ends before it")
    return data


def _check_values(
    shard: _Shard, chunk: _Chunk, data: bytes, values: Array, found: CheckedChunks
) -> None:
    """Check values with a matching checksum."""
    stored, native = shard.stored, shard.native
    # Differences are always of the native type.
    widened = stored.chain.kind != "delta" and native.itemsize != stored.chain.itemsize
    if widened and not _is_native(values, native):
        message = f"has values that are not {native.name}, the declared native_dtype"
        found.problems.append(shard.problem(message, chunk.offset, chunk.stop, "none"))
    elif stored.name == STEP.name:
        first = shard.block * stored.shard[0] + chunk.number * stored.chunk[0]
        if first < stored.shape[0]:
            rows = stored.shape[0] - first
            found.steps[first] = values.view(np.int64)[:rows].copy()
    elif shard.block == 0:
        row = _row0(stored, shard.part, chunk.number, data)
        found.row0 += () if row is None else _row0_notes(stored.name, row)


def _is_native(values: Array, native: NativeType) -> bool:
    """True if all float32 bits are values of a 16-bit type."""
    if native.name == "bfloat16":
        return is_bfloat16(values)
    try:
        narrow(values.view(np.float32), native)
    except InvalidArgument:
        return False
    return True


def _row0(stored: StoredArray, part: int, number: int, data: bytes) -> Array | None:
    """Values of the array's first row in a chunk, without padding."""
    first, *at = (int(position) for position in np.unravel_index(number, stored.form.grid))
    if first:
        return None
    if at:
        at[0] += part * stored.form.grid[1]
    row: Array = np.empty((1, *stored.chunk[1:]), stored.dtype)
    first_row = (slice(0, 1), *(slice(0, length) for length in stored.chunk[1:]))
    stored.form.decoder.decode(data, first_row, row)
    window = tuple(
        slice(max(0, length - position * size))
        for position, size, length in zip(at, stored.chunk[1:], stored.shape[1:], strict=True)
    )
    return np.asarray(row[0][window])


def _row0_notes(name: str, row: Array) -> Iterator[str]:
    """Sentences on values of the first row that differ from the convention."""
    kind = VARIABLES[name].row0
    with np.errstate(invalid="ignore"):  # of a signaling NaN
        holds_any = bool(row.any())
    if kind == "nan" and not np.isnan(row).all():
        yield f"{name} holds numbers in row 0, before any step; NaN is the convention"
    elif kind == "zero" and holds_any:
        yield f"{name} is not 0 in row 0, before any step, as is the convention"


def _check_digest(shard: _Shard, found: CheckedChunks) -> None:
    """Compare the digest of all chunks with the label, if no chunk is missing."""
    if shard.label is None or len(shard.pieces) < math.prod(shard.stored.form.grid):
        return
    digest = digest_of(shard.pieces[chunk] for chunk in sorted(shard.pieces))
    found.digests[shard.place] = digest
    if digest != shard.label.digest:
        end = shard.file.size
        message = "its label was written for other chunks"
        found.problems.append(shard.problem(message, 0, end))
