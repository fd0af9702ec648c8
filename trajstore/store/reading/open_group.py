"""The Zarr group of a run: its metadata, checked, then opened; a zip file is unpacked first.

A root is compared with the schema and with the stored objects before zarr reads it. So damage is
named, and no declared shape makes a reader allocate memory without limit.
"""

from __future__ import annotations

import glob
import json
import lzma
import math
import shlex
import shutil
import tempfile
import zipfile
import zlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import zarr
from zarr.storage import ZipStore

from trajstore.errors import (
    FormatError,
    ObjectStoreError,
    RunNotFound,
    TrajstoreError,
    did_you_mean,
)
from trajstore.schema import STEP, belongs, coordinate, variables_of
from trajstore.store.metadata.metadata_form import (
    REQUIRED,
    Fault,
    attribute_faults,
    other_format,
    root_faults,
)
from trajstore.store.metadata.zarr_json import (
    ArrayFacts,
    array_faults,
    checked_arrays,
    facts_of,
    open_metadata,
)
from trajstore.store.storage.atomic import metadata_in
from trajstore.store.storage.remote_path import (
    METADATA_KEY,
    REMOTE_REQUESTS,
    Location,
    ReadStore,
    RemotePath,
    RunPath,
    chunk_key,
    key_within,
    location,
)
from trajstore.strict_json import LARGEST_METADATA, parse, too_large
from trajstore.threads import in_parallel
from trajstore.units import format_bytes

_SHOWN = 5  # runs in a message


def open_group(path: RunPath, *, zipped: bool = False) -> zarr.Group:
    """Open the root group of a run, read-only, at its last commit, and check its metadata.

    The root is checked before zarr reads it, with its copies of the arrays' metadata. The
    arrays' own metadata are read only if it has no copies, or by writers
    (`check_own_metadata`). The declared shapes are compared with the stored objects.

    Parameters
    ----------
    path : path-like, str or RemotePath
    zipped : bool
        True if it may be a zip file with the content of a run, whose values zarr reads.

    Raises
    ------
    RunNotFound
        If `path` does not exist.
    FormatError
        If it is not a run, or has another format; if a metadata file has an impossible member, or
        declares rows that are not stored; if the metadata of an array differs from the schema
        (`trajstore.store.metadata.zarr_json`).
    InvalidArgument, MissingExtra
        If `path` is an unsupported address (`location`).
    """
    place = _existing(path)
    in_zip = zipped and isinstance(place, Path) and place.suffix == ".zip" and place.is_file()
    metadata = _zipped_root(place) if in_zip else root_metadata(place)
    return _zarr_group(place, metadata, checked_root(place, metadata))


def root_attributes(path: RunPath) -> dict[str, Any]:
    """Attributes of a run at its last commit, checked, without opening its arrays.

    Raises
    ------
    RunNotFound, FormatError, InvalidArgument, MissingExtra
        As `open_group`.
    """
    place = _existing(path)
    root = _parsed(place, METADATA_KEY, root_metadata(place))
    _check_root(place, root)
    attributes: dict[str, Any] = root["attributes"]
    return attributes


def _existing(path: RunPath) -> Location:
    place = location(path)
    if isinstance(place, Path) and not place.exists():
        raise RunNotFound(f"there is no run at {path}{similar_runs(place)}")
    return place


def whole(path: RunPath, group: zarr.Group, name: str) -> npt.NDArray[Any]:
    """All values of an array of a run, such as a coordinate.

    Raises
    ------
    FormatError
        If they cannot be decoded.
    """
    array: Any = group[name]
    with named_errors(path, f"the values of {name}: "):
        return np.asarray(array[...])


@contextmanager
def named_errors(path: RunPath, what: str = "") -> Iterator[None]:
    """Name a run, and what is read of it, in the errors of a ``with`` block.

    Raises
    ------
    FormatError
        Instead of the many types that xarray, zarr and codecs raise for damaged data.
    """
    try:
        yield
    except (TrajstoreError, OSError, MemoryError):
        raise
    except Exception as error:
        raise FormatError(
            f"{path} cannot be read: {what}{error}{remedy(location(path))}"
        ) from error


RUN = "trajstore_format"
"""Attribute of the root of each run."""


def is_run(path: Location, mark: str = RUN) -> bool:
    """True if there is a run, which may be damaged, or a group with another mark."""
    try:
        metadata = json.loads((path / METADATA_KEY).read_bytes())
        return mark in metadata["attributes"]
    except (OSError, ValueError, KeyError, TypeError):
        return False


