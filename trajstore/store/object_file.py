"""An object of a run, open to be read in parts: a file, or what an object store holds."""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol

from trajstore.store.remote_path import Location, RemotePath

__all__ = ["ObjectFile", "opened"]


class ObjectFile(Protocol):
    """An open object. One that is replaced meanwhile may show as what it was, or as what it is."""

    def end(self, length: int) -> bytes:
        """Last bytes."""

    def read(self, offset: int, length: int) -> bytes:
        """Bytes from an offset on; fewer where it ends."""


class _LocalFile:
    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor

    def end(self, length: int) -> bytes:
        start = max(os.fstat(self._descriptor).st_size - length, 0)
        return os.pread(self._descriptor, length, start)

    def read(self, offset: int, length: int) -> bytes:
        return os.pread(self._descriptor, length, offset)


class _RemoteFile:
    """Who reads anything but the end, reads most of it: it comes by one request."""

    def __init__(self, path: RemotePath) -> None:
        self._path = path
        self._data: bytes | None = None

    def end(self, length: int) -> bytes:
        return self._path.read_end(length)

    def read(self, offset: int, length: int) -> bytes:
        if self._data is None:
            self._data = self._path.read_bytes()
        return self._data[offset : offset + length]


@contextmanager
def opened(path: Location) -> Iterator[ObjectFile]:
    """Open an object for as long as the block lasts.

    Raises
    ------
    FileNotFoundError
        If there is none; for one of an object store when it is read first.
    OSError
        If it is no regular file.
    """
    if isinstance(path, RemotePath):
        yield _RemoteFile(path)
        return
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK)  # a pipe would be waited for
    try:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise OSError(errno.EINVAL, "it is no regular file", str(path))
        yield _LocalFile(descriptor)
    finally:
        os.close(descriptor)
