"""The metadata of a run, checked and compared with the stored objects."""

from __future__ import annotations

import math
import shlex
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

from trajstore.codec.block import Runs
from trajstore.errors import FormatError, RunNotFound
from trajstore.schema import STEP, belongs, coordinate, variables_of
from trajstore.store.metadata.metadata_form import (
    REQUIRED,
    Fault,
    attribute_faults,
    other_format,
    root_faults,
    run_identity,
)
from trajstore.store.metadata.zarr_json import (
    ArrayFacts,
    array_faults,
    contradicting_lengths,
    facts_of,
    open_metadata,
)
from trajstore.store.storage.atomic import metadata_in
from trajstore.store.storage.remote_path import (
    METADATA_KEY,
    REMOTE_REQUESTS,
    Location,
    RemotePath,
    chunk_key,
    key_within,
)
from trajstore.strict_json import parse
from trajstore.threads import in_parallel

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
    runs = run_identity(root["attributes"])
    held = variables_of(root["attributes"])
    found: dict[str, ArrayFacts] = {}
    for name, metadata in arrays.items():
        if "\0" in name or {"", ".", ".."} & set(name.split("/")):
            raise FormatError(f"{place} is not a run: its array has an invalid name, {name!r}")
        if belongs(name, held):  # zarr reads arrays of others
            key = (
                (f"{name}/{METADATA_KEY}", "")
                if copies is None
                else (METADATA_KEY, f"{_COPIES}.{name}")
            )
            found[name] = _checked_facts(place, *key, name, metadata, runs)
    for name in (STEP.name, "token"):
        if name not in found:
            raise _refused(
                place, METADATA_KEY, Fault(f"{_COPIES}.{name}", "the metadata of an array")
            )
    committed, (rows,) = root["attributes"]["committed_rows"], found[STEP.name].shape
    if copies is not None and found[STEP.name].foreign is None and committed != rows:
        expected = f"{rows}, the rows of its arrays"
        raise _refused(place, METADATA_KEY, Fault("attributes.committed_rows", expected, committed))
    for name, dim, length, other in contradicting_lengths(
        {name: facts.shape for name, facts in found.items()}
    ):
        raise FormatError(
            f"{place} is not a run: {name} has length {length} along {dim}, and others have "
            f"{other}{remedy(place)}"
        )
    if isinstance(place, RemotePath) or not place.is_file():  # a zip file, which zarr reads
        for facts in found.values():
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
    held = variables_of(_parsed(path, METADATA_KEY, data)["attributes"])
    names = [name for name in arrays if belongs(name, held)]
    reads = [partial(_read, path, f"{name}/{METADATA_KEY}") for name in names]
    own = in_parallel(reads, REMOTE_REQUESTS if isinstance(path, RemotePath) else 1)
    for name, found in zip(names, own, strict=True):
        _checked_facts(path, f"{name}/{METADATA_KEY}", "", name, found)


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
        why = _within(place) or f"it has no {METADATA_KEY}"
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
    what = _NO_GROUP if key == METADATA_KEY else "cannot be read"
    return FormatError(f"{place} {what}: {key} cannot be read: {error}")


def _check_root(place: Location, root: Any) -> None:
    """Check the members of the root, except the metadata of its arrays."""
    for fault in root_faults(root):
        raise FormatError(f"{place} {_NO_GROUP}: {METADATA_KEY}: {fault}")
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
        names = sorted(own.parent.name for own in place.glob(f"*/{METADATA_KEY}"))
    return {name: _read(place, f"{name}/{METADATA_KEY}") for name in names}


def _checked_facts(
    place: Location, key: str, member: str, name: str, metadata: Any, runs: Runs | None = None
) -> ArrayFacts:
    """Facts of the metadata of an array, a member of the metadata file with that key."""
    facts = facts_of(name, metadata)
    for fault in array_faults(facts, metadata, runs):
        raise _refused(place, key, fault.within(member) if member else fault)
    assert isinstance(facts, ArrayFacts)  # otherwise it has a fault
    return facts


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
