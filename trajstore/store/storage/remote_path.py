"""Addresses of object stores, with as much of `pathlib.Path` as runs need.

Whatever reads and writes a run takes a `Location`. obstore does the work: it finds the credentials,
tries again what failed, and puts an object in place whole or not at all.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from functools import cache
from pathlib import Path
from typing import Any, Self
from urllib.parse import urlsplit

from zarr.storage import ObjectStore as ZarrObjectStore

from trajstore.errors import InvalidArgument, ObjectStoreError
from trajstore.store.storage.hub_address import hub_headers, hub_url, split_hub_address
from trajstore.store.storage.object_requests import (
    ReadStore,
    is_empty_range,
    obstore,
    readable_errors,
    retried_once,
)
from trajstore.strict_json import too_large

__all__ = [
    "REMOTE_REQUESTS",
    "Location",
    "ObjectReplaced",
    "RemotePath",
    "RunPath",
    "key_within",
    "local_file",
    "local_path",
    "location",
]

REMOTE_REQUESTS = 16
"""Requests of a kind that are under way at a time."""

_SCHEMES = ("s3", "gs", "az", "memory", "http", "https", "hf")

RETRIES: dict[str, Any] = {
    "max_retries": 1000,
    "retry_timeout": timedelta(minutes=3),
    "backoff": {
        "init_backoff": timedelta(seconds=0.1),
        "max_backoff": timedelta(seconds=10),
        "base": 2,
    },
}
"""How long obstore tries again what failed: after pauses that grow, as often as the time allows."""

_NOT_LISTED = ("http", "https", "hf")  # have no way to ask what there is


@dataclass(frozen=True)
class RemotePath:
    """One key of an object store, and all keys below it. Made by `location`.

    Attributes
    ----------
    root : str
        Address of the whole store: ``s3://bucket``.
    key : str
        Without slashes at its ends; empty for the whole store.
    """

    root: str
    key: str

    def __str__(self) -> str:
        return f"{self.root}/{self.key}"

    def __truediv__(self, name: str) -> Self:
        return type(self)(self.root, f"{self.key}/{name.strip('/')}".strip("/"))

    def absolute(self) -> Self:
        """Itself."""
        return self

    @property
    def name(self) -> str:
        """What comes after the last slash."""
        return self.key.rpartition("/")[2]

    @property
    def parent(self) -> Self:
        """What comes before it."""
        return type(self)(self.root, self.key.rpartition("/")[0])

    def with_name(self, name: str) -> Self:
        """Another one beside it."""
        return self.parent / name

    @property
    def store(self) -> Any:
        """Of the whole `root`."""
        return _store(self.root)

    @property
    def listed(self) -> bool:
        """Whether the store can say what lies below a key; a web server cannot."""
        return urlsplit(self.root).scheme not in _NOT_LISTED

    def zarr_store(self, cached: Mapping[str, bytes] | None = None) -> ZarrObjectStore[Any]:
        """What zarr reads from; the run is the group `key` of it.

        Parameters
        ----------
        cached : mapping of str to bytes, optional
            By their keys in the whole store, what has just been read: it is not asked for again,
            once.
        """
        return ReadStore(self.store, root=self.root, cached=cached)

    def exists(self) -> bool:
        """Whether there is such an object, or one below."""
        return self.stat() is not None or (self.listed and self.is_dir())

    def is_dir(self) -> bool:
        """Whether there are objects below."""
        return next(self._below(), None) is not None

    def stat(self) -> Mapping[str, Any] | None:
        """``size``, ``last_modified`` and ``e_tag`` of the object; None if there is none."""
        with readable_errors(self):
            try:
                return dict(obstore().head(self.store, self.key))
            except FileNotFoundError:
                return None

    def read_bytes(self, most: int | None = None) -> bytes:
        """The whole object.

        Parameters
        ----------
        most : int, optional
            Bytes that it may have.

        Raises
        ------
        FileNotFoundError
            If there is none.
        ValueError
            If it has more bytes than it may have; they are not read.
        """

        def read() -> bytes:
            found = obstore().get(self.store, self.key)
            size = found.meta["size"]
            if most is not None and size > most:
                raise ValueError(too_large(size))
            return bytes(found.bytes())

        with readable_errors(self):
            return retried_once(read)

    def read_end(self, length: int) -> bytes:
        """Last bytes of the object; otherwise as `end_and_facts`."""
        return self.end_and_facts(length)[0]

    def end_and_facts(self, length: int) -> tuple[bytes, Mapping[str, Any]]:
        """Last bytes of the object, and what `stat` returns of it.

        Raises
        ------
        FileNotFoundError
            If there is none.
        ObjectReplaced
            If it is replaced again and again.
        """

        def read() -> tuple[bytes, Mapping[str, Any]]:
            found = obstore().get(self.store, self.key, options={"range": {"suffix": length}})
            return bytes(found.bytes()), dict(found.meta)

        with readable_errors(self):
            try:
                return retried_once(read)
            except FileNotFoundError:
                raise
            except obstore().exceptions.NotSupportedError:  # Azure knows no suffix
                pass
            except obstore().exceptions.GenericError as error:
                facts = dict(obstore().head(self.store, self.key)) if is_empty_range(error) else {}
                if facts.get("size") != 0:
                    raise
                return b"", facts
        try:
            return self._end_by_range(length)
        except ObjectReplaced:  # between the two requests
            return self._end_by_range(length)

    def _end_by_range(self, length: int) -> tuple[bytes, Mapping[str, Any]]:
        with readable_errors(self):
            facts = dict(obstore().head(self.store, self.key))
        if facts["size"] == 0:
            return b"", facts
        start = max(facts["size"] - length, 0)
        return self.read_range(start, facts["size"], facts["e_tag"]), facts

    def read_range(self, start: int, stop: int, tag: str | None) -> bytes:
        """Bytes of the object, if it is still the one of that ``e_tag``.

        Raises
        ------
        ObjectReplaced
            If it is another one by now, or has fewer bytes.
        FileNotFoundError
            If there is none.
        """
        options: dict[str, Any] = {"range": (start, stop)}
        if tag is not None and not tag.startswith("W/"):  # one of those never fits a condition
            options["if_match"] = tag

        def read() -> bytes:
            return bytes(obstore().get(self.store, self.key, options=options).bytes())

        with readable_errors(self):
            try:
                data = retried_once(read)
            except obstore().exceptions.PreconditionError as error:
                raise ObjectReplaced(f"{self} has been replaced while it was read") from error
        if len(data) < stop - start:
            raise ObjectReplaced(f"{self} has become shorter while it was read")
        return data

    def write_bytes(self, data: bytes, *, instead_of: str | None = None, new: bool = False) -> str:
        """Put the object in place, in one step.

        Parameters
        ----------
        data : bytes
        instead_of : str, optional
            Only if the object that is there has that ``e_tag``.
        new : bool
            Only if there is none.

        Returns
        -------
        str
            Its ``e_tag``.

        Raises
        ------
        FileExistsError
            If there is one, or another one, than was said.
        """
        mode: Any = "create" if new else "overwrite"
        if instead_of is not None:
            mode = {"e_tag": instead_of}
        refused = obstore().exceptions.AlreadyExistsError, obstore().exceptions.PreconditionError
        with readable_errors(self):
            try:
                put = obstore().put(self.store, self.key, data, mode=mode, use_multipart=False)
            except refused as error:
                return self._tag_of(data, error)
        return str(put["e_tag"])

    def _tag_of(self, data: bytes, refused: Exception) -> str:
        """Of our own object, if the answer to a request that was carried out has been lost."""
        found = self.stat()
        if found is None or found["size"] != len(data) or self.read_bytes() != data:
            raise FileExistsError(f"{self} is there") from refused
        return str(found["e_tag"])

    def unlink(self, *, missing_ok: bool = True) -> None:
        """Remove the object. Whether there was one, an object store does not say."""
        with readable_errors(self), suppress(FileNotFoundError):
            obstore().delete(self.store, self.key)

    def below(self) -> dict[RemotePath, int]:
        """All objects below, and their bytes."""
        return {type(self)(self.root, item["path"]): item["size"] for item in self._below()}

    def tags(self) -> dict[RemotePath, str]:
        """All objects below, and the ``e_tag`` of each."""
        return {type(self)(self.root, item["path"]): item["e_tag"] for item in self._below()}

    def iterdir(self) -> Iterator[RemotePath]:
        """Objects and folders right below."""
        for name in sorted({path.key[len(self.key) :].split("/")[1] for path in self.below()}):
            yield self / name

    def remove_below(self) -> None:
        """Remove all objects below."""
        keys = [path.key for path in self.below()]
        if keys:
            with readable_errors(self):
                obstore().delete(self.store, keys)

    def _below(self) -> Iterator[Any]:
        if not self.listed:
            raise ObjectStoreError(f"{self}: a web server does not say what there is")
        with readable_errors(self):
            for batch in obstore().list(self.store, f"{self.key}/"):
                yield from batch


class ObjectReplaced(ObjectStoreError):
    """An object is another one than that of which a part was read; read it from the start."""


Location = Path | RemotePath
"""Where a run lies, or one of its objects."""

RunPath = str | os.PathLike[str] | RemotePath
"""How somebody says where: as a path, or an address."""


def location(path: RunPath) -> Location:
    """Where something lies.

    Parameters
    ----------
    path : path-like, str or RemotePath
        A local path, or ``s3://bucket/key``, ``gs://…``, ``az://container/key``, ``memory://…``
        (of this process), ``https://…``, ``hf://datasets/USER/NAME/key``. Credentials come from the
        environment.

    Raises
    ------
    InvalidArgument
        If it is an address of another kind, or of no key.
    MissingExtra
        If obstore is not installed.
    """
    if isinstance(path, RemotePath):
        return path
    text = os.fspath(path)
    if "://" not in text:
        return Path(text)
    try:
        parts = urlsplit(text)
    except ValueError as error:  # of brackets, as those of a pattern that the shell did not expand
        raise InvalidArgument(f"{text} is no address: {error}") from error
    if parts.scheme not in _SCHEMES:
        known = ", ".join(f"{scheme}://" for scheme in _SCHEMES)
        raise InvalidArgument(f"{text} is an address of an unknown kind; known are {known}")
    if parts.query or parts.fragment or ("@" in parts.netloc and parts.scheme != "hf"):
        raise InvalidArgument(
            f"{text}: an address is SCHEME://BUCKET/KEY, and credentials come from the environment"
        )
    if parts.scheme == "hf":
        root, key = split_hub_address(text)
        obstore()
        return RemotePath(root, key)
    root, key = f"{parts.scheme}://{parts.netloc}", parts.path.strip("/")
    if not parts.netloc or not key:
        raise InvalidArgument(f"{text} names no run; expected SCHEME://BUCKET/KEY")
    obstore()
    return RemotePath(root, key)


def local_path(path: str | os.PathLike[str]) -> Path:
    """A path of something that is no run.

    Raises
    ------
    InvalidArgument
        If it is an address.
    """
    text = os.fspath(path)
    if "://" in text:
        raise InvalidArgument(
            f"cannot use {text}: runs can be at addresses, other files are read and written in "
            "local folders; name one, and copy the file"
        )
    return Path(path)


def key_within(path: Location, folder: Location) -> str:
    """Where something lies, as it is seen from a folder above it: ``W/c.0.0.0``."""
    if isinstance(path, RemotePath) and isinstance(folder, RemotePath):
        return path.key.removeprefix(f"{folder.key}/" if folder.key else "")
    return os.path.relpath(str(path), str(folder))


@contextmanager
def local_file(path: Location) -> Iterator[Path]:
    """An object as a local file, if need be a copy, for as long as the block lasts.

    Raises
    ------
    FileNotFoundError
        If there is none.
    """
    if isinstance(path, Path):
        yield path
        return
    with tempfile.TemporaryDirectory(prefix="trajstore-") as folder:
        file = Path(folder) / path.name
        with file.open("wb") as copy, readable_errors(path):
            for piece in obstore().get(path.store, path.key):
                copy.write(piece)
        yield file


@cache
def _store(root: str) -> Any:
    """One for each address: it keeps connections, and in ``memory://`` the objects themselves."""
    obstore()
    from obstore.store import HTTPStore, MemoryStore, from_url

    scheme = urlsplit(root).scheme
    if scheme == "memory":
        return MemoryStore()
    # An address without TLS is somebody's choice: that of a server of their own.
    options: dict[str, Any] = {"allow_http": True}
    make: Any = HTTPStore.from_url if scheme in _NOT_LISTED else from_url
    if scheme == "hf":
        root, options["default_headers"] = hub_url(root), hub_headers()
    return make(root, client_options=options, retry_config=RETRIES)
