"""An open object of a run, read in parts, from a file or an object store."""

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

_WINDOW = 4 << 20  # bytes of one request, for sequential reads


class ObjectFile(Protocol):
    """An open object. If it is replaced meanwhile, reads may return the old or the new bytes."""

    def end(self, length: int) -> bytes:
        """Read the last bytes."""

    def read(self, offset: int, length: int) -> bytes:
        """Read bytes from an offset; fewer at the end of the object."""


class _LocalFile:
    """A local file. Writers never change a file; they replace it."""

    def __init__(self, descriptor: int, size: int) -> None:
        self.size = size
        self._descriptor = descriptor

    def end(self, length: int) -> bytes:
        return self.read(max(self.size - length, 0), min(length, self.size))

    def read(self, offset: int, length: int) -> bytes:
        return os.pread(self._descriptor, length, offset)


@contextmanager
def _local_file(path: Path) -> Iterator[_LocalFile]:
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK)  # opening a pipe could block
    try:
        found = os.fstat(descriptor)
        if not stat.S_ISREG(found.st_mode):
            raise OSError(errno.EINVAL, "it is not a regular file", str(path))
        yield _LocalFile(descriptor, found.st_size)
    finally:
        # Nothing was written, so an error of close does not affect the bytes that were read.
        with suppress(OSError):
            os.close(descriptor)


class _RemoteFile:
    """A remote object. Readers of more than its end need most of it, so one request reads all."""

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
    """Open an object within a ``with`` block.

    Raises
    ------
    FileNotFoundError
        If the object does not exist. For a remote object, the first read raises it.
    OSError
        If it is not a regular file.
    """
    if isinstance(path, RemotePath):
        yield _RemoteFile(path)
        return
    with _local_file(path) as file:
        yield file


class HeldObject(Protocol):
    """An object with the content it had when it was opened, even if it is replaced.

    Attributes
    ----------
    size : int
        Size in bytes.
    """

    size: int

    def read(self, offset: int, length: int) -> bytes:
        """Read bytes from an offset; fewer at the end of the object."""


class _HeldRemote:
    """A remote object for one thread. It keeps the last part that was read."""

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
    """Open an object within a ``with`` block, for consistent reads of its parts.

    A few MiB of a remote object are kept in memory.

    Raises
    ------
    FileNotFoundError
        If the object does not exist.
    OSError
        If it is not a regular file, such as a pipe.
    ObjectReplaced
        During a read, if the remote object was replaced.
    """
    if isinstance(path, RemotePath):
        yield _HeldRemote(path)
        return
    with _local_file(path) as file:
        yield file


def document_in(path: Location) -> bytes:
    """Content of a document; for a file, see `trajstore.strict_json.document_bytes`.

    Raises
    ------
    ValueError
        If it is not a document, or too large.
    OSError
        If it cannot be read.
    """
    if isinstance(path, Path):
        return document_bytes(path)
    return path.read_bytes(LARGEST_DOCUMENT)


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
