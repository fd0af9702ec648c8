"""Requests to obstore: one-line errors, one retry, and a store for zarr."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from types import ModuleType
from typing import Any, TypeVar, cast

from zarr.abc.buffer import Buffer
from zarr.abc.store import ByteRequest, SuffixByteRequest
from zarr.storage import ObjectStore as ZarrObjectStore

from trajstore.errors import ObjectStoreError, needs_extra

_EMPTY_RANGE = ("Range Not Satisfiable", "Invalid range", "non-partial")
"""Errors of stores for the last bytes of an empty object."""

_ENDED_EARLY = ("response body error", "precondition failure")
"""Errors of obstore for an incomplete answer that it cannot continue."""

T = TypeVar("T")


class ReadStore(ZarrObjectStore[Any]):
    """zarr's object store, with the address in its errors, and with short objects.

    If a store supports no ranges from the end, such as Azure, zarr 3.1 requests a range that begins
    before the object. This class limits it to the object.

    Parameters
    ----------
    store : object
        Store of obstore. A run is the group of its key.
    read_only : bool
    root : str
        Address of the store, for errors.
    cached : mapping of str to bytes, optional
        Objects that were just read, by their keys. The first request for each is answered from
        here.
    """

    def __init__(
        self,
        store: Any,
        *,
        read_only: bool = True,
        root: str = "",
        cached: Mapping[str, bytes] | None = None,
    ) -> None:
        super().__init__(store, read_only=read_only)
        self._root = root
        self._cached = dict(cached or {})

    async def get(
        self, key: str, prototype: Any, byte_range: ByteRequest | None = None
    ) -> Buffer | None:
        """Part of an object, or None if there is no object."""
        known = self._cached.pop(key, None) if byte_range is None else None
        if known is not None:
            return cast(Buffer, prototype.buffer.from_bytes(known))
        with readable_errors(f"{self._root}/{key}"):
            try:
                return await self._get(key, prototype, byte_range)
            except obstore().exceptions.GenericError as error:
                if not _has_ended_early(error):
                    raise
                return await self._get(key, prototype, byte_range)

    async def _get(self, key: str, prototype: Any, byte_range: ByteRequest | None) -> Buffer | None:
        if not isinstance(byte_range, SuffixByteRequest):
            return await super().get(key, prototype, byte_range)
        try:
            data = await self._end(key, byte_range.suffix)
        except FileNotFoundError:
            return None
        return cast(Buffer, prototype.buffer.from_bytes(data))

    async def _end(self, key: str, length: int) -> Any:
        """Last bytes of an object; all bytes if it is shorter."""
        package = obstore()
        try:
            found = await package.get_async(self.store, key, options={"range": {"suffix": length}})
            return await found.bytes_async()
        except package.exceptions.NotSupportedError:
            size = (await package.head_async(self.store, key))["size"]
            start = max(size - length, 0)
            if start == size:
                return b""
            return await package.get_range_async(self.store, key, start=start, end=size)


@contextmanager
def readable_errors(address: object) -> Iterator[None]:
    """Convert errors of the object store to one-line errors of trajstore."""
    try:
        yield
    except (FileNotFoundError, ObjectStoreError):
        raise
    except obstore().exceptions.BaseError as error:
        remedy = ""
        if isinstance(error, obstore().exceptions.NotSupportedError):
            remedy = "; runs are read in parts: copy it, or use a server that supports ranges"
        raise ObjectStoreError(f"{address}: {_error_line(error)}{remedy}") from error


def retried_once(read: Callable[[], T]) -> T:
    """Call `read`, and once more if the object was replaced meanwhile."""
    try:
        return read()
    except obstore().exceptions.GenericError as error:
        if not _has_ended_early(error):
            raise
    return read()


def is_empty_range(error: Exception) -> bool:
    """True if the error may result from reading the end of an empty object."""
    return any(words in _error_line(error) for words in _EMPTY_RANGE)


def _has_ended_early(error: Exception) -> bool:
    return any(words in _error_line(error) for words in _ENDED_EARLY)


def _error_line(error: Exception) -> str:
    """Message of obstore in one line, without its debugging information."""
    return " ".join(str(error).split("\n\nDebug source")[0].split())


def obstore() -> ModuleType:
    """Import the package obstore.

    Raises
    ------
    MissingExtra
        If it is not installed.
    """
    with needs_extra("an address", "s3"):
        import obstore as package
    return package
