"""Checks of what the arrays of a run hold: shard by shard, chunk by chunk, in threads.

Each job has the memory of a few chunks, and brings back what it has found; these are put together
in the order of the arrays, whichever thread was first.
"""

from __future__ import annotations

import contextlib
import hashlib
import math
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import zarr

from trajstore.codec.block_form import Tail
from trajstore.codec.block_label import ANYWHERE, LABEL, BlockLabel, LabelError, digest_of
from trajstore.codec.delta import unfold
from trajstore.errors import FormatError, InvalidArgument, ObjectStoreError
from trajstore.integrity.array_json_checks import block_rows, is_series
from trajstore.integrity.checked_metadata import CheckedMetadata
from trajstore.integrity.decode_with_zarr import note_on_fallback, open_with_zarr
from trajstore.integrity.problem import Problem
from trajstore.schema import STEP, VARIABLES
from trajstore.store.array_reader import StoredArray
from trajstore.store.object_file import held, size_of
from trajstore.store.object_keys import chunk_key
from trajstore.store.remote_path import REMOTE_REQUESTS, Location, ObjectReplaced, RemotePath
from trajstore.threads import Progress, in_parallel
from trajstore.values.native_types import NATIVE_TYPES, NativeType, narrow
from trajstore.values.rounding import is_bfloat16

__all__ = ["CheckedChunks", "check_chunks"]

Array = npt.NDArray[Any]

Place = tuple[str, int, int]
"""Array, block and part of a shard."""

_BATCH = 4 << 20
_ATTEMPTS = 4
_ABSENT = (1 << 64) - 1
_NOT_NATIVE = "holds values that are not {}, as native_dtype says"


@dataclass(kw_only=True)
class CheckedChunks:
    """What the chunks hold that were checked, and what is wrong with them.

    Attributes
    ----------
    problems : list of Problem
    row0 : list of str
        Sentences on what row 0 holds, where it is the state before any step.
    notes : list of str
    steps : dict of int to ndarray
        Values of `step`, by their first row.
    labels : dict of (str, int, int) to BlockLabel
        Of the shards that have one, by array, block and part.
    digests : dict of (str, int, int) to bytes
        Of what these shards hold, where all of it can be read.
    shards, chunks, bytes : int
        Checked.
    """

    problems: list[Problem] = field(default_factory=list)
    row0: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    steps: dict[int, Array] = field(default_factory=dict)
    labels: dict[Place, BlockLabel] = field(default_factory=dict)
    digests: dict[Place, bytes] = field(default_factory=dict)
    shards: int = 0
    chunks: int = 0
    bytes: int = 0

    def add(self, other: CheckedChunks) -> None:
        """Add what another check has found; a sentence on row 0 only once."""
        self.problems += other.problems
        self.row0 += [sentence for sentence in other.row0 if sentence not in self.row0]
        self.notes += other.notes
        self.steps |= other.steps
        self.labels |= other.labels
        self.digests |= other.digests
        self.shards += other.shards
        self.chunks += other.chunks
        self.bytes += other.bytes


Job = Callable[[], CheckedChunks]


@dataclass(frozen=True, kw_only=True)
class _Chunk:
    """Place of a chunk in its shard: its number in the index, and its bytes."""

    number: int
    offset: int
    length: int

    @property
    def stop(self) -> int:
        """Byte of the shard behind it."""
        return self.offset + self.length


class _Shard:
    """An open shard; a file is closed when the last job that reads it is done."""

    def __init__(
        self,
        stored: StoredArray,
        native: NativeType,
        block: int,
        part: int,
        path: Location,
        *,
        finished: bool,
    ) -> None:
        self.finished = finished  # no more rows are expected
        self.stored = stored
        self.native = native
        self.block = block
        self.part = part
        self.path = path
        self.label: BlockLabel | None = None
        self._pieces: dict[int, bytes] = {}
        self._lock = threading.Lock()
        self._batches = 0
        self.file = held(path)

    @property
    def place(self) -> Place:
        """Array, block and part."""
        return self.stored.name, self.block, self.part

    def begin(self, batches: int) -> None:
        """Say how many jobs there will be."""
        self._batches = batches

    def keep_digest(self, chunk: int, data: bytes) -> None:
        """Take note of what an inner chunk is."""
        if self.label is not None:
            self._pieces[chunk] = hashlib.sha256(data).digest()

    def digest(self) -> bytes | None:
        """Digest of all that is stored; None before the last job, or if a chunk is missing."""
        with self._lock:
            self._batches -= 1
            if self._batches or len(self._pieces) < math.prod(self.stored.form.grid):
                return None
        return digest_of(self._pieces[chunk] for chunk in sorted(self._pieces))

    def problem(
        self, message: str, first: int, stop: int, remedy: Literal["cut", "none"] = "cut"
    ) -> Problem:
        """Problem with some of its bytes."""
        return Problem(
            array=self.stored.name,
            block=self.block,
            first_byte=first,
            stop_byte=stop,
            path=self.path,
            message=message,
            remedy=remedy,
        )


