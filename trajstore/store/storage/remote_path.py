"""Addresses of object stores, with the part of the interface of `pathlib.Path` that runs need.

All code that reads or writes a run takes a `Location`. obstore finds the credentials, retries
failed requests, and replaces objects atomically. A request that fails raises an error of one line.

A file of the Hugging Face hub, ``hf://datasets/…``, is at
``https://huggingface.co/REPOSITORY/resolve/REVISION/FILE``, and is read like a file of any web
server.

Source: the documentation of huggingface_hub, *HfFileSystem* and *Environment variables*.
"""

from __future__ import annotations

import os
import re
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any, Self, TypeVar, cast
from urllib.parse import quote, unquote, urlsplit

from zarr.abc.buffer import Buffer
from zarr.abc.store import ByteRequest, SuffixByteRequest
from zarr.storage import ObjectStore as ZarrObjectStore

from trajstore.errors import InvalidArgument, ObjectStoreError, needs_extra
from trajstore.strict_json import too_large

_HUB = "https://huggingface.co"
_KINDS = ("datasets", "spaces")  # all other repositories hold models
_BRANCH = "main"


def split_hub_address(address: str) -> tuple[str, str]:
    """Repository, with its revision if given, and the path in it.

    Parameters
    ----------
    address : str
        ``hf://datasets/USER/NAME/run.zarr``, ``hf://USER/NAME@REVISION/run.zarr``.

    Raises
    ------
    InvalidArgument
        If it contains no path in a repository.

    Examples
    --------
    >>> split_hub_address("hf://datasets/user/name@v1/runs/run.zarr")
    ('hf://datasets/user/name@v1', 'runs/run.zarr')
    """
    parts = address.removeprefix("hf://").strip("/").split("/")
    length = 3 if parts[0] in _KINDS else 2
    repository, path = parts[:length], parts[length:]
    if not path or not all(repository) or not all(path):
        raise InvalidArgument(
            f"{address} names no run; expected hf://datasets/USER/NAME/RUN.zarr, or "
            "hf://USER/NAME/RUN.zarr for the repository of a model"
        )
    return f"hf://{'/'.join(repository)}", "/".join(path)


def hub_endpoint() -> str:
    """Address of the hub, or that of ``HF_ENDPOINT`` if it is set."""
    return (os.environ.get("HF_ENDPOINT") or _HUB).rstrip("/")


def hub_url(repository: str) -> str:
    """URL of the files of a repository.

    Parameters
    ----------
    repository : str
        Result of `split_hub_address`.
    """
    name, _, revision = repository.removeprefix("hf://").partition("@")
    written = quote(unquote(revision) or _BRANCH, safe="")  # the name of a branch may have slashes
    return f"{hub_endpoint()}/{quote(name)}/resolve/{written}"


def hub_headers() -> dict[str, str]:
    """Headers with the token in ``HF_TOKEN``, if it is set."""
    token = os.environ.get("HF_TOKEN", "").strip()
    return {"authorization": f"Bearer {token}"} if token else {}


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
            part = await package.get_async(self.store, key, options={"range": {"suffix": length}})
            return await part.bytes_async()
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


REMOTE_REQUESTS = 16
"""Number of simultaneous requests of a kind."""

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
"""obstore retries a failed request after growing pauses, as often as the time allows."""

_NOT_LISTED = ("http", "https", "hf")  # cannot list objects


