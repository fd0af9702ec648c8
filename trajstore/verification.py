"""`verify`: every stored byte of a run is read, checked and decoded; nothing is changed.

Chunks are checked in parallel, each in the memory of the thread that does it, so memory stays flat
whatever the size of the run. What is broken is named, and the rest is checked all the same.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import zarr

from trajstore.bits import NATIVE_TYPES, NativeType, narrow
from trajstore.checkpoint_files import check_checkpoints
from trajstore.codecs import unfold
from trajstore.coordinates import check_coordinates
from trajstore.errors import FormatError, InvalidArgument
from trajstore.inspection import Inspection, Problem, block_rows, inspect, is_series
from trajstore.leftovers import Leftovers, find_leftovers
from trajstore.metadata import chunk_key
from trajstore.parts import Progress, in_parallel
from trajstore.schema import STEP, VARIABLES
from trajstore.stored import StoredArray

__all__ = ["Checked", "Verification", "check", "verify"]

Array = npt.NDArray[Any]

_BATCH = 4 << 20
_ABSENT = (1 << 64) - 1


@dataclass(frozen=True, kw_only=True)
class Verification:
    """What `verify` found.

    Attributes
    ----------
    path : Path
    problems : tuple of Problem
        What is wrong; empty for a sound run.
    notes : tuple of str
        What is not damage, and still worth knowing: what a crash leaves, what could not be checked.
    rows : int
        Committed rows.
    arrays, shards, chunks : int
        Checked.
    bytes : int
        Read.
    """

    path: Path
    problems: tuple[Problem, ...]
    notes: tuple[str, ...]
    rows: int
    arrays: int
    shards: int
    chunks: int
    bytes: int

    @property
    def clean(self) -> bool:
        """Whether nothing is wrong."""
        return not self.problems

    def facts(self) -> dict[str, Any]:
        """All of it as JSON values."""
        problems = [asdict(item) | {"path": str(item.path)} for item in self.problems]
        return asdict(self) | {
            "path": str(self.path),
            "clean": self.clean,
            "problems": problems,
            "notes": list(self.notes),
        }


@dataclass(kw_only=True)
class Checked:
    """A run whose documents and contents have been checked.

    Attributes
    ----------
    inspection : Inspection
    leftovers : Leftovers
    problems : list of Problem
        Of the documents first, then of the contents.
    notes : list of str
    shards, chunks, bytes : int
    """

    inspection: Inspection
    leftovers: Leftovers
    problems: list[Problem]
    notes: list[str]
    shards: int = 0
    chunks: int = 0
    bytes: int = 0


@dataclass(kw_only=True)
class _Found:
    """What one job found."""

    problems: list[Problem] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    steps: dict[int, Array] = field(default_factory=dict)  # by their first row
    chunks: int = 0
    bytes: int = 0


Job = Callable[[], _Found]


def verify(
    path: str | os.PathLike[str],
    *,
    threads: int | None = None,
    on_progress: Progress | None = None,
) -> Verification:
    """Check everything that is stored of a run, also while it is being recorded.

    Every chunk of every committed block is read, checked against its checksum and decompressed;
    the chunks of a shard must cover it without gaps. The documents are held against each other,
    and against the table of variables; checkpoints beside the run are checked too.

    Parameters
    ----------
    path : path-like
        A local run.
    threads : int, optional
        Without it as many as there are processors, at most 8.
    on_progress : callable, optional
        Called with the bytes of the shards that are done, and those there are.

    Returns
    -------
    Verification
        Problems are returned, never raised.

    Raises
    ------
    RunNotFound
        If there is nothing at `path`.
    FormatError
        If it is not a run, or one of a newer format.
    InvalidArgument
        If `path` is an address, or `threads` not positive.

    Examples
    --------
    >>> import numpy as np, tempfile
    >>> from trajstore import RunWriter, verify
    >>> path = tempfile.mkdtemp() + "/run.zarr"
    >>> with RunWriter.create(path, token=[0, 1], hidden=2, variables={"W": "float32"}) as run:
    ...     run.append(step=0, W=np.zeros((2, 2), "float32"))
    >>> found = verify(path)
    >>> found.clean, found.rows, found.shards
    (True, 1, 2)
    """
    if threads is not None and threads < 1:
        raise InvalidArgument(f"got {threads} threads, expected at least 1")
    checked = check(path, threads=threads, on_progress=on_progress)
    return Verification(
        path=checked.inspection.path,
        problems=tuple(checked.problems),
        notes=tuple(checked.notes),
        rows=checked.inspection.rows,
        arrays=len(checked.inspection.arrays),
        shards=checked.shards,
        chunks=checked.chunks,
        bytes=checked.bytes,
    )


def check(
    path: str | os.PathLike[str],
    *,
    threads: int | None = None,
    on_progress: Progress | None = None,
) -> Checked:
    """Check a run; the details of `verify`, for whoever goes on from there."""
    inspection = inspect(path)
    leftovers = find_leftovers(inspection)
    problems = [*inspection.problems]
    checked = Checked(
        inspection=inspection,
        leftovers=leftovers,
        problems=problems,
        notes=[*inspection.notes, *leftovers.notes()],
    )
    total = _size_of_shards(inspection)
    notes: dict[str, None] = {}  # once each
    steps: dict[int, Array] = {}
    jobs = (job for name in filter(is_series, inspection.arrays) for job in _jobs(checked, name))
    for found in in_parallel(jobs, threads):
        problems += found.problems
        notes |= dict.fromkeys(found.notes)
        steps |= found.steps
        checked.chunks += found.chunks
        checked.bytes += found.bytes
        if on_progress is not None:
            on_progress(checked.bytes, total)
    problems += _check_steps(inspection, steps)
    if 0 in steps and steps[0][0] == 0:
        # What a run that begins later holds in its first row is no initial state.
        checked.notes += notes
    coordinates = check_coordinates(inspection)
    problems += coordinates.problems
    checked.notes += coordinates.notes
    checked.chunks += coordinates.chunks
    checked.bytes += coordinates.bytes
    problems += check_checkpoints(inspection.path)
    return checked


class _Shard:
    """An open shard; closed when the last job that reads it is done."""

    def __init__(self, path: Path) -> None:
        self.number = -1
        self.path = path
        self.number = os.open(path, os.O_RDONLY)

    def __del__(self) -> None:
        if self.number >= 0:
            os.close(self.number)


def _size_of_shards(inspection: Inspection) -> int:
    size = 0
    for name in filter(is_series, inspection.arrays):
        if not (inspection.path / name).is_dir():
            continue  # which is a problem of its own
        with os.scandir(inspection.path / name) as entries:
            size += sum(entry.stat().st_size for entry in entries if entry.name.startswith("c"))
    return size


def _jobs(checked: Checked, name: str) -> Iterator[Job]:
    """Checks of an array: first where its chunks lie, shard by shard, then the chunks."""
    inspection = checked.inspection
    stored = inspection.stored(name)
    if stored is None:
        yield from _foreign_jobs(checked, name)
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
            checked.problems.append(
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
        checked.shards += 1
        where = _index(checked, stored, shard, block)
        batch: list[int] = []
        # In the order of the file.
        for number in sorted(range(len(where)), key=lambda number: where[number]):
            batch.append(number)
            if sum(where[number][1] for number in batch) >= _BATCH:
                yield _job(stored, native, shard, block, where, batch)
                batch = []
        if batch:
            yield _job(stored, native, shard, block, where, batch)


def _index(
    checked: Checked, stored: StoredArray, shard: _Shard, block: int
) -> dict[int, tuple[int, int]]:
    """Offset and length of each chunk that can be read; report what does not cover the shard."""
    size = os.fstat(shard.number).st_size
    end = size - stored.index_length

    def report(message: str, first: int, stop: int, remedy: Literal["cut", "none"] = "cut") -> None:
        checked.problems.append(
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

    try:
        index = stored.index(shard.number, block)
    except FormatError:
        torn = f"the shard has {size} bytes, too few for its index of {stored.index_length}"
        report("the index is broken" if end >= 0 else torn, max(end, 0), size)
        return {}
    except OSError as error:
        report(f"the index cannot be read: {error}", end, size, "none")
        return {}
    checked.bytes += stored.index_length
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
    def run() -> _Found:
        found = _Found()
        for number in numbers:
            offset, length = where[number]
            found.chunks += 1
            found.bytes += length
            remedy: Literal["cut", "none"] = "none"
            try:
                data = os.pread(shard.number, length, offset)
                if len(data) != length:
                    raise ValueError("the file ends before it")
                values = stored.chain.unpack(data, stored.chunk)
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
                found.notes += () if row is None else _row0_notes(stored.name, row)
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
        row = values[..., 0] if chain.kind == "step-last" else values[0, ...]
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


def _foreign_jobs(checked: Checked, name: str) -> Iterator[Job]:
    """Checks of an array that is stored in a way of its own: zarr reads it, block by block."""
    inspection = checked.inspection
    if inspection.own[name] is None:
        return  # which is a problem of its own
    checked.notes.append(
        f"{name} is not stored as a recorder stores it; it is read through zarr, and only what its "
        "own codecs check is checked"
    )
    array: zarr.Array[Any] = zarr.open_array(inspection.path / name, mode="r", zarr_format=3)
    native = NATIVE_TYPES.get(str(array.attrs.get("native_dtype")))
    rows = block_rows(inspection.arrays[name])
    for block in range(-(-inspection.rows // rows)):
        span = slice(block * rows, min((block + 1) * rows, inspection.rows))

        def run(span: slice = span, block: int = block) -> _Found:
            found = _Found(chunks=1)
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
                found.notes += _row0_notes(name, values[0])
            return found

        yield run


def _check_steps(inspection: Inspection, steps: dict[int, Array]) -> Iterator[Problem]:
    """Steps must increase strictly, from at least 0."""
    last = -1
    for first, values in sorted(steps.items()):
        before = np.concatenate(([last], values[:-1]))
        wrong = np.flatnonzero(values <= before)
        if wrong.size:
            at = int(wrong[0])
            block = (first + at) // block_rows(inspection.arrays[STEP.name])
            yield Problem(
                array=STEP.name,
                block=block,
                path=inspection.path / chunk_key(STEP.name, block, 1),
                message=f"row {first + at} is step {values[at]} after step {before[at]}; steps "
                "must increase",
            )
        last = int(values[-1])
