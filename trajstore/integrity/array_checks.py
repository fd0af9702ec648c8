"""Checks of the values of a run: shard by shard in threads, and of the coordinates.

Each job opens one shard and checks its label, its index, and each chunk in the index. It holds one
chunk in memory at a time. Findings are joined in the order of the arrays. Coordinates have
checksums, distinct names, and masks that match the counts.
"""

from __future__ import annotations

import errno
import hashlib
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from trajstore.codec.block import ANYWHERE, BlockLabel, LabelError, digest_of
from trajstore.codec.chunk import is_intact
from trajstore.codec.open_block import OpenBlock
from trajstore.errors import InvalidArgument, ObjectStoreError
from trajstore.integrity.metadata_faults import CheckedMetadata, Problem
from trajstore.schema import NAMES, STEP, VARIABLES, along_token
from trajstore.store.metadata.zarr_json import is_series, open_metadata
from trajstore.store.reading.array_reader import StoredArray
from trajstore.store.storage.atomic import OpenObject, opened, size_of
from trajstore.store.storage.remote_path import (
    REMOTE_REQUESTS,
    ObjectReplaced,
    RemotePath,
    chunk_key,
)
from trajstore.threads import Progress, in_parallel
from trajstore.values.native_types import NATIVE_TYPES, NativeType, narrow

