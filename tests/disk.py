"""What a loss of power, or a full disk, would leave of what this process writes.

The calls by which the store flushes and renames are watched. A file counts as flushed as long as it
is as large and as old as it was then; a folder, as long as it holds the same names.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from damage import contents

State = tuple[Any, ...]


class Disk:
    """Watches the calls of this process from now on.

    Attributes
    ----------
    flushes : int
        How many there were.
    calls : list of (str, Path)
        Each flush, and each move to a target, in order.
    early : list of Path
        What got its name when its data was not flushed; not of what is made in hidden folders.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.flushes = 0
        self.calls: list[tuple[str, Path]] = []
        self.early: list[Path] = []
        self._flushed: dict[int, State] = {}
        watched = {name: self._watched(getattr(os, name)) for name in ("rename", "replace")}
        stand_in(monkeypatch, fsync=self._fsync, **watched)

    def survives(self, path: Path, *, below: Path | None = None) -> bool:
        """Whether all of a file or folder is flushed, and its name, and those below a folder."""
        names = [path]
        while below not in (None, names[-1].parent):
            names.append(names[-1].parent)
        return self._is_flushed(path) and all(self._has_name(name) for name in names)

    def _fsync(self, descriptor: int) -> None:
        self.flushes += 1
        self.calls.append(("flush", Path(os.readlink(f"/proc/self/fd/{descriptor}"))))
        self._flushed[os.fstat(descriptor).st_ino] = _state(descriptor)

    def _watched(self, call: Any) -> Any:
        def move(source: Any, target: Any) -> None:
            hidden = any(part.startswith(".") for part in Path(target).parts)
            if not hidden and not self._is_flushed(Path(source)):
                self.early.append(Path(target))
            self.calls.append(("move", Path(target)))
            call(source, target)

        return move

    def _is_flushed(self, path: Path) -> bool:
        held = [path, *path.rglob("*")]
        return all(self._flushed.get(each.stat().st_ino) == _state(each) for each in held)

    def _has_name(self, path: Path) -> bool:
        kept = self._flushed.get(path.parent.stat().st_ino, ())
        return (path.name, path.stat().st_ino) in kept


@contextmanager
def moves(call: Callable[[Any, Any], None]) -> Iterator[None]:
    """Have `call` put every object in its place meanwhile."""
    with pytest.MonkeyPatch.context() as patch:
        stand_in(patch, replace=call)
        yield


@contextmanager
def failing_moves(
    fails: Callable[[Path], bool] | int, error: BaseException | None = None
) -> Iterator[None]:
    """Have the moves to some targets, or all after so many, fail; without an error, of no space."""
    move, left = os.replace, iter(range(fails if isinstance(fails, int) else 0))

    def replace(source: Any, target: Any) -> None:
        if next(left, None) is None if isinstance(fails, int) else fails(Path(target)):
            raise error or OSError(28, "No space left on device")
        move(source, target)

    with moves(replace):
        yield


@contextmanager
def held_moves() -> Iterator[tuple[threading.Event, threading.Event]]:
    """Events of the moves: one waits; all may go on, as they do at the end at the latest."""
    waits, go_on, move = threading.Event(), threading.Event(), os.replace

    def replace(source: Any, target: Any) -> None:
        waits.set()
        assert go_on.wait(timeout=60)
        move(source, target)

    with moves(replace):
        try:
            yield waits, go_on
        finally:
            go_on.set()


def objects_of(run: Path) -> dict[str, bytes]:
    """Every object of a run but the metadata files, which hold times."""
    return {key: data for key, data in contents(run).items() if not key.endswith("zarr.json")}


def stand_in(monkeypatch: pytest.MonkeyPatch, **calls: Callable[..., object]) -> None:
    """Replace calls of the system."""
    for name, call in calls.items():
        monkeypatch.setattr(os, name, call)


def _state(place: Path | int) -> State:
    """Names and inodes in a folder; size and age of a file."""
    found = os.stat(place)
    if not os.path.isdir(f"/proc/self/fd/{place}" if isinstance(place, int) else place):
        return found.st_size, found.st_mtime_ns
    with os.scandir(place) as entries:
        return tuple(sorted((entry.name, entry.inode()) for entry in entries))