@dataclass(frozen=True)
class RemotePath:
    """One key of an object store, and all keys below it. Created by `location`.

    Attributes
    ----------
    root : str
        Address of the whole store: ``s3://bucket``.
    key : str
        Key without slashes at its ends; empty for the whole store.
    """

    root: str
    key: str

    def __str__(self) -> str:
        return f"{self.root}/{self.key}"

    def __truediv__(self, name: str) -> Self:
        return type(self)(self.root, f"{self.key}/{name.strip('/')}".strip("/"))

    def absolute(self) -> Self:
        """Return this path, as every address is absolute."""
        return self

    @property
    def name(self) -> str:
        """Part of the key after the last slash."""
        return self.key.rpartition("/")[2]

    @property
    def parent(self) -> Self:
        """Address before the last slash."""
        return type(self)(self.root, self.key.rpartition("/")[0])

    def with_name(self, name: str) -> Self:
        """Address with another name in the same parent."""
        return self.parent / name

    @property
    def store(self) -> Any:
        """Store of the whole `root`."""
        return _store(self.root)

    @property
    def listed(self) -> bool:
        """True if the store can list the keys below a key. A web server cannot."""
        return urlsplit(self.root).scheme not in _NOT_LISTED

    def exists(self) -> bool:
        """True if there is an object with this key, or one below it."""
        return self.stat() is not None or (self.listed and self.is_dir())

    def is_dir(self) -> bool:
        """True if there are objects below this key."""
        return next(self._below(), None) is not None

    def stat(self) -> Mapping[str, Any] | None:
        """``size``, ``last_modified`` and ``e_tag`` of the object; None if it does not exist."""
        with readable_errors(self):
            try:
                return dict(obstore().head(self.store, self.key))
            except FileNotFoundError:
                return None

    def read_bytes(self, most: int | None = None) -> bytes:
        """Read the whole object.

        Parameters
        ----------
        most : int, optional
            Largest allowed size in bytes.

        Raises
        ------
        FileNotFoundError
            If the object does not exist.
        ValueError
            If it is larger than allowed. It is not read.
        """

        def read() -> bytes:
            response = obstore().get(self.store, self.key)
            size = response.meta["size"]
            if most is not None and size > most:
                raise ValueError(too_large(size))
            return bytes(response.bytes())

        with readable_errors(self):
            return retried_once(read)

    def end_and_facts(self, length: int) -> tuple[bytes, Mapping[str, Any]]:
        """Read the last bytes of the object, and return them with the facts of `stat`.

        Raises
        ------
        FileNotFoundError
            If the object does not exist.
        ObjectReplaced
            If it was replaced during both attempts.
        """

        def read() -> tuple[bytes, Mapping[str, Any]]:
            response = obstore().get(self.store, self.key, options={"range": {"suffix": length}})
            return bytes(response.bytes()), dict(response.meta)

        with readable_errors(self):
            try:
                return retried_once(read)
            except FileNotFoundError:
                raise
            except obstore().exceptions.NotSupportedError:  # Azure has no suffix ranges
                pass
            except obstore().exceptions.GenericError as error:
                if not is_empty_range(error):
                    raise
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
        """Read bytes of the object, if it still has that ``e_tag``.

        Raises
        ------
        ObjectReplaced
            If the object was replaced, or is shorter.
        FileNotFoundError
            If the object does not exist.
        """
        options: dict[str, Any] = {"range": (start, stop)}
        if tag is not None and not tag.startswith("W/"):  # a weak tag never matches a condition
            options["if_match"] = tag

        def read() -> bytes:
            return bytes(obstore().get(self.store, self.key, options=options).bytes())

        with readable_errors(self):
            try:
                data = retried_once(read)
            except obstore().exceptions.PreconditionError as error:
                raise ObjectReplaced(f"{self} was replaced while it was read; try again") from error
        if len(data) < stop - start:
            raise ObjectReplaced(f"{self} became shorter while it was read; try again")
        return data

    def write_bytes(self, data: bytes, *, instead_of: str | None = None, new: bool = False) -> str:
        """Write the object atomically.

        Parameters
        ----------
        data : bytes
        instead_of : str, optional
            Write only if the existing object has that ``e_tag``.
        new : bool
            Write only if the object does not exist.

        Returns
        -------
        str
            The ``e_tag`` of the written object.

        Raises
        ------
        FileExistsError
            If the condition is not met.
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
        """Tag of the object, if this request wrote it and only the answer was lost."""
        facts = self.stat()
        if facts is None or facts["size"] != len(data) or self.read_bytes() != data:
            raise FileExistsError(f"{self} already exists") from refused
        return str(facts["e_tag"])

    def unlink(self, *, missing_ok: bool = True) -> None:
        """Remove the object. It may be missing, which object stores do not report."""
        with readable_errors(self), suppress(FileNotFoundError):
            obstore().delete(self.store, self.key)

    def below(self) -> dict[RemotePath, int]:
        """All objects below this key, with their sizes in bytes."""
        return {type(self)(self.root, item["path"]): item["size"] for item in self._below()}

    def tags(self) -> dict[RemotePath, str]:
        """All objects below this key, with their ``e_tag``."""
        return {type(self)(self.root, item["path"]): item["e_tag"] for item in self._below()}

    def iterdir(self) -> Iterator[RemotePath]:
        """Objects and folders directly below this key."""
        for name in sorted({path.key[len(self.key) :].split("/")[1] for path in self.below()}):
            yield self / name

    def remove_below(self) -> None:
        """Remove all objects below this key."""
        keys = [path.key for path in self.below()]
        if keys:
            with readable_errors(self):
                obstore().delete(self.store, keys)

    def _below(self) -> Iterator[Any]:
        if not self.listed:
            raise ObjectStoreError(f"{self}: a web server cannot list objects; copy the run first")
        with readable_errors(self):
            for batch in obstore().list(self.store, f"{self.key}/"):
                yield from batch


class ObjectReplaced(ObjectStoreError):
    """An object was replaced between the reads of two of its parts. Read it from the start."""


Location = Path | RemotePath
"""Place of a run, or of one of its objects."""

RunPath = str | os.PathLike[str] | RemotePath
"""Argument for a place: a path or an address."""


def location(path: RunPath) -> Location:
    """Parse a path or an address.

    Parameters
    ----------
    path : path-like, str or RemotePath
        A local path, in which ``~`` is the home, or ``s3://bucket/key``, ``gs://…``,
        ``az://container/key``, ``memory://…`` (of this process), ``https://…``,
        ``hf://datasets/USER/NAME/key``. Credentials come from the environment.

    Raises
    ------
    InvalidArgument
        If the kind of address is unknown, or the address has no key.
    MissingExtra
        If obstore is not installed.
    """
    if isinstance(path, RemotePath):
        return path
    text = os.fspath(path)
    if "://" not in text:
        return Path(os.path.expanduser(text))
    try:
        parts = urlsplit(text)
    except ValueError as error:  # brackets, as in a pattern that the shell did not expand
        raise InvalidArgument(f"{text} is not an address: {error}") from error
    if parts.scheme not in _SCHEMES:
        known = ", ".join(f"{scheme}://" for scheme in _SCHEMES)
        raise InvalidArgument(f"{text} has an unknown kind of address, expected one of {known}")
    if parts.query or parts.fragment or ("@" in parts.netloc and parts.scheme != "hf"):
        raise InvalidArgument(
            f"{text} is not a supported address, expected SCHEME://BUCKET/KEY; credentials come "
            "from the environment"
        )
    root, key = f"{parts.scheme}://{parts.netloc}", parts.path.strip("/")
    if parts.scheme == "hf":
        root, key = split_hub_address(text)
    elif not parts.netloc or not key:
        raise InvalidArgument(f"{text} names no run; expected SCHEME://BUCKET/KEY")
    obstore()
    return RemotePath(root, key)


def local_path(path: str | os.PathLike[str]) -> Path:
    """Local path of a file or folder that is not a run.

    Raises
    ------
    InvalidArgument
        If it is an address.
    """
    text = os.fspath(path)
    if "://" in text:
        raise InvalidArgument(
            f"cannot use {text}: only runs can be at addresses; pass a local path, and copy the "
            "file yourself"
        )
    return Path(path)


def key_within(path: Location, folder: Location) -> str:
    """Path relative to a folder above it: ``W/c.0.0.0``."""
    if isinstance(path, RemotePath) and isinstance(folder, RemotePath):
        return path.key.removeprefix(f"{folder.key}/" if folder.key else "")
    return os.path.relpath(str(path), str(folder))


@contextmanager
def local_file(path: Location) -> Iterator[Path]:
    """An object as a local file within a ``with`` block; a temporary copy if it is remote.

    Raises
    ------
    FileNotFoundError
        If the object does not exist.
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
    """Store of a root, cached: it keeps connections, and in ``memory://`` the objects."""
    obstore()
    from obstore.store import HTTPStore, MemoryStore, from_url

    scheme = urlsplit(root).scheme
    if scheme == "memory":
        return MemoryStore()
    # Users choose addresses without TLS for their own servers.
    options: dict[str, Any] = {"allow_http": True}
    make: Any = HTTPStore.from_url if scheme in _NOT_LISTED else from_url
    if scheme == "hf":
        root, options["default_headers"] = hub_url(root), hub_headers()
    return make(root, client_options=options, retry_config=RETRIES)