def ends(array: Any) -> tuple[int, int]:
    """First and last value of a one-dimensional array that is not empty.

    Only these two are read, whatever length the array declares.
    """
    rows = array.shape[0]
    reads = [partial(_value, array, row) for row in (0, rows - 1)]
    first, last = in_parallel(reads, 2)
    return first, last


def _value(array: Any, row: int) -> int:
    return int(array[row : row + 1][0])


def similar_runs(path: Path) -> str:
    """End of a message about a missing run: runs with a similar name, or an empty text.

    These are the runs of several parameters with this name, or one whose name is nearly the same,
    or else those in the folder.

    Parameters
    ----------
    path : Path
        Path of the missing run.
    """
    stem = glob.escape(path.name.removesuffix(".zarr"))
    parameters = sorted(str(run) for run in path.parent.glob(f"{stem}.*.zarr"))
    if parameters:
        return f"; similar names: {', '.join(parameters[:9])}"
    try:
        entries = sorted(path.parent.iterdir())
    except OSError:
        return ""
    runs = [entry for entry in entries if (entry / METADATA_KEY).exists()]
    # Names are compared without their common ending.
    near = [run.name for run in runs if did_you_mean(path.stem, [run.stem])]
    if near or not runs:
        return did_you_mean(path.name, near)
    shown = ", ".join(run.name for run in runs[:_SHOWN]) + (" …" if len(runs) > _SHOWN else "")
    return f"; runs in {path.parent.absolute()}: {shown}"


def _zipped_root(path: Location) -> bytes:
    """Bytes of the metadata of the root in a zip file."""
    try:
        with zipfile.ZipFile(str(path)) as file:
            size = file.getinfo(METADATA_KEY).file_size
            if size > LARGEST_METADATA:
                raise FormatError(f"{path} is not a run: {METADATA_KEY}: {too_large(size)}")
            return file.read(METADATA_KEY)
    except (zipfile.BadZipFile, KeyError) as error:
        raise no_zipped_run(path) from error


def no_zipped_run(path: Location) -> FormatError:
    """Error about a zip file that holds no run."""
    return FormatError(
        f"{path} is not a zip file, or has no {METADATA_KEY} at its top; pack a run from inside "
        f"its folder: zip -0r ../{path.name} ."
    )


def _zarr_group(place: Location, metadata: bytes, arrays: Mapping[str, Any]) -> zarr.Group:
    """Open the group and its arrays."""
    try:
        if isinstance(place, RemotePath):
            cached = {(place / METADATA_KEY).key: metadata}
            store = ReadStore(place.store, root=place.root, cached=cached)
            group = zarr.open_group(store, path=place.key, mode="r", zarr_format=3)
        else:
            stored = ZipStore(place, mode="r") if place.is_file() else str(place)
            group = zarr.open_group(stored, mode="r", zarr_format=3)
        dict(group.arrays())  # opens each
        return group
    except ObjectStoreError:
        raise
    except Exception as error:  # zarr raises many types for a damaged metadata file
        if isinstance(place, Path) and not place.exists():  # it was removed a moment ago
            raise RunNotFound(f"there is no run at {place}") from error
        raise not_opened(place, arrays, error) from error


# An encrypted member is a RuntimeError, of which an unknown compression is a kind.
_DAMAGED = (zipfile.BadZipFile, zlib.error, lzma.LZMAError, EOFError, RuntimeError)


@contextmanager
def unzipped(path: RunPath) -> Iterator[Location]:
    """Place of a run; of a zip file, a temporary folder of the same name with its content.

    The checksums of the zip file are not compared: those of the run name the damaged block.

    Raises
    ------
    FormatError
        If it is no zip file, or its content cannot be unpacked, or does not fit.
    """
    place = location(path)
    if not (isinstance(place, Path) and place.suffix == ".zip" and place.is_file()):
        yield place
        return
    with tempfile.TemporaryDirectory(prefix="trajstore-") as temporary:
        folder = Path(temporary) / place.name
        folder.mkdir()
        try:
            with zipfile.ZipFile(place) as packed:
                members = packed.infolist()
                if METADATA_KEY not in [member.filename for member in members]:
                    raise no_zipped_run(place)
                size, free = sum(each.file_size for each in members), shutil.disk_usage(folder).free
                if size > free:
                    raise FormatError(
                        f"{place} unpacks to {format_bytes(size)}, but {temporary} has "
                        f"{format_bytes(free)} free; set TMPDIR to a folder with more"
                    )
                for member in members:
                    del member.CRC  # ZipExtFile then compares none
                    packed.extract(member, folder)
        except OSError as error:
            raise FormatError(f"{place} cannot be unpacked: {error.strerror or error}") from error
        except _DAMAGED as error:
            raise FormatError(f"{place} cannot be unpacked: {error}") from error
        yield folder