def check_chunks(
    metadata: CheckedMetadata,
    *,
    threads: int | None = None,
    on_progress: Progress | None = None,
) -> CheckedChunks:
    """Check every chunk of the committed rows.

    Parameters
    ----------
    metadata : CheckedMetadata
    threads : int, optional
    on_progress : callable, optional
        Called with the bytes of the shards that are done, and those there are.
    """
    total = _size_of_shards(metadata)
    found = CheckedChunks()
    if isinstance(metadata.path, RemotePath):
        threads = threads or REMOTE_REQUESTS
    for part in in_parallel(_jobs(metadata), threads):
        found.add(part)
        if on_progress is not None:
            on_progress(found.bytes, max(found.bytes, total))
    found.problems += _check_steps(metadata, found.steps)
    if 0 not in found.steps or found.steps[0][0] != 0:
        # A run that begins later holds no initial state in its first row.
        found.row0.clear()
    return found


def _size_of_shards(metadata: CheckedMetadata) -> int:
    """Bytes of the shards of the committed rows, those that are there."""
    sizes = metadata.objects
    keys = [
        stored.key(block, part)
        for name, document in metadata.arrays.items()
        if is_series(name) and (stored := metadata.stored(name)) is not None
        for block in range(-(-metadata.rows // block_rows(document)))
        for part in range(stored.parts)
    ]
    if sizes is not None:
        return sum(sizes.get(key, 0) for key in keys)
    paths = (metadata.path / key for key in keys)
    if isinstance(metadata.path, RemotePath):
        return sum(in_parallel((partial(_size, path) for path in paths), REMOTE_REQUESTS))
    return sum(map(_size, paths))


def _size(path: Location) -> int:
    """Bytes of an object; 0 of one that is missing, which is a problem of its own."""
    with contextlib.suppress(OSError):
        return size_of(path)
    return 0


def _jobs(metadata: CheckedMetadata) -> Iterator[Job]:
    for name in filter(is_series, metadata.arrays):
        stored = metadata.stored(name)
        if stored is None:
            yield from _jobs_through_zarr(metadata, name)
            continue
        declared = metadata.arrays[name]["attributes"].get("native_dtype")
        native = NATIVE_TYPES.get(declared, stored.chain.native)
        finished = metadata.attributes.get("status") == "complete"
        for block in range(-(-metadata.rows // stored.shard[0])):
            for part in range(stored.parts):
                jobs = partial(_jobs_of_shard, stored, native, block, part, finished)
                if isinstance(metadata.path, RemotePath):
                    yield partial(_check_remote, jobs)
                else:
                    yield from jobs()


def _check_remote(jobs: Callable[[], Iterator[Job]]) -> CheckedChunks:
    """Check a shard of an object store in one job, from the start if it is replaced meanwhile."""
    for attempt in range(_ATTEMPTS):
        found = CheckedChunks()
        try:
            for job in jobs():
                found.add(job())
            break
        except ObjectReplaced:
            if attempt == _ATTEMPTS - 1:
                raise
    return found


def _jobs_of_shard(
    stored: StoredArray, native: NativeType, block: int, part: int, finished: bool
) -> Iterator[Job]:
    """Checks of a shard; the first one also brings back what was found when it was opened."""
    found = CheckedChunks()
    path = stored.path / stored.key(block, part)
    try:
        shard = _Shard(stored, native, block, part, path, finished=finished)
    except ObjectStoreError:
        raise  # an outage is no damage
    except OSError as error:
        missing = isinstance(error, FileNotFoundError)
        found.problems.append(
            Problem(
                array=stored.name,
                block=block,
                path=path,
                message="the shard is missing" if missing else f"cannot be read: {error}",
                # What the system refuses today it may give tomorrow.
                remedy="cut" if missing else "none",
            )
        )
        yield lambda: found
        return
    found.shards += 1
    batches = _batches(_read_index(shard, found))
    shard.begin(len(batches))
    for batch in batches:
        yield partial(_check_batch, shard, batch, found)
        found = CheckedChunks()


def _read_index(shard: _Shard, found: CheckedChunks) -> list[_Chunk]:
    """Chunks that can be read, in the order of the file; report what does not cover the shard."""
    stored, problems = shard.stored, found.problems
    form = stored.form
    chunks: list[_Chunk] = []
    size = shard.file.size
    end = max(size - form.tail_length, 0)
    if size < form.index_length:
        torn = f"the shard has {size} bytes, too few for its index of {form.index_length}"
        problems.append(shard.problem(torn, 0, size))
        return chunks
    try:
        data = shard.file.read(end, form.tail_length)
        tail = form.read_tail(data, (shard.block, shard.part))
    except LabelError as error:
        # Without a label nothing says that its chunks are wrong; without the codec nothing reads.
        is_readable = form.chain.kind != "delta"
        fault = f"{error}; another program may have written it"
        problems.append(shard.problem(fault, end, size, "none" if is_readable else "cut"))
        if not is_readable:
            return chunks
        tail = Tail(label=None, index=form.read_index(data))
        end = size - form.index_length
    except ValueError as error:
        problems.append(shard.problem(str(error), end, size))
        return chunks
    except ObjectStoreError:
        raise
    except OSError as error:
        problems.append(shard.problem(f"the index cannot be read: {error}", end, size, "none"))
        return chunks
    if tail.label is not None:
        shard.label = found.labels[shard.place] = tail.label
        if tail.label.block == ANYWHERE:
            fault = "its label does not say where it belongs; another program has written it"
            problems.append(shard.problem(fault, end, size, "none"))
        needed = min(stored.shape[0] - shard.block * stored.shard[0], stored.shard[0])
        if tail.label.rows < needed:
            short = f"it holds {tail.label.rows} rows of the block, {needed} are committed"
            problems.append(shard.problem(short, end, size))
            return chunks
        written_by_us = tail.label.block != ANYWHERE
        if tail.label.rows > needed and shard.finished and written_by_us:
            longer = (
                f"it holds {tail.label.rows} rows of the block, {needed} are committed, in a run "
                "that is complete: documents of an older state have come back"
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
    unlabelled = LABEL if tail.label is None and form.runs is not None else 0
    if at < end and end - at != unlabelled:  # a broken label is a problem already
        problems.append(shard.problem("bytes of the shard belong to no chunk", at, end, "none"))
    return chunks


def _batches(chunks: list[_Chunk]) -> list[list[_Chunk]]:
    """Chunks for one job each; at least one job, which may have none."""
    batches: list[list[_Chunk]] = [[]]
    size = 0
    for chunk in chunks:
        if size >= _BATCH:
            batches.append([])
            size = 0
        batches[-1].append(chunk)
        size += chunk.length
    return batches


def _check_batch(shard: _Shard, chunks: list[_Chunk], found: CheckedChunks) -> CheckedChunks:
    """Check chunks of a shard, and add to what is found of it."""
    for chunk in chunks:
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
            shard.keep_digest(chunk.number, data)
            _check_values(shard, chunk, values, found)
    digest = shard.digest()
    if digest is not None and shard.label is not None:
        found.digests[shard.place] = digest
        if digest != shard.label.digest:
            end = shard.file.size
            message = "its chunks are not those that its label was written for"
            found.problems.append(shard.problem(message, 0, end))
    return found


def _read_chunk(shard: _Shard, chunk: _Chunk) -> bytes:
    data = shard.file.read(chunk.offset, chunk.length)
    if len(data) != chunk.length:
        raise ValueError("the file ends before it")
    return data


def _check_values(shard: _Shard, chunk: _Chunk, values: Array, found: CheckedChunks) -> None:
    """Check values whose checksum fits."""
    stored, native = shard.stored, shard.native
    # Differences are of the native type by themselves.
    widened = stored.chain.kind != "delta" and native.itemsize != stored.chain.itemsize
    if widened and not _is_native(values, native):
        message = _NOT_NATIVE.format(native.name)
        found.problems.append(shard.problem(message, chunk.offset, chunk.stop, "none"))
    elif stored.name == STEP.name:
        first = shard.block * stored.shard[0] + chunk.number * stored.chunk[0]
        if first < stored.shape[0]:
            rows = stored.shape[0] - first
            found.steps[first] = values.view(np.int64)[:rows].copy()
    elif shard.block == 0:
        row = _row0(stored, shard.part, chunk.number, values)
        found.row0 += () if row is None else _row0_notes(stored.name, row)


def _is_native(values: Array, native: NativeType) -> bool:
    """Whether bits of float32 are all of a 16-bit type."""
    if native.name == "bfloat16":
        return is_bfloat16(values)
    try:
        narrow(values.view(np.float32), native)
    except InvalidArgument:
        return False
    return True


def _row0(stored: StoredArray, part: int, number: int, values: Array) -> Array | None:
    """Values of the first row of the array in a chunk, without the padding."""
    first, *at = (int(position) for position in np.unravel_index(number, stored.form.grid))
    if first:
        return None
    if at:
        at[0] += part * stored.form.grid[1]
    chain = stored.chain
    if chain.kind == "delta":
        row = np.empty((1, *stored.chunk[1:]), f"u{chain.native.stored.itemsize}")
        unfold(values[:1], chain.native, row)
        row = row[0, ...]
    else:
        row = values[0, ...]
    window = tuple(
        slice(max(0, length - position * size))
        for position, size, length in zip(at, stored.chunk[1:], stored.shape[1:], strict=True)
    )
    return row[window].view(chain.native.stored)


def _row0_notes(name: str, row: Array) -> Iterator[str]:
    kind = VARIABLES[name].row0
    if kind == "nan" and not np.isnan(row).all():
        yield f"{name} holds numbers in row 0, before any step; NaN is the convention"
    elif kind == "zero" and row.any():
        yield f"{name} is not 0 in row 0, before any step, as is the convention"


def _jobs_through_zarr(metadata: CheckedMetadata, name: str) -> Iterator[Job]:
    """Checks of an array that is stored in a way of its own, block by block."""
    if metadata.own[name] is None:
        return  # which is a problem of its own
    found = CheckedChunks(notes=[note_on_fallback(name)])
    try:
        array = open_with_zarr(metadata, name)
    except FormatError as error:
        path = metadata.path / name
        found.problems.append(Problem(array=name, path=path, message=str(error)))
        yield lambda: found
        return
    yield lambda: found
    rows = block_rows(metadata.arrays[name])
    for block in range(-(-metadata.rows // rows)):
        span = slice(block * rows, min((block + 1) * rows, metadata.rows))
        yield partial(_check_block, metadata.path / name, array, block, span)


def _check_block(path: Location, array: zarr.Array[Any], block: int, span: slice) -> CheckedChunks:
    found = CheckedChunks(chunks=1)
    name = path.name
    native = NATIVE_TYPES.get(str(array.attrs.get("native_dtype")))
    try:
        values = np.asarray(array[span])
        if len(values) != span.stop - span.start:
            raise ValueError(f"{len(values)} rows of {span.stop - span.start} are there")
    except ObjectStoreError:
        raise
    except Exception as error:  # whatever its codecs raise
        message = f"cannot be read ({error})"
        found.problems.append(Problem(array=name, block=block, path=path, message=message))
        return found
    widened = native is not None and native.itemsize < values.itemsize
    if native and widened and not _is_native(values.view(f"u{values.itemsize}"), native):
        message = _NOT_NATIVE.format(native.name)
        found.problems.append(Problem(array=name, block=block, path=path, message=message))
    elif name == STEP.name:
        found.steps[span.start] = values
    elif block == 0:
        found.row0 += _row0_notes(name, values[0])
    return found


def _check_steps(metadata: CheckedMetadata, steps: dict[int, Array]) -> Iterator[Problem]:
    """Steps must increase strictly, from at least 0."""
    last = -1
    for first, values in sorted(steps.items()):
        before = np.concatenate(([last], values[:-1]))
        wrong = np.flatnonzero(values <= before)
        if wrong.size:
            at = int(wrong[0])
            block = (first + at) // block_rows(metadata.arrays[STEP.name])
            yield Problem(
                array=STEP.name,
                block=block,
                path=metadata.path / chunk_key(STEP.name, block, 1),
                message=f"row {first + at} is step {values[at]} after step {before[at]}; steps "
                "must increase",
            )
        last = int(values[-1])