Array = npt.NDArray[Any]

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
    steps : dict of int to ndarray
        Values of `step`, by their first row.
    shards, chunks, bytes : int
        Checked.
    """

    problems: list[Problem] = field(default_factory=list)
    relabeled: list[Problem] = field(default_factory=list)
    row0: list[str] = field(default_factory=list)
    steps: dict[int, Array] = field(default_factory=dict)
    shards: int = 0
    chunks: int = 0
    bytes: int = 0

    def add(self, other: CheckedChunks) -> None:
        """Add the findings of another check; each sentence on row 0 once."""
        self.problems += other.problems
        self.relabeled += other.relabeled
        self.row0 += [sentence for sentence in other.row0 if sentence not in self.row0]
        self.steps |= other.steps
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
            return _ShardCheck(stored, native, block, part, finished=finished).run()
    return _ShardCheck(stored, native, block, part, finished=finished).run()


class _ShardCheck:
    """Check of one shard, with its findings."""

    def __init__(
        self, stored: StoredArray, native: NativeType, block: int, part: int, *, finished: bool
    ) -> None:
        self.checked = CheckedChunks()
        self.path = stored.path / stored.key(block, part)
        self._place = stored.name, block, part
        self._stored = stored
        self._native = native
        self._finished = finished  # no more rows are expected
        self._chunks, self._size = 0, 0  # bytes without label and index, and in total

    def run(self) -> CheckedChunks:
        """Check the label, the index, all chunks and their digest."""
        try:
            with opened(self.path, _WINDOW) as file:
                if (shard := self.opened(file)) is not None:
                    pieces = {number: self._check(shard, number) for number in self.readable(shard)}
                    self._check_digest(shard.tail.label, pieces)
        except ObjectStoreError:
            raise
        except FileNotFoundError:
            self._report("the shard is missing")
        except OSError as error:  # a later attempt may succeed
            self._report(f"cannot be read: {error}", remedy="none")
        return self.checked

    def opened(self, file: OpenObject) -> OpenBlock | None:
        """Read and check the label; None if no chunk can be used, for the reported reason."""
        stored, form = self._stored, self._stored.form
        name, block, part = self._place
        data = file.end(form.tail_length)
        self.checked.shards += 1
        self._size = size = file.size
        self._chunks = end = max(size - form.tail_length, 0)
        try:
            tail = form.read_tail(data, (block, part))
        except ValueError as error:
            foreign = "; another program may have written it"
            self._report(f"{error}{foreign * isinstance(error, LabelError)}", end, size)
            return None
        label = tail.label
        if label.block == ANYWHERE:
            fault = "its label has no block; another program wrote it"
            self._report(fault, end, size, "none", self.checked.relabeled)
        needed = min(stored.shape[0] - block * stored.shard[0], stored.shard[0])
        if label.rows < needed:
            short = f"it has {label.rows} rows of the block, {needed} are committed"
            self._report(short, end, size)
            return None
        if label.rows > needed and self._finished and label.block != ANYWHERE:
            longer = (
                f"it has {label.rows} rows of the block, but {needed} are committed in this "
                "complete run; older metadata were restored"
            )
            self._report(longer, end, size, "none")
        self.checked.bytes += form.tail_length
        return OpenBlock(name=name, form=form, object=file, tail=tail)

    def readable(self, shard: OpenBlock) -> list[int]:
        """Numbers of the readable chunks, in file order; report gaps and overlaps."""
        entries = shard.tail.index.tolist()
        numbers: list[int] = []
        at, end = 0, self._chunks
        for number in sorted(range(len(entries)), key=lambda number: entries[number]):
            offset, length = entries[number]
            if (offset, length) == (_ABSENT, _ABSENT):
                self._report(f"chunk {number} is not stored", end, self._size)
                continue
            if offset + length > end:
                self._report(f"chunk {number} ends beyond the chunks", offset, offset + length)
                continue
            if offset != at:
                owner = "no chunk" if offset > at else "two chunks"
                fault = f"bytes of the shard belong to {owner}"
                self._report(fault, min(at, offset), max(at, offset), "none")
            at = max(at, offset + length)
            numbers.append(number)
        if at < end:
            self._report("bytes of the shard belong to no chunk", at, end, "none")
        return numbers

    def _check(self, shard: OpenBlock, number: int) -> bytes | None:
        """Check a chunk. Return its SHA-256; None if it is broken."""
        offset, length = shard.tail.index[number].tolist()
        where = offset, offset + length
        self.checked.chunks += 1
        self.checked.bytes += length
        try:
            data = shard.chunk(number)
            values = shard.form.decoder.unpack(data)
        except ObjectStoreError:
            raise
        except OSError as error:
            self._report(f"cannot be read: {error}", *where, "none")
            return None
        except (ValueError, RuntimeError) as error:
            self._report(f"a broken chunk ({error})", *where)
            return None
        name, block, part = self._place
        stored, native = self._stored, self._native
        # Differences are always of the native type.
        widened = stored.chain.kind != "delta" and native.itemsize != stored.chain.itemsize
        if widened and not _is_native(values, native):
            message = f"has values that are not {native.name}, the declared native_dtype"
            self._report(message, *where, "none")
        elif name == STEP.name:
            first = block * stored.shard[0] + number * stored.chunk[0]
            if first < stored.shape[0]:
                rows = stored.shape[0] - first
                self.checked.steps[first] = values.view(np.int64)[:rows].copy()
        elif block == 0:
            row = _row0(stored, part, number, data)
            self.checked.row0 += () if row is None else _row0_notes(name, row)
        return hashlib.sha256(data).digest()

    def _check_digest(self, label: BlockLabel, pieces: Mapping[int, bytes | None]) -> None:
        """Compare the digest of all chunks with the label, if no chunk is missing."""
        known = [pieces[number] or b"" for number in sorted(pieces)]
        if len(known) < math.prod(self._stored.form.grid) or not all(known):
            return
        if digest_of(known) != label.digest:
            self._report("its label was written for other chunks", 0, self._size)

    def _report(
        self,
        message: str,
        first: int | None = None,
        stop: int | None = None,
        remedy: Literal["cut", "none"] = "cut",
        problems: list[Problem] | None = None,
    ) -> None:
        """Add a problem in a range of its bytes, by default to all problems."""
        name, block, _ = self._place
        problem = Problem(
            array=name,
            block=block,
            first_byte=first,
            stop_byte=stop,
            path=self.path,
            message=message,
            remedy=remedy,
        )
        (self.checked.problems if problems is None else problems).append(problem)


def _is_native(values: Array, native: NativeType) -> bool:
    """True if all float32 bits are values of a 16-bit type."""
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


Job = Callable[[], CheckedChunks]


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
        Called with the bytes of the checked shards, and of all shards.
    """
    total = 0 if on_progress is None else _size_of_shards(metadata)
    checked = CheckedChunks()
    if isinstance(metadata.path, RemotePath):
        threads = threads or REMOTE_REQUESTS
    for part in in_parallel(_jobs(metadata), threads):
        checked.add(part)
        if on_progress is not None:
            on_progress(checked.bytes, max(checked.bytes, total))
    checked.problems += _check_steps(metadata, checked.steps)
    if 0 not in checked.steps or checked.steps[0][0] != 0:
        # A run that begins later has no initial state in its first row.
        checked.row0.clear()
    return checked


def in_steps(chunks: CheckedChunks, ranges: Iterable[tuple[int, int]]) -> str:
    """Ranges of rows as steps, such as ``steps 96 to 111``; as rows if `step` is damaged.

    Parameters
    ----------
    chunks : CheckedChunks
    ranges : iterable of (int, int)
        First row, and the row after the last; in any order.
    """
    merged: list[tuple[int, int]] = []
    for first, stop in sorted(ranges):
        if merged and first <= merged[-1][1]:
            merged[-1] = merged[-1][0], max(stop, merged[-1][1])
        else:
            merged.append((first, stop))
    bounds = [(step_of(chunks, first), step_of(chunks, stop - 1)) for first, stop in merged]
    known = all(step is not None for pair in bounds for step in pair)
    pairs = bounds if known else [(first, stop - 1) for first, stop in merged]
    shown = (str(first) if first == last else f"{first} to {last}" for first, last in pairs)
    several = len(pairs) > 1 or pairs[0][0] != pairs[0][1]
    return f"{'step' if known else 'row'}{'s' if several else ''} {', '.join(shown)}"