_MOST = 1 << 26
"""Values of a coordinate, and rows of a block."""

_MANY = 1 << 16
"""Objects of an array. For larger arrays, the existence of the last object is checked."""

_COPIES = "consolidated_metadata.metadata"
_NO_GROUP = "is not a Zarr v3 group, so not a run"


def checked_root(place: Location, data: bytes) -> dict[str, Any]:
    """Metadata files of the arrays in the root, all checked.

    The arrays' own metadata are read only if the root has no copies of them.

    Parameters
    ----------
    place : Path or RemotePath
    data : bytes
        Metadata of the root (`root_metadata`).

    Raises
    ------
    FormatError
        If it is not a run, or has another format; if a metadata file has an impossible member, or
        declares data that is not stored.
    """
    root = _parsed(place, METADATA_KEY, data)
    _check_root(place, root)
    copies = (root.get("consolidated_metadata") or {}).get("metadata")
    arrays = _own_metadata(place) if copies is None else copies
    for name in arrays:
        if "\0" in name or {"", ".", ".."} & set(name.split("/")):
            raise FormatError(f"{place} is not a run: its array has an invalid name, {name!r}")
    checked, faults = checked_arrays(root["attributes"], arrays)
    for name, fault in faults:
        if copies is not None:
            raise _refused(
                place, METADATA_KEY, fault.within(f"{_COPIES}.{name}") if name else fault
            )
        if name is not None:  # otherwise a writer may be in a commit
            raise _refused(place, f"{name}/{METADATA_KEY}", fault)
    if isinstance(place, RemotePath) or not place.is_file():  # a zip file, which zarr reads
        for facts in checked.values():
            _check_extent(place, facts)
    return arrays


def check_own_metadata(path: Location) -> None:
    """Check the metadata file in the folder of each array, which writers replace.

    Raises
    ------
    FormatError
        If one is missing, or has an impossible member.
    """
    data = root_metadata(path)
    arrays = checked_root(path, data)
    variables = variables_of(_parsed(path, METADATA_KEY, data)["attributes"])
    names = [name for name in arrays if belongs(name, variables)]
    reads = [partial(_read, path, f"{name}/{METADATA_KEY}") for name in names]
    documents = in_parallel(reads, REMOTE_REQUESTS if isinstance(path, RemotePath) else 1)
    for name, document in zip(names, documents, strict=True):
        for fault in array_faults(facts_of(name, document), document):
            raise _refused(path, f"{name}/{METADATA_KEY}", fault)


def not_opened(place: Location, arrays: Mapping[str, Any], error: Exception) -> FormatError:
    """Error for metadata that zarr refuses. It names the first array that zarr cannot open."""
    for name, array in arrays.items():
        try:
            open_metadata(array)
        except FormatError as fault:
            return FormatError(
                f"{place} cannot be read: {METADATA_KEY}: {_COPIES}.{name}: {fault}{remedy(place)}"
            )
    return FormatError(f"{place} {_NO_GROUP}: {METADATA_KEY}: {error}")


def _within(path: Path) -> str:
    """Message for a folder that contains runs; otherwise empty."""
    runs = sorted(metadata.parent.name for metadata in path.glob(f"*.zarr/{METADATA_KEY}"))
    if not runs or (path / METADATA_KEY).exists():
        return ""
    many = f", or all of them with {path / '*.zarr'}" if len(runs) > 1 else ""
    return f"it is a folder of runs; pass {path / runs[0]}{many}"


def root_metadata(place: Location) -> bytes:
    """Bytes of the metadata of the root.

    Raises
    ------
    RunNotFound, FormatError
        If there is none.
    """
    try:
        return metadata_in(place / METADATA_KEY)
    except (ValueError, IsADirectoryError) as error:
        raise _unreadable(place, error) from error
    except (FileNotFoundError, NotADirectoryError) as error:
        if isinstance(place, RemotePath) or not place.exists():  # it was removed a moment ago
            raise RunNotFound(f"there is no run at {place}") from error
        why = _within(place) or f"it has no {METADATA_KEY}{repaired(place)}"
        why = "it is a file; unpack a zip file first" if place.is_file() else why
        raise FormatError(f"{place} {_NO_GROUP}: {why}") from error


