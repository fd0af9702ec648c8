"""`verify`: read, check and decode every stored byte of a run, and change nothing.

Threads check the chunks, each with the memory of one chunk, for runs of any size. A problem does
not end the check.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from trajstore.arguments import Count, checks_types
from trajstore.errors import FormatError, ObjectStoreError, RunNotFound
from trajstore.integrity.array_checks import check_chunks
from trajstore.integrity.checked_metadata import CheckedMetadata
from trajstore.integrity.checkpoint_checks import check_checkpoints
from trajstore.integrity.chunk_checks import CheckedChunks
from trajstore.integrity.coordinate_checks import check_coordinates
from trajstore.integrity.leftovers import Leftovers, find_leftovers
from trajstore.integrity.metadata_checks import check_metadata, is_outdated
from trajstore.integrity.metadata_faults import digests_of
from trajstore.integrity.problem import Problem
from trajstore.store.metadata.metadata_form import CONTENT, FINGERPRINT, METADATA_KEY
from trajstore.store.reading.open_run import unzipped
from trajstore.store.reading.tiled_reader import TiledRun, open_tiled
from trajstore.store.storage.remote_path import Location, RunPath, key_within, location
from trajstore.threads import Progress
from trajstore.values.native_types import NATIVE_TYPES, convert, is_nan

_ATTEMPTS = 4


@dataclass(frozen=True, kw_only=True)
class Verification:
    """Result of `verify`.

    Attributes
    ----------
    path : Path or RemotePath
    problems : tuple of Problem
        Empty for a sound run.
    notes : tuple of str
        Remarks that are no damage: leftovers of a crash, parts without a check.
    rows : int
        Committed rows.
    arrays, shards, chunks : int
        Number of checked ones.
    bytes : int
        Bytes read.
    """

    path: Location
    problems: tuple[Problem, ...]
    notes: tuple[str, ...]
    rows: int
    arrays: int
    shards: int
    chunks: int
    bytes: int

    @property
    def clean(self) -> bool:
        """True without problems."""
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


@dataclass(frozen=True, kw_only=True)
class CheckedRun:
    """Facts about a completely checked run.

    Attributes
    ----------
    metadata : CheckedMetadata
    leftovers : Leftovers
    read : CheckedChunks
        Contents of the arrays.
    found : Verification
        Problems of the metadata first, then of the arrays, then of the checkpoints.
    """

    metadata: CheckedMetadata
    leftovers: Leftovers
    read: CheckedChunks
    found: Verification


@checks_types
def verify(
    path: RunPath,
    *,
    threads: Count | None = None,
    on_progress: Progress | None = None,
) -> Verification:
    """Check every stored byte of a run, also during its recording.

    Every chunk of every committed block is read, compared with its checksum and decompressed. The
    chunks of a shard must cover it without gaps. Metadata files are compared with each other and
    with the schema. Checkpoints of the run are checked, too.

    Parameters
    ----------
    path : path-like, str or RemotePath
        On a web server, which lists nothing, only the contents of the root are checked. A zip file
        is unpacked into a temporary folder.
    threads : int, optional
        By default the number of processors, at most 8; 16 for an object store.
    on_progress : callable, optional
        Called with the bytes of the checked shards, and of all shards.

    Returns
    -------
    Verification
        Problems are returned, never raised.

    Raises
    ------
    RunNotFound
        If there is nothing at `path`, or it was deleted meanwhile.
    FormatError
        If it is no run, or a run of a newer format.
    InvalidArgument
        If `threads` is not positive.
    ObjectStoreError
        If an object store does not respond; that is no damage.

    Examples
    --------
    >>> found = verify("gatsby.zarr")
    >>> found.clean, found.rows, found.problems
    (True, 21, ())
    """
    place = location(path).absolute()
    with unzipped(path) as folder:
        found = check_run(folder, threads=threads, on_progress=on_progress).found
    if found.path == place:
        return found
    problems = (
        replace(each, path=place / key_within(each.path, found.path)) for each in found.problems
    )
    return replace(found, path=place, problems=tuple(problems))


def check_run(
    path: RunPath,
    *,
    threads: int | None = None,
    on_progress: Progress | None = None,
) -> CheckedRun:
    """Check a run, and return all details.

    Readers take no lock. If a writer cut or replaced the run during the check, the check restarts.
    """
    for _ in range(_ATTEMPTS):
        checked = _check_once(path, threads, on_progress)
        found = checked.found
        if found.clean or not is_outdated(checked.metadata):
            break
    if not found.clean and isinstance(place := found.path, Path) and not place.exists():
        raise RunNotFound(f"{place} disappeared during the check: moved, deleted or unmounted")
    return checked


def _check_once(path: RunPath, threads: int | None, on_progress: Progress | None) -> CheckedRun:
    metadata = check_metadata(path)
    # First, because a recording may commit shards during the slow checks.
    leftovers = find_leftovers(metadata)
    coordinates = check_coordinates(metadata)
    chunks = check_chunks(metadata, threads=threads, on_progress=on_progress)
    checkpoints = check_checkpoints(metadata.path)
    whole = not (metadata.problems or chunks.problems or coordinates.problems)
    fingerprint = _check_fingerprint(metadata) if whole else []
    cells = _check_cells(metadata.path) if whole and "cells" in metadata.arrays else []
    # Shards of another program, by array, if they hold the values of the run.
    accepted = Counter(item.array for item in chunks.relabeled if whole and not fingerprint)
    found = Verification(
        path=metadata.path,
        problems=(
            *metadata.problems,
            *(() if accepted else chunks.relabeled),
            *chunks.problems,
            *coordinates.problems,
            *fingerprint,
            *cells,
            *checkpoints,
        ),
        notes=(
            *metadata.notes,
            *leftovers.notes(),
            *(
                f"{name}: another program wrote {count} shards again, with the recorded values"
                for name, count in accepted.items()
            ),
            *chunks.row0,
        ),
        rows=metadata.rows,
        arrays=len(metadata.arrays),
        shards=chunks.shards,
        chunks=chunks.chunks + coordinates.chunks,
        bytes=chunks.bytes + coordinates.bytes,
    )
    return CheckedRun(metadata=metadata, leftovers=leftovers, read=chunks, found=found)


def _check_fingerprint(metadata: CheckedMetadata) -> list[Problem]:
    """Compare the digests of a run without other problems with those of its commit."""
    assert metadata.whole is not None
    message, attributes = None, metadata.attributes
    try:
        found = digests_of(metadata.path, metadata.whole, metadata.rows)
        if found[CONTENT] != attributes[CONTENT]:
            message = (
                "the content digest differs from the committed one, but no part is damaged; an "
                "older block was restored, or metadata or coordinates were changed in all copies"
            )
        elif found[FINGERPRINT] != attributes[FINGERPRINT]:
            message = (
                "the fingerprint differs from the committed one: attributes of the root were "
                "changed in both copies"
            )
    except ObjectStoreError:
        raise
    except (FormatError, OSError) as error:
        message = f"the fingerprint cannot be computed: {error}"
    path = metadata.path / METADATA_KEY
    return [Problem(array=None, path=path, message=message)] if message else []


def _check_cells(path: Location) -> list[Problem]:
    """Compare ``cells`` of a readable run with W rounded to bfloat16, to nearest even.

    NaN is not compared: the value of one of them may have been lost.
    """
    try:
        run = open_tiled(path)
        if not {"W", "cells"} <= run.series.keys():
            return []
        count, step, token = _wrong_cells(run)
        if not count:
            return []
        message = (
            f"{count} values are not W rounded to bfloat16, the first at step {step} of token "
            f"{token}; one of the two has been changed"
        )
    except ObjectStoreError:
        raise
    except (FormatError, OSError) as error:
        message = f"they cannot be compared with W: {error}"
    return [Problem(array="cells", path=path / "cells" / METADATA_KEY, message=message)]


def _wrong_cells(run: TiledRun) -> tuple[int, int, int]:
    """Number of wrong cells, and step and token of the first."""
    W, cells, bfloat16 = run.series["W"], run.series["cells"], NATIVE_TYPES["bfloat16"]
    rows, count, first = np.arange(len(run.steps)), 0, (0, 0)
    for where in W.tiles(rows, None):
        expected, _ = convert(W.get(where), W.native, bfloat16)
        held = cells.bits(where)
        wrong = (held != expected) & ~(is_nan(held, bfloat16) | is_nan(expected, bfloat16))
        if wrong.any() and not count:
            at, among = where
            row, token, _ = np.argwhere(wrong)[0]
            ids = run.coordinates["token"]
            first = int(run.steps[at.start + row]), int(ids[among.start + token])
        count += int(np.count_nonzero(wrong))
    return count, *first