def step_of(chunks: CheckedChunks, row: int) -> int | None:
    """Step of a row; None where `step` could not be read."""
    for first, values in chunks.steps.items():
        if first <= row < first + len(values):
            return int(values[row - first])
    return None


def _size_of_shards(metadata: CheckedMetadata) -> int:
    """Bytes of the existing shards of the committed rows."""
    keys = [stored.key(block, part) for stored, block, part in _shards(metadata)]
    if metadata.objects is not None:
        return sum(metadata.objects.get(key, 0) for key in keys)
    assert isinstance(metadata.path, RemotePath)  # a web server
    statuses = in_parallel([(metadata.path / key).stat for key in keys], REMOTE_REQUESTS)
    return sum(facts["size"] for facts in statuses if facts)


def _shards(metadata: CheckedMetadata) -> Iterator[tuple[StoredArray, int, int]]:
    """Array, block and part of each shard of the committed rows."""
    for stored in map(metadata.stored, filter(is_series, metadata.arrays)):
        for block in range(-(-metadata.rows // stored.shard[0])):
            yield from ((stored, block, part) for part in range(stored.parts))


def _jobs(metadata: CheckedMetadata) -> Iterator[Job]:
    finished = metadata.attributes.get("status") == "complete"
    for stored, block, part in _shards(metadata):
        declared = metadata.arrays[stored.name]["attributes"].get("native_dtype")
        native = NATIVE_TYPES.get(declared, stored.chain.native)
        yield partial(check_shard, stored, native, block, part, finished=finished)


def _check_steps(metadata: CheckedMetadata, steps: dict[int, Array]) -> Iterator[Problem]:
    """Check that steps increase strictly, from at least 0."""
    last = -1
    for first, values in sorted(steps.items()):
        before = np.concatenate(([last], values[:-1]))
        wrong = np.flatnonzero(values <= before)
        if wrong.size:
            at = int(wrong[0])
            block = (first + at) // metadata.stored(STEP.name).shard[0]
            yield Problem(
                array=STEP.name,
                block=block,
                path=metadata.path / chunk_key(STEP.name, block, 1),
                message=f"row {first + at} is step {values[at]} after step {before[at]}; steps "
                "must increase",
            )
        last = int(values[-1])


_LARGEST = 1 << 28
"""Largest size of a coordinate in bytes: texts of millions of tokens are far below."""


def check_coordinates(metadata: CheckedMetadata) -> CheckedChunks:
    """Compare every coordinate of a run with its checksum, and with each other."""
    checked = CheckedChunks()
    values = {
        name: array
        for name in (*along_token(metadata.arrays), *NAMES)
        if name in metadata.arrays
        if (array := _read(metadata, name, checked)) is not None
    }
    checked.problems += _contradictions(metadata, values)
    return checked


def _read(metadata: CheckedMetadata, name: str, checked: CheckedChunks) -> Array | None:
    """Values of a coordinate; None if they are missing or broken."""
    key = chunk_key(name, 0, 1)
    path = metadata.path / key
    problem = partial(Problem, array=name, path=path)
    try:
        if size_of(path) > _LARGEST:
            raise OSError(errno.EFBIG, f"it has more than {_LARGEST:,} bytes", str(path))
        data = path.read_bytes()
    except ObjectStoreError:
        raise
    except OSError as error:
        missing = isinstance(error, FileNotFoundError)
        message = "its values are missing" if missing else f"cannot be read: {error.strerror}"
        checked.problems.append(problem(message=message))
        return None
    checked.chunks += 1
    checked.bytes += len(data)
    try:
        if not is_intact(data):
            raise ValueError("the checksum does not fit")
        array = open_metadata(metadata.arrays[name], {key.partition("/")[2]: data})
        return np.asarray(array[...])
    except Exception as error:  # codecs raise anything for foreign bytes
        message = f"its values are broken ({error})"
        checked.problems.append(
            problem(block=0, first_byte=0, stop_byte=len(data), message=message)
        )
        return None


def _contradictions(metadata: CheckedMetadata, values: dict[str, Array]) -> Iterator[Problem]:
    def problem(name: str, message: str) -> Problem:
        path = metadata.path / chunk_key(name, 0, 1)
        return Problem(array=name, path=path, message=message)

    for name, what in (("token", "ids"), *((name, "names") for name in NAMES)):
        if name in values and (twice := values[name].size - len(np.unique(values[name]))):
            yield problem(name, f"{twice} of {values[name].size} {what} occur twice")
    dead, count = values.get("is_dead"), values.get("token_count")
    if dead is None or count is None or dead.shape != count.shape:
        return
    wrong = np.flatnonzero(dead != (count == 0))
    if wrong.size:
        yield problem(
            "is_dead",
            f"is_dead and token_count disagree for {wrong.size} tokens, the first at position "
            f"{wrong[0]}",
        )
