"""Checks of the values of a run's arrays: shard by shard, in threads.

Each job uses the memory of a few chunks. Findings are joined in the order of the arrays.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt

from trajstore.integrity.checked_metadata import CheckedMetadata
from trajstore.integrity.chunk_checks import CheckedChunks, check_shard
from trajstore.integrity.problem import Problem
from trajstore.schema import STEP
from trajstore.store.metadata.metadata_form import chunk_key
from trajstore.store.metadata.zarr_json import is_series
from trajstore.store.reading.array_reader import StoredArray
from trajstore.store.storage.remote_path import REMOTE_REQUESTS, RemotePath
from trajstore.threads import Progress, in_parallel
from trajstore.values.native_types import NATIVE_TYPES

Array = npt.NDArray[Any]

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
    found = CheckedChunks()
    if isinstance(metadata.path, RemotePath):
        threads = threads or REMOTE_REQUESTS
    for part in in_parallel(_jobs(metadata), threads):
        found.add(part)
        if on_progress is not None:
            on_progress(found.bytes, max(found.bytes, total))
    found.problems += _check_steps(metadata, found.steps)
    if 0 not in found.steps or found.steps[0][0] != 0:
        # A run that begins later has no initial state in its first row.
        found.row0.clear()
    return found


def in_steps(found: CheckedChunks, ranges: Iterable[tuple[int, int]]) -> str:
    """Ranges of rows as steps, such as ``steps 96 to 111``; as rows if `step` is damaged.

    Parameters
    ----------
    found : CheckedChunks
    ranges : iterable of (int, int)
        First row, and the row after the last; in any order.
    """
    merged: list[tuple[int, int]] = []
    for first, stop in sorted(ranges):
        if merged and first <= merged[-1][1]:
            merged[-1] = merged[-1][0], max(stop, merged[-1][1])
        else:
            merged.append((first, stop))
    bounds = [(step_of(found, first), step_of(found, stop - 1)) for first, stop in merged]
    known = all(step is not None for pair in bounds for step in pair)
    pairs = bounds if known else [(first, stop - 1) for first, stop in merged]
    shown = (str(first) if first == last else f"{first} to {last}" for first, last in pairs)
    several = len(pairs) > 1 or pairs[0][0] != pairs[0][1]
    return f"{'step' if known else 'row'}{'s' if several else ''} {', '.join(shown)}"


def step_of(found: CheckedChunks, row: int) -> int | None:
    """Step of a row; None where `step` could not be read."""
    for first, values in found.steps.items():
        if first <= row < first + len(values):
            return int(values[row - first])
    return None


def _size_of_shards(metadata: CheckedMetadata) -> int:
    """Bytes of the existing shards of the committed rows."""
    keys = [stored.key(block, part) for stored, block, part in _shards(metadata)]
    if metadata.objects is not None:
        return sum(metadata.objects.get(key, 0) for key in keys)
    assert isinstance(metadata.path, RemotePath)  # a web server
    found = in_parallel([(metadata.path / key).stat for key in keys], REMOTE_REQUESTS)
    return sum(facts["size"] for facts in found if facts)


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