Place = TypeVar("Place", bound=Location)

METADATA_KEY = "zarr.json"
"""Key of the metadata of a group or an array."""

CHECKPOINT = re.compile(r"step-(\d{8,})\.safetensors")
"""File name of a checkpoint; the group is its step."""


def chunk_key(name: str, block: int, ndim: int, part: int = 0) -> str:
    """Key of the shard of a block, or of one part of its tokens: ``W/c.3.0.0``."""
    return f"{name}/" + ".".join(["c", str(block), str(part), *["0"] * (ndim - 2)][: ndim + 1])


def block_of(leaf: str, ndim: int) -> tuple[int, int] | None:
    """Block and part of a shard, from its file name; None if it is not the name of a shard."""
    numbers = leaf.split(".")[1:3] if leaf.count(".") == ndim else []
    if not numbers or not all(number.isdecimal() for number in numbers):
        return None
    block, part = int(numbers[0]), int(numbers[1]) if ndim > 1 else 0
    return (block, part) if leaf == chunk_key("", block, ndim, part)[1:] else None


def checkpoint_folder(run: Place) -> Place:
    """Folder of a run's checkpoints: ``NAME.ckpt``, next to the run."""
    return cast(Place, run.with_name(f"{run.name.removesuffix('.zarr')}.ckpt"))
