"""`verify`: every stored byte of a run is read, checked and decoded; nothing is changed.

Chunks are checked in parallel, each in the memory of the thread that does it, so memory stays flat
whatever the size of the run. What is broken is named, and the rest is checked all the same.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from trajstore.checkpoint_files import check_checkpoints
from trajstore.chunk_checks import Found, array_jobs, size_of_shards
from trajstore.coordinates import check_coordinates
from trajstore.documents import Problem, block_rows, is_length, is_series, read_document
from trajstore.errors import InvalidArgument
from trajstore.inspection import Inspection, inspect
from trajstore.leftovers import Leftovers, find_leftovers
from trajstore.metadata import DOCUMENT, chunk_key
from trajstore.parts import Progress, in_parallel
from trajstore.schema import STEP

__all__ = ["Checked", "Verification", "check", "verify"]

Array = npt.NDArray[Any]

_ATTEMPTS = 4


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
    """Check a run; the details of `verify`, for whoever goes on from there.

    Readers take no lock. What looks broken because a writer has cut the run or made it anew since
    its root was read is looked at again.
    """
    for _ in range(_ATTEMPTS):
        checked = _check(path, threads=threads, on_progress=on_progress)
        if not checked.problems or not _has_gone_back(checked.inspection):
            break
    return checked


def _has_gone_back(inspection: Inspection) -> bool:
    """Whether the root on disk is that of fewer rows, or of another run, than was inspected."""
    root = read_document(inspection.path / DOCUMENT, None)
    if isinstance(root, Problem) or not isinstance(root.get("attributes"), dict):
        return False
    now, then = root["attributes"], inspection.attributes
    rows, before = now.get("committed_rows"), then.get("committed_rows")
    return now.get("created") != then.get("created") or (
        is_length(rows) and is_length(before) and rows < before
    )


def _check(
    path: str | os.PathLike[str], *, threads: int | None, on_progress: Progress | None
) -> Checked:
    inspection = inspect(path)
    leftovers = find_leftovers(inspection)
    total = size_of_shards(inspection)
    found = Found()
    jobs = (
        job
        for name in filter(is_series, inspection.arrays)
        for job in array_jobs(inspection, name, found)
    )
    for part in in_parallel(jobs, threads):
        found.add(part)
        if on_progress is not None:
            on_progress(found.bytes, total)
    coordinates = check_coordinates(inspection)
    steps = found.steps.get(0)
    return Checked(
        inspection=inspection,
        leftovers=leftovers,
        problems=[
            *inspection.problems,
            *found.problems,
            *_check_steps(inspection, found.steps),
            *coordinates.problems,
            *check_checkpoints(inspection.path),
        ],
        notes=[
            *inspection.notes,
            *leftovers.notes(),
            *found.notes,
            *coordinates.notes,
            # A run that begins later holds no initial state in its first row.
            *(found.row0 if steps is not None and steps[0] == 0 else ()),
        ],
        shards=found.shards,
        chunks=found.chunks + coordinates.chunks,
        bytes=found.bytes + coordinates.bytes,
    )


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