def _parsed(place: Location, key: str, data: bytes) -> Any:
    try:
        return parse(data.decode())
    except ValueError as error:
        raise _unreadable(place, error, key) from error


def _read(place: Location, key: str) -> Any:
    """Value of the metadata of an array."""
    try:
        data = metadata_in(place / key)
    except FileNotFoundError as error:
        raise FormatError(f"{place}: {key} is missing{remedy(place)}") from error
    except (ValueError, IsADirectoryError) as error:
        raise _unreadable(place, error, key) from error
    return _parsed(place, key, data)


def _unreadable(place: Location, error: Exception, key: str = METADATA_KEY) -> FormatError:
    return FormatError(f"{place} cannot be read: {key} is damaged: {error}{repaired(place)}")


def repaired(place: Location) -> str:
    """End of a message about a root that cannot be read; empty if no array of a run is there."""
    if not (place / STEP.name).exists():
        return ""
    return f"; if it is a run, restore it with: trajstore repair {shlex.quote(str(place))}"


def _check_root(place: Location, root: Any) -> None:
    """Check the members of the root, except the metadata of its arrays."""
    for fault in root_faults(root):
        raise FormatError(f"{place} {_NO_GROUP}: {METADATA_KEY}: {fault}{repaired(place)}")
    attributes = root["attributes"]
    if "trajstore_format" not in attributes:
        raise FormatError(f"{place} is a Zarr group, but not a run: it has no trajstore_format")
    if error := other_format(place, attributes):
        raise error
    for fault in attribute_faults(attributes, REQUIRED):
        raise _refused(place, METADATA_KEY, fault)


def _own_metadata(place: Location) -> dict[str, Any]:
    """Metadata files in the folders of the arrays, for a root without copies of them."""
    if isinstance(place, RemotePath) and not place.listed:
        raise _refused(place, METADATA_KEY, Fault("consolidated_metadata", "an object"))
    if isinstance(place, RemotePath):
        suffix = f"/{METADATA_KEY}"
        keys = [key_within(path, place) for path in place.below()]
        names = sorted(key.removesuffix(suffix) for key in keys if key.endswith(suffix))
    else:
        names = sorted(file.parent.name for file in place.glob(f"*/{METADATA_KEY}"))
    return {name: _read(place, f"{name}/{METADATA_KEY}") for name in names}


def _refused(place: Location, key: str, fault: Fault) -> FormatError:
    return FormatError(f"{place} cannot be read: {key}: {fault}{remedy(place)}")


def remedy(place: Location) -> str:
    """End of a message: the command that lists the damage."""
    return f"; list the damage with: trajstore verify {shlex.quote(str(place))}"


def _check_extent(place: Location, facts: ArrayFacts) -> None:
    """Raise an error for an array that exceeds any memory, or declares data that is not stored.

    `open_run` reads all steps and coordinates.
    """
    name, shape, form = facts.name, facts.shape, facts.form
    if coordinate(name) is not None:
        _check_most(place, name, "values", math.prod(shape))
        key = chunk_key(name, 0, 1)
        # zarr would read the fill value. In its copies it omits objects with nothing else.
        if facts.foreign is None and isinstance(place, Path) and not (place / key).exists():
            raise FormatError(f"{place} cannot be read: {key} is missing{remedy(place)}")
    if form is None or facts.foreign is not None:
        return
    if name == STEP.name:
        _check_most(place, name, "rows in a block", form.shape[0])
    blocks = -(-shape[0] // form.shape[0])
    parts = -(-shape[1] // form.shape[1]) if len(shape) > 1 else 1
    # In an object store, the last steps are read first in any case.
    sure = name == STEP.name and isinstance(place, Path) and blocks
    last = place / chunk_key(name, blocks - 1, len(shape), parts - 1)
    if (sure or blocks * parts > _MANY) and not last.exists():
        raise FormatError(
            f"{place} cannot be read: {name} has shape {list(shape)}, but its last block is not "
            f"stored{remedy(place)}"
        )


def _check_most(place: Location, name: str, what: str, count: int) -> None:
    if count > _MOST:
        raise FormatError(
            f"{place} cannot be read: {name} has {count:,} {what}, expected at most {_MOST:,}"
            f"{remedy(place)}"
        )
