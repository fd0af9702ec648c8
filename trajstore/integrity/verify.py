"""`verify`: read, check and decode every stored byte of a run, and change nothing.

Threads check the chunks, each with the memory of one chunk, for runs of any size. A problem does
not end the check. Files in the folder that are not part of the run, of a crash or foreign, are
named.

Checkpoints next to a run, such as ``NAME.ckpt/step-00000300.safetensors``, are checked, too; other
files in that folder are ignored. The metadata of a checkpoint have two texts: ``trajstore``, a JSON
object with dtype, shape and crc32c of every tensor under ``tensors``; and ``crc32c``, the checksum
of the first text, in decimal.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import google_crc32c
import numpy as np

from trajstore.arguments import Count, checks_types
from trajstore.errors import FormatError, ObjectStoreError, RunNotFound
from trajstore.formats.safetensors import Entry, SafetensorsFile
from trajstore.installation import __version__
from trajstore.integrity.array_checks import CheckedChunks, check_chunks, check_coordinates
from trajstore.integrity.metadata_checks import check_metadata, is_outdated
from trajstore.integrity.metadata_faults import CheckedMetadata, Problem, digests_of
from trajstore.schema import KEYFRAMES
from trajstore.store.metadata.metadata_form import CONTENT, FINGERPRINT
from trajstore.store.metadata.zarr_json import is_series
from trajstore.store.reading.open_group import unzipped
from trajstore.store.reading.tiled_reader import TiledRun, open_tiled
from trajstore.store.storage.atomic import PARTIAL_SUFFIX, inner_links, leftovers
from trajstore.store.storage.lock import lock_left
from trajstore.store.storage.remote_path import (
    CHECKPOINT,
    METADATA_KEY,
    Location,
    RemotePath,
    RunPath,
    block_of,
    checkpoint_folder,
    key_within,
    local_file,
    location,
)
from trajstore.threads import Progress
from trajstore.units import format_bytes
from trajstore.values.native_types import NATIVE_TYPES, convert, is_nan

_NAMED = 5


@dataclass(kw_only=True)
class Leftovers:
    """Files in a run's folder that no reader opens.

    Attributes
    ----------
    temporaries : list of Path or RemotePath
        Temporary files of unfinished writes.
    beyond : dict of str to list of Path or RemotePath
        Shards past the committed rows, by array.
    unknown : list of Path or RemotePath
    lock : Path or RemotePath or None
        The lock of a dead writer.
    links : list of Path
        Links in the run, which readers follow.
    """

    temporaries: list[Location] = field(default_factory=list)
    beyond: dict[str, list[Location]] = field(default_factory=dict)
    unknown: list[Location] = field(default_factory=list)
    lock: Location | None = None
    links: list[Path] = field(default_factory=list)

    def notes(self) -> list[str]:
        """A sentence for each kind of leftover."""
        notes = [
            f"{name} has shards past the commit ({len(paths)}), which no reader sees"
            for name, paths in self.beyond.items()
        ]
        if self.temporaries:
            named = [
                f"{path.name} ({format_bytes(_size(path))})" for path in self.temporaries[:_NAMED]
            ]
            more = len(self.temporaries) - len(named)
            notes.append(
                f"temporary files ({len(self.temporaries)}) of a writer that is in a write, or "
                f"died in one: {', '.join(named)}" + (f" and {more} more" if more else "")
            )
        if self.lock is not None:
            notes.append(
                f"{self.lock.name} ({format_bytes(_size(self.lock))}) is the lock of a dead "
                "writer; the next writer removes it"
            )
        notes += [f"{path.name} is not part of the run" for path in self.unknown]
        return notes + [
            f"{path.name} is a link to {os.readlink(path)}: readers follow it, and nothing is "
            "written, removed or repaired through it"
            for path in self.links
        ]


def find_leftovers(metadata: CheckedMetadata, rows: int | None = None) -> Leftovers:
    """Find files that are not part of the run.

    Parameters
    ----------
    metadata : CheckedMetadata
    rows : int, optional
        Rows of the run; by default the committed rows.
    """
    if metadata.objects is None:
        return Leftovers()
    remains = Leftovers(temporaries=[*leftovers(metadata.path)], lock=lock_left(metadata.path))
    rows = metadata.rows if rows is None else rows
    inside: dict[str, set[str]] = {}
    for key in metadata.objects:
        first, _, rest = key.partition("/")
        inside.setdefault(first, set()).add(rest.partition("/")[0])
    for name in sorted(inside.keys() - metadata.documents):
        if not _is_known(metadata.path / name):
            remains.unknown.append(metadata.path / name)
    for name in metadata.documents:
        if name not in metadata.arrays or not is_series(name):
            continue
        stored = metadata.stored(name)
        beyond: dict[tuple[int, int], Location] = {}
        for leaf in sorted(filter(None, inside.get(name, ()))):
            path = metadata.path / name / leaf
            place = block_of(leaf, stored.ndim)
            if place is None or place[1] >= stored.parts:
                if not _is_known(path):
                    remains.unknown.append(path)
            elif place[0] * stored.shard[0] >= rows:
                beyond[place] = path
        if beyond:
            remains.beyond[name] = [beyond[place] for place in sorted(beyond)]
    with contextlib.suppress(OSError):  # the note on the folder reports it
        remains.links = inner_links(metadata.path)
    return remains


def _size(path: Location) -> int:
    """Bytes of a file, or of all files in a folder; 0 if it was deleted meanwhile."""
    total = 0
    if isinstance(path, RemotePath):
        return int((path.stat() or {"size": 0})["size"])
    for file in [path, *path.rglob("*")]:
        with contextlib.suppress(OSError):
            total += file.lstat().st_size if not file.is_dir() else 0
    return total


def _is_known(path: Location) -> bool:
    """True for a metadata file or a temporary file."""
    temporary = path.name.startswith(".") and path.name.endswith(PARTIAL_SUFFIX)
    return path.name == METADATA_KEY or temporary


def check_checkpoints(run: Location) -> Iterator[Problem]:
    """Check every checkpoint of a run.

    Parameters
    ----------
    run : Path or RemotePath
        A checkpoint in an object store is copied to a temporary file. A web server lists none.

    Yields
    ------
    Problem
        With array None; its path names the checkpoint.
    """
    folder: Location = checkpoint_folder(run)
    if (isinstance(folder, RemotePath) and not folder.listed) or not folder.is_dir():
        return
    try:
        names = sorted(path.name for path in folder.iterdir())
    except ObjectStoreError:
        raise
    except OSError as error:
        yield _unread(folder, error.strerror or error)
        return
    for path in (folder / name for name in names if CHECKPOINT.fullmatch(name)):
        try:
            with local_file(path) as local:
                try:
                    with SafetensorsFile(local) as file:
                        yield from _check(path, file)
                except FormatError as error:
                    yield _broken(path, str(error).replace(str(local), str(path)))
        except ObjectStoreError:
            raise
        except FileNotFoundError:
            # A recording removes older checkpoints at any time.
            if path.exists():
                yield _unread(path, "it is no file")
        except OSError as error:
            yield _unread(path, error.strerror or error)


def _check(path: Location, file: SafetensorsFile) -> Iterator[Problem]:
    text = file.attributes.get("trajstore")
    if text is None or file.attributes.get("crc32c") != str(google_crc32c.value(text.encode())):
        yield _broken(path, "its description does not fit its checksum")
        return
    tensors = json.loads(text)["tensors"]
    for name in sorted(tensors.keys() ^ file.entries.keys()):
        where = "missing" if name in tensors else "not in its description"
        yield _broken(path, f"the tensor {name} is {where}")
    for name in sorted(tensors.keys() & file.entries.keys()):
        entry, described = file.entries[name], tensors[name]
        if entry.dtype != described["dtype"] or list(entry.shape) != described["shape"]:
            yield _broken(path, f"the tensor {name} is not of its type and shape", entry)
        elif _checksum(file, name) != described["crc32c"]:
            yield _broken(path, f"the tensor {name} does not fit its checksum", entry)


def _unread(path: Location, reason: object) -> Problem:
    return Problem(array=None, path=path, message=f"the checkpoint cannot be read: {reason}")


def _broken(path: Location, fault: str, entry: Entry | None = None) -> Problem:
    first, stop = (None, None) if entry is None else (entry.begin, entry.end)
    message = f"the checkpoint is broken: {fault}"
    return Problem(
        array=None, path=path, message=message, remedy="remove", first_byte=first, stop_byte=stop
    )


def _checksum(file: SafetensorsFile, name: str) -> int:
    """crc32c of a tensor's bytes."""
    value = 0
    for piece in file.pieces(name):
        value = google_crc32c.extend(value, piece)
    return value


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
    verification : Verification
        Problems of the metadata first, then of the arrays, then of the checkpoints.
    """

    metadata: CheckedMetadata
    leftovers: Leftovers
    read: CheckedChunks
    verification: Verification


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
    with the schema. Checkpoints and keyframes of the run are checked, too.

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
        verification = check_run(folder, threads=threads, on_progress=on_progress).verification
        keyframes = location(folder) / KEYFRAMES
        if (keyframes / METADATA_KEY).exists():
            of_keyframes = check_run(keyframes, threads=threads).verification
            named = (replace(p, array=f"{KEYFRAMES}/{p.array}") for p in of_keyframes.problems)
            of_keyframes = replace(of_keyframes, problems=tuple(named))
            names = ("problems", "notes", "shards", "chunks", "bytes")
            sums = {n: getattr(verification, n) + getattr(of_keyframes, n) for n in names}
            verification = replace(verification, **sums)
    if verification.path == place:
        return verification
    problems = (
        replace(each, path=place / key_within(each.path, verification.path))
        for each in verification.problems
    )
    return replace(verification, path=place, problems=tuple(problems))


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
        verification = checked.verification
        if verification.clean or not is_outdated(checked.metadata):
            break
    if (
        not verification.clean
        and isinstance(place := verification.path, Path)
        and not place.exists()
    ):
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
    verification = Verification(
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
    return CheckedRun(
        metadata=metadata, leftovers=leftovers, read=chunks, verification=verification
    )


def _check_fingerprint(metadata: CheckedMetadata) -> list[Problem]:
    """Compare the digests of a run without other problems with those of its commit."""
    assert metadata.whole is not None
    message, attributes = None, metadata.attributes
    try:
        digests = digests_of(metadata.path, metadata.whole, metadata.rows)
        if digests[CONTENT] != attributes[CONTENT]:
            message = (
                "the content digest differs from the committed one, but no part is damaged; an "
                "older block was restored, or metadata or coordinates were changed in all copies"
            )
            writer = attributes["trajstore_version"]
            if writer != __version__:  # a later one may have added variables
                message += f"; check it with the trajstore {writer} that recorded it, too"
        elif digests[FINGERPRINT] != attributes[FINGERPRINT]:
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
        stored = cells.bits(where)
        wrong = (stored != expected) & ~(is_nan(stored, bfloat16) | is_nan(expected, bfloat16))
        if wrong.any() and not count:
            at, among = where
            row, token, _ = np.argwhere(wrong)[0]
            ids = run.coordinates["token"]
            first = int(run.steps[at.start + row]), int(ids[among.start + token])
        count += int(np.count_nonzero(wrong))
    return count, *first
