"""An object of a run, open to be read in parts: a file, or what an object store holds."""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Protocol

from trajstore.store.storage.remote_path import Location, RemotePath
from trajstore.strict_json import LARGEST_DOCUMENT, document_bytes

__all__ = ["HeldObject", "ObjectFile", "document_in", "held", "opened", "size_of"]

_WINDOW = 4 << 20  # bytes that come by one request, to whoever reads one part after the other


class ObjectFile(Protocol):
    """An open object. One that is replaced meanwhile may show as what it was, or as what it is."""

    def end(self, length: int) -> bytes:
        """Last bytes."""

    def read(self, offset: int, length: int) -> bytes:
        """Bytes from an offset on; fewer where it ends."""


class _LocalFile:
    """Of a file that is never written to once it is there: another one takes its place."""

    def __init__(self, descriptor: int, size: int) -> None:
        self.size = size
        self._descriptor = descriptor

    def end(self, length: int) -> bytes:
        return self.read(max(self.size - length, 0), min(length, self.size))

    def read(self, offset: int, length: int) -> bytes:
        return os.pread(self._descriptor, length, offset)


@contextmanager
def _local_file(path: Path) -> Iterator[_LocalFile]:
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK)  # a pipe would be waited for
    try:
        found = os.fstat(descriptor)
        if not stat.S_ISREG(found.st_mode):
            raise OSError(errno.EINVAL, "it is no regular file", str(path))
        yield _LocalFile(descriptor, found.st_size)
    finally:
        # Nothing was written: what was read is right, whatever closing it comes to.
        with suppress(OSError):
            os.close(descriptor)


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
    with _local_file(path) as file:
        yield file


class HeldObject(Protocol):
    """An object as it was when it was opened, whatever is put in its place.

    Attributes
    ----------
    size : int
        Bytes.
    """

    size: int

    def read(self, offset: int, length: int) -> bytes:
        """Bytes from an offset on; fewer where it ends."""


class _HeldRemote:
    """Of one thread: it keeps the piece that was read last."""

    def __init__(self, path: RemotePath) -> None:
        self._path = path
        self._piece, facts = path.end_and_facts(_WINDOW)
        self.size: int = facts["size"]
        self._tag = facts["e_tag"]
        self._first = self.size - len(self._piece)

    def read(self, offset: int, length: int) -> bytes:
        stop = min(offset + length, self.size)
        if not self._first <= offset <= stop <= self._first + len(self._piece):
            if stop <= offset:
                return b""
            last = min(max(stop, offset + _WINDOW), self.size)
            self._piece = self._path.read_range(offset, last, self._tag)
            self._first = offset
        return self._piece[offset - self._first : stop - self._first]


@contextmanager
def held(path: Location) -> Iterator[HeldObject]:
    """Open an object for as long as the block lasts, to be read in parts that belong together.

    Memory holds a few MiB of one in an object store.

    Raises
    ------
    FileNotFoundError
        If there is none.
    OSError
        If it is no regular file, such as a pipe.
    ObjectReplaced
        When it is read, and has been replaced in its object store.
    """
    if isinstance(path, RemotePath):
        yield _HeldRemote(path)
        return
    with _local_file(path) as file:
        yield file


def document_in(path: Location) -> bytes:
    """Content of a document, as `trajstore.strict_json.document_bytes` reads that of a file.

    Raises
    ------
    ValueError
        If it is none, or too large to be one.
    OSError
        If it cannot be read.
    """
    if isinstance(path, Path):
        return document_bytes(path)
    return path.read_bytes(LARGEST_DOCUMENT)


def size_of(path: Location) -> int:
    """Bytes of an object.

    Raises
    ------
    FileNotFoundError
        If there is none.
    """
    if isinstance(path, Path):
        return path.stat().st_size
    found = path.stat()
    if found is None:
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(path))
    return int(found["size"])
