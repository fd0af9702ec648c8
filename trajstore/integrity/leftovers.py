"""Files in the folder of a run that are no part of it: of a crash, or of somebody else."""

from __future__ import annotations

import contextlib
import os
from dataclasses import dataclass, field
from pathlib import Path

from trajstore.byte_sizes import format_bytes
from trajstore.integrity.array_json_checks import block_rows, is_series
from trajstore.integrity.checked_metadata import CheckedMetadata
from trajstore.store.metadata.object_keys import DOCUMENT, block_of
from trajstore.store.storage.atomic import PARTIAL_SUFFIX, inner_links, leftovers
from trajstore.store.storage.lock import lock_left
from trajstore.store.storage.remote_path import Location, RemotePath

__all__ = ["Leftovers", "files_of", "find_leftovers"]


_NAMED = 5


@dataclass(kw_only=True)
class Leftovers:
    """Files of a run's folder that no reader of the run opens.

    Attributes
    ----------
    temporaries : list of Path or RemotePath
        Of writes that did not end, or have not ended yet.
    beyond : dict of str to list of Path or RemotePath
        Shards past the committed rows, by array.
    dropped : list of Path or RemotePath
        Files of arrays that a repair dropped.
    unknown : list of Path or RemotePath
    unlisted : list of str
        A sentence on each folder that the system did not let be read.
    lock : Path or RemotePath or None
        The lock of a writer that died.
    links : list of Path
        In the run, which readers follow.
    """

    temporaries: list[Location] = field(default_factory=list)
    beyond: dict[str, list[Location]] = field(default_factory=dict)
    dropped: list[Location] = field(default_factory=list)
    unknown: list[Location] = field(default_factory=list)
    unlisted: list[str] = field(default_factory=list)
    lock: Location | None = None
    links: list[Path] = field(default_factory=list)

    def notes(self) -> list[str]:
        """A sentence on each kind that is there."""
        notes = [
            f"{name} has shards past the commit ({len(paths)}), which no reader sees"
            for name, paths in self.beyond.items()
        ]
        if self.dropped:
            names = ", ".join(sorted({path.parent.name for path in self.dropped}))
            notes.append(
                f"files of a dropped array are left ({len(self.dropped)}, {names}): the repair "
                "was interrupted, and another one removes them"
            )
        if self.temporaries:
            named = [
                f"{path.name} ({format_bytes(_size(path))})" for path in self.temporaries[:_NAMED]
            ]
            more = len(self.temporaries) - len(named)
            notes.append(
                f"there are temporaries ({len(self.temporaries)}), as a writer leaves them that "
                f"ends, or is, in the middle of a write: {', '.join(named)}"
                + (f" and {more} more" if more else "")
            )
        if self.lock is not None:
            notes.append(
                f"{self.lock.name} ({format_bytes(_size(self.lock))}) is the lock of a writer that "
                "has ended; the next one removes it"
            )
        notes += [f"{path.name} is not part of the run" for path in self.unknown]
        notes += [
            f"{path.name} is a link to {os.readlink(path)}: readers follow it, and nothing is "
            "written, removed or repaired through it"
            for path in self.links
        ]
        return notes + self.unlisted


def find_leftovers(metadata: CheckedMetadata, rows: int | None = None) -> Leftovers:
    """Look for files that are not part of the run.

    Parameters
    ----------
    metadata : CheckedMetadata
    rows : int, optional
        Rows of the run; those that are committed without it.
    """
    if isinstance(metadata.path, RemotePath) and metadata.objects is None:
        unlisted = "a web server lists no files, so leftovers and checkpoints were not looked for"
        return Leftovers(unlisted=[unlisted])
    found = Leftovers(temporaries=[*leftovers(metadata.path)], lock=lock_left(metadata.path))
    rows = metadata.rows if rows is None else rows
    for path in _entries(metadata, "", found):
        if path.name in metadata.dropped:
            found.dropped += files_of(metadata, path.name)
        elif not _is_known(path) and path.name not in metadata.own:
            found.unknown.append(path)
    for name in metadata.own:
        _find_in_array(metadata, name, rows, found)
    with contextlib.suppress(OSError):  # which the folder's note has
        found.links = inner_links(metadata.path)
    return found


def files_of(metadata: CheckedMetadata, name: str) -> list[Location]:
    """Files in the folder of an array."""
    return [
        path
        for path in _entries(metadata, name, Leftovers())
        if isinstance(path, RemotePath) or not path.is_dir()
    ]


def _find_in_array(metadata: CheckedMetadata, name: str, rows: int, found: Leftovers) -> None:
    document = metadata.arrays.get(name)
    if document is None or not is_series(name):
        return
    stored = metadata.stored(name)
    beyond = []
    for path in _entries(metadata, name, found):
        if _is_known(path):
            continue
        place = block_of(path.name, len(document["shape"]))
        if place is None or place[1] >= stored.parts:
            found.unknown.append(path)
        elif place[0] * block_rows(document) >= rows:
            beyond.append((place, path))
    if beyond:
        found.beyond[name] = [path for _, path in sorted(beyond, key=lambda item: item[0])]


def _entries(metadata: CheckedMetadata, name: str, found: Leftovers) -> list[Location]:
    """What lies in the folder of an array, or in that of the run, in the order of the names."""
    if metadata.objects is not None:
        prefix = f"{name}/" if name else ""
        inside = [key[len(prefix) :] for key in metadata.objects if key.startswith(prefix)]
        folder: Location = metadata.path / name
        return [folder / each for each in sorted({key.partition("/")[0] for key in inside})]
    assert isinstance(metadata.path, Path)  # as others are listed, or not looked at
    folder = metadata.path / name
    try:
        return [folder / each for each in sorted(os.listdir(folder))]
    except (FileNotFoundError, NotADirectoryError):
        return []
    except OSError as error:
        found.unlisted.append(f"{folder.name} cannot be searched for leftovers: {error.strerror}")
        return []


def _size(path: Location) -> int:
    """Bytes of a file, or of all files of a folder; 0 of what has gone meanwhile."""
    total = 0
    if isinstance(path, RemotePath):
        return int((path.stat() or {"size": 0})["size"])
    for file in [path, *path.rglob("*")]:
        with contextlib.suppress(OSError):
            total += file.lstat().st_size if not file.is_dir() else 0
    return total


def _is_known(path: Location) -> bool:
    """Whether it is a document, or temporary."""
    temporary = path.name.startswith(".") and path.name.endswith(PARTIAL_SUFFIX)
    return path.name == DOCUMENT or temporary
