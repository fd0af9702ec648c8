"""An open object of a run, read in parts, from a file or an object store."""

from __future__ import annotations

import errno
import os
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Protocol

from trajstore.codec.open_block import BlockObject, LocalObject
from trajstore.store.storage.remote_path import Location, RemotePath
from trajstore.strict_json import LARGEST_METADATA, metadata_bytes


class OpenObject(BlockObject, Protocol):
    """An open object.

    Attributes
    ----------
    size : int
        Size in bytes. Of a remote object, it is known after `end`.
    """

    size: int


class _RemoteObject(OpenObject):
    """A remote object for one thread, with the content it had when its end was read.

    It keeps the last part that was read.

    Parameters
    ----------
    path : RemotePath
    window : int
        Smallest number of bytes of a request.
    """

    def __init__(self, path: RemotePath, window: int) -> None:
        self.size = 0
        self._path = path
        self._window = window
        self._tag: str | None = None
        self._first, self._piece = 0, b""

    def end(self, length: int) -> bytes:
        """Last bytes; all bytes of a shorter object."""
        self._piece, facts = self._path.end_and_facts(max(length, self._window))
        self.size, self._tag = facts["size"], facts["e_tag"]
        self._first = self.size - len(self._piece)
        return self._piece[-length:]

    def read(self, offset: int, length: int) -> bytes:
        """Bytes from an offset; fewer at the end of the object."""
        stop = min(offset + length, self.size)
        if stop <= offset:
            return b""
        if not self._first <= offset <= stop <= self._first + len(self._piece):
            self._load(offset, min(max(stop, offset + self._window), self.size))
        return self._piece[offset - self._first : stop - self._first]

    async def prefetch(self, ranges: Sequence[tuple[int, int]]) -> None:
        """Read all bytes from the first range to the last, by one request."""
        stop = min(max(stop for _, stop in ranges), self.size)
        start = min(start for start, _ in ranges)
        if start < stop:
            self._load(start, stop)

    async def sibling(self, key: str, end: int) -> _RemoteObject:
        """Open another object of the run."""
        return _RemoteObject(self._path.parent.parent / key, self._window)

    def _load(self, start: int, stop: int) -> None:
        self._piece = self._path.read_range(start, stop, self._tag)
        self._first = start


def opened(path: Location, window: int = 0) -> AbstractContextManager[OpenObject]:
    """Open an object within a ``with`` block, for consistent reads of its parts.

    Parameters
    ----------
    path : Path or RemotePath
    window : int
        Smallest number of bytes of a request to an object store. They are kept in memory.

    Raises
    ------
    FileNotFoundError
        If the object does not exist. For a remote object, `end` raises it.
    OSError
        If it is not a regular file, such as a pipe.
    ObjectReplaced
        During a read, if the remote object was replaced.
    """
    if isinstance(path, RemotePath):
        return nullcontext(_RemoteObject(path, window))
    return LocalObject(path)


def metadata_in(path: Location) -> bytes:
    """Content of a metadata file; for a file, see `trajstore.strict_json.metadata_bytes`.

    Raises
    ------
    ValueError
        If it is not a metadata file, or too large.
    OSError
        If it cannot be read.
    """
    if isinstance(path, Path):
        return metadata_bytes(path)
    return path.read_bytes(LARGEST_METADATA)


def size_of(path: Location) -> int:
    """Size of an object in bytes.

    Raises
    ------
    FileNotFoundError
        If the object does not exist.
    """
    if isinstance(path, Path):
        return path.stat().st_size
    found = path.stat()
    if found is None:
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(path))
    return int(found["size"])
