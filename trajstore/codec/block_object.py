"""The object that stores a block, open for reading: a local file, bytes, or a key of a zarr store.

Its end is read first, as it says where the chunks are. Only a zarr store needs an event loop, for
`prefetch` and `sibling`. The others answer at once, so `at_once` runs the same code in the thread
that decodes.
"""

from __future__ import annotations

import asyncio
import errno
import os
import stat
from collections.abc import Callable, Coroutine, Sequence
from contextlib import suppress
from typing import Any, Protocol, Self, TypeVar

from zarr.abc.store import ByteRequest, RangeByteRequest, SuffixByteRequest
from zarr.storage import StorePath

_SMALL = 16 << 10  # bytes; smaller objects are read by one request instead of two
_GAP = 64 << 10  # bytes; reading a smaller gap is faster than another request

T = TypeVar("T")


class BlockObject(Protocol):
    """An open object. If it is missing, opening or reading it raises FileNotFoundError."""

    def end(self, length: int) -> bytes:
        """Last bytes; all bytes of a shorter object."""
        ...

    def read(self, offset: int, length: int) -> bytes:
        """Bytes from an offset; fewer at the end of the object."""
        ...

    async def prefetch(self, ranges: Sequence[tuple[int, int]]) -> None:
        """Prepare to read these ranges, each from a first byte to the one after the last."""
        return

    async def sibling(self, key: str, end: int) -> BlockObject:
        """Open another object of the run, of which `end` last bytes will be read."""
        ...

    async def for_each(
        self, work: Callable[[str], Coroutine[Any, Any, T]], names: Sequence[str]
    ) -> list[T]:
        """Results of a coroutine for each name, in order. If they wait, they wait together."""
        return [await work(name) for name in names]


def at_once(work: Coroutine[Any, Any, T]) -> T:
    """Result of a coroutine that waits for nothing."""
    try:
        work.send(None)
    except StopIteration as done:
        result: T = done.value
        return result
    raise RuntimeError("the coroutine waits, so it needs an event loop")


class LocalObject(BlockObject):
    """A local file. Writers never change a file; they replace it.

    Parameters
    ----------
    path : path-like

    Attributes
    ----------
    size : int
        Size in bytes.

    Raises
    ------
    FileNotFoundError
        If it does not exist.
    OSError
        If it is not a regular file, such as a pipe.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self._path = path
        self._siblings: list[LocalObject] = []
        self._descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK)  # a pipe could block
        found = os.fstat(self._descriptor)
        self.size = found.st_size
        if not stat.S_ISREG(found.st_mode):
            self.close()
            raise OSError(errno.EINVAL, "it is not a regular file", str(path))

    def end(self, length: int) -> bytes:
        """Last bytes; all bytes of a shorter file."""
        return self.read(max(self.size - length, 0), min(length, self.size))

    def read(self, offset: int, length: int) -> bytes:
        """Bytes from an offset; fewer at the end of the file."""
        left = self.size - offset  # an index may state any number
        return os.pread(self._descriptor, min(length, left), offset) if left > 0 else b""

    async def sibling(self, key: str, end: int) -> LocalObject:
        """Open another file of the run. It is closed with this one."""
        run = os.path.dirname(os.path.dirname(self._path))
        self._siblings.append(LocalObject(os.path.join(run, key)))
        return self._siblings[-1]

    def close(self) -> None:
        """Close the file, and those opened from it."""
        # Nothing was written, so an error of close does not affect the bytes that were read.
        with suppress(OSError):
            os.close(self._descriptor)
        for sibling in self._siblings:
            sibling.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


class BytesObject(BlockObject):
    """The bytes of an object, whose run is unknown."""

    def __init__(self, data: bytes) -> None:
        self._data = data

    def end(self, length: int) -> bytes:
        """Last bytes; all bytes of a shorter object."""
        return self._data[-length:]

    def read(self, offset: int, length: int) -> bytes:
        """Bytes from an offset; fewer at the end of the object."""
        return self._data[offset : offset + length]

    async def sibling(self, key: str, end: int) -> BytesObject:
        """Raise FileNotFoundError."""
        raise FileNotFoundError(errno.ENOENT, "only one object was passed", key)


class StoreObject(BlockObject):
    """An object in a zarr store, with its end and the ranges that were prefetched.

    Created by `opened`.
    """

    def __init__(self, place: Any, prototype: Any) -> None:
        self._place = place
        self._prototype = prototype
        self._pieces: list[tuple[int, bytes]] = []  # with their offsets
        self._end = b""

    @classmethod
    async def opened(cls, place: Any, prototype: Any, end: int) -> Self:
        """Read the last `end` bytes of an object, or all of a small one.

        Raises
        ------
        FileNotFoundError
            If it does not exist.
        """
        opened = cls(place, prototype)
        opened._end = await opened._get(SuffixByteRequest(end + _SMALL))
        if len(opened._end) < end + _SMALL:  # this is the whole object
            opened._pieces.append((0, opened._end))
        return opened

    def end(self, length: int) -> bytes:
        """Last bytes; all bytes of a shorter object."""
        return self._end[-length:]

    def read(self, offset: int, length: int) -> bytes:
        """Bytes of a prefetched range; fewer at the end of the object."""
        for start, data in self._pieces:
            if start <= offset < start + len(data):
                return data[offset - start : offset - start + length]
        return b""

    async def prefetch(self, ranges: Sequence[tuple[int, int]]) -> None:
        """Read these ranges, the adjacent and nearly adjacent ones together."""
        if self._pieces:
            return
        joined = _joined(ranges)
        requests = (self._get(RangeByteRequest(start, stop)) for start, stop in joined)
        parts = await asyncio.gather(*requests)
        self._pieces = [(start, data) for (start, _), data in zip(joined, parts, strict=True)]

    async def sibling(self, key: str, end: int) -> StoreObject:
        """Open another object of the run."""
        if not isinstance(self._place, StorePath):
            raise FileNotFoundError(errno.ENOENT, "the store has no paths", key)
        run = self._place.path.rpartition("/")[0].rpartition("/")[0]
        place = StorePath(self._place.store, f"{run}/{key}" if run else key)
        return await StoreObject.opened(place, self._prototype, end)

    async def for_each(
        self, work: Callable[[str], Coroutine[Any, Any, T]], names: Sequence[str]
    ) -> list[T]:
        """Results of a coroutine for each name, in order, with all requests at the same time."""
        return await asyncio.gather(*map(work, names))

    async def _get(self, request: ByteRequest) -> bytes:
        found = await self._place.get(self._prototype, byte_range=request)
        if found is None:
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(self._place))
        data: bytes = found.to_bytes()
        return data


def _joined(ranges: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    joined: list[tuple[int, int]] = []
    for start, stop in sorted(ranges):
        if joined and start <= joined[-1][1] + _GAP:
            joined[-1] = (joined[-1][0], max(joined[-1][1], stop))
        else:
            joined.append((start, stop))
    return joined
