"""Files in the folder of a run that are not part of it: of a crash, or foreign."""

from __future__ import annotations

import contextlib
import os
from dataclasses import dataclass, field
from pathlib import Path

from trajstore.arguments import format_bytes
from trajstore.integrity.checked_metadata import CheckedMetadata
from trajstore.store.metadata.metadata_form import METADATA_KEY, block_of
from trajstore.store.metadata.zarr_json import is_series
from trajstore.store.storage.atomic import PARTIAL_SUFFIX, inner_links, leftovers
from trajstore.store.storage.lock import lock_left
from trajstore.store.storage.remote_path import Location, RemotePath

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
    found = Leftovers(temporaries=[*leftovers(metadata.path)], lock=lock_left(metadata.path))
    rows = metadata.rows if rows is None else rows
    inside: dict[str, set[str]] = {}
    for key in metadata.objects:
        first, _, rest = key.partition("/")
        inside.setdefault(first, set()).add(rest.partition("/")[0])
    for name in sorted(inside.keys() - metadata.own):
        if not _is_known(metadata.path / name):
            found.unknown.append(metadata.path / name)
    for name in metadata.own:
        if name not in metadata.arrays or not is_series(name):
            continue
        stored = metadata.stored(name)
        beyond: dict[tuple[int, int], Location] = {}
        for leaf in sorted(filter(None, inside.get(name, ()))):
            path = metadata.path / name / leaf
            place = block_of(leaf, stored.ndim)
            if place is None or place[1] >= stored.parts:
                if not _is_known(path):
                    found.unknown.append(path)
            elif place[0] * stored.shard[0] >= rows:
                beyond[place] = path
        if beyond:
            found.beyond[name] = [beyond[place] for place in sorted(beyond)]
    with contextlib.suppress(OSError):  # the note on the folder reports it
        found.links = inner_links(metadata.path)
    return found


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
