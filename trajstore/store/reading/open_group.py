"""The Zarr group that a run is, checked."""

from __future__ import annotations

import glob
import math
import shlex
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import zarr
from zarr.errors import NodeNotFoundError

from trajstore.codec.block_form import Runs
from trajstore.errors import FormatError, ObjectStoreError, RunNotFound
from trajstore.nearest_name import did_you_mean
from trajstore.schema import FORMAT, STEP, VARIABLES, coordinate
from trajstore.store.metadata.object_keys import DOCUMENT
from trajstore.store.metadata.schema_check import check_array
from trajstore.store.storage.object_file import document_in
from trajstore.store.storage.remote_path import Location, RemotePath, RunPath, location
from trajstore.strict_json import parse
from trajstore.threads import in_parallel

__all__ = ["ends", "open_checked_group", "open_group", "run_identity", "runs_beside"]

_LARGEST_BLOCK = 1 << 38
"""Values; 1 TiB of float32."""

_LARGEST_ARRAY_DOCUMENT = 16 << 20


def open_group(path: RunPath) -> zarr.Group:
    """Root group of a run, read-only, at its last commit.

    Raises
    ------
    RunNotFound
        If there is nothing at `path`.
    FormatError
        If it is not a run, or one of another format.
    InvalidArgument, MissingExtra
        If `path` is an address that cannot be read (`location`).
    """
    place = location(path)
    text = str(path)
    if isinstance(place, Path) and not place.exists():
        raise RunNotFound(f"there is no run at {text}{runs_beside(place)}")
    document = _root_document(place)
    if document is not None:
        _check_bounds(place, document)
    try:
        if isinstance(place, RemotePath):
            known = {} if document is None else {(place / DOCUMENT).key: document}
            store = place.zarr_store(known)
            group = zarr.open_group(store, path=place.key, mode="r", zarr_format=3)
        else:
            group = zarr.open_group(text, mode="r", zarr_format=3)
    except (NodeNotFoundError, FileNotFoundError, ValueError, KeyError) as error:
        if isinstance(place, Path) and not place.exists():  # it has just gone
            raise RunNotFound(f"there is no run at {text}") from error
        within = _within(place) if isinstance(place, Path) else ""
        raise FormatError(
            f"{text} is not a Zarr v3 group, so not a run: {within or error}"
        ) from error
    number = group.attrs.get("trajstore_format")
    if not isinstance(number, int):
        raise FormatError(f"{text} is a Zarr group, but no run: it has no trajstore_format")
    if number != FORMAT:
        written_by = group.attrs.get("trajstore_version")
        raise FormatError(
            f"{text} is of store format {number}, and this version reads format {FORMAT}; "
            f"install trajstore {written_by}, which wrote it"
        )
    return group


def open_checked_group(path: RunPath) -> zarr.Group:
    """As `open_group`; every array is described as it was recorded.

    Raises
    ------
    FormatError
        Also if the root does not say which run it is of, or an array is not described as the schema
        has it (`trajstore.store.metadata.schema_check.check_array`).
    """
    group = open_group(path)
    runs = run_identity(group.attrs)
    for name, array in group.arrays():
        check_array(name, array, runs)
    return group


def ends(array: Any) -> tuple[int, int]:
    """First and last value of an array of numbers, which has some.

    However many it claims to have, only these are looked for.
    """
    rows = array.shape[0]
    reads = [partial(_value, array, row) for row in (0, rows - 1)]
    first, last = in_parallel(reads, 2)
    return first, last


def _value(array: Any, row: int) -> int:
    return int(array[row : row + 1][0])


def runs_beside(path: Path) -> str:
    """What a message says of a run that is not there: what to open instead, or nothing.

    That are the runs of several parameters of the name, or a name that is nearly this one.

    Parameters
    ----------
    path : Path
    """
    stem = glob.escape(path.name.removesuffix(".zarr"))
    found = sorted(str(run) for run in path.parent.glob(f"{stem}.*.zarr"))
    if found:
        return f"; of that name there are {', '.join(found[:9])}"
    try:
        entries = sorted(path.parent.iterdir())
    except OSError:
        return ""
    runs = [entry for entry in entries if (entry / DOCUMENT).exists()]
    # Their endings are alike, and say nothing.
    near = [run.name for run in runs if did_you_mean(path.stem, [run.stem])]
    return did_you_mean(path.name, near)


def _within(path: Path) -> str:
    """That a folder is one of runs, as a sweep makes it; empty if it is none."""
    runs = sorted(document.parent.name for document in path.glob(f"*.zarr/{DOCUMENT}"))
    if not runs or (path / DOCUMENT).exists():
        return ""
    many = f", or all of them with {path / '*.zarr'}" if len(runs) > 1 else ""
    return f"there are runs in it; name {path / runs[0]}{many}"


def _root_document(place: Location) -> bytes | None:
    """The document of the root; None if the system does not let it be read, as zarr will say."""
    try:
        return document_in(place / DOCUMENT)
    except ValueError as error:
        raise _unreadable(place, error) from error
    except FileNotFoundError as error:
        if isinstance(place, RemotePath):
            raise RunNotFound(f"there is no run at {place}") from error
        return None
    except ObjectStoreError:
        raise
    except OSError:
        return None


def _check_bounds(path: Location, document: bytes) -> None:
    """Refuse documents that would take memory, or time, out of proportion to what is stored.

    Of a run at an address only the root is looked at: zarr reads no others.

    Raises
    ------
    FormatError
    """
    try:
        arrays = parse(document.decode())["consolidated_metadata"]["metadata"]
        if not isinstance(arrays, dict):
            raise ValueError("its arrays are no object of JSON")
        for own in path.glob(f"*/{DOCUMENT}") if isinstance(path, Path) else ():
            if own.stat().st_size > _LARGEST_ARRAY_DOCUMENT:
                raise ValueError(f"{own.parent.name}/{DOCUMENT} is too large")
    except ValueError as error:
        raise _unreadable(path, error) from error
    except (OSError, KeyError, TypeError):
        return  # which zarr puts into words
    _check_lengths(path, arrays)
    for name, array in arrays.items():
        if "\0" in name or {"", ".", ".."} & set(name.split("/")):
            raise FormatError(f"{path} is not a run: {name!r} is no name of an array in it")
        _check_sizes(path, name, array)


def _unreadable(path: Location, error: ValueError) -> FormatError:
    return FormatError(
        f"{path} is not a Zarr v3 group, so not a run: {DOCUMENT} cannot be read: {error}"
    )


def _check_lengths(path: Location, arrays: dict[str, Any]) -> None:
    """Refuse arrays that do not agree on how many tokens, or others, there are."""
    lengths: dict[str, tuple[str, int]] = {}
    for name, array in arrays.items():
        if name not in VARIABLES and name != STEP.name and coordinate(name) is None:
            continue  # somebody else's
        try:
            sizes = dict(zip(array["dimension_names"], array["shape"], strict=True))
        except (KeyError, TypeError, ValueError):
            continue  # which zarr puts into words
        for dim, length in sizes.items():
            other, known = lengths.setdefault(dim, (name, length))
            if length != known and dim is not None:
                raise FormatError(
                    f"{path} is not a run: {name} has {length} along {dim}, and {other} {known}; "
                    f"see what is wrong with: trajstore verify {shlex.quote(str(path))}"
                )


def _check_sizes(path: Location, name: str, array: Any) -> None:
    """Refuse an array of blocks that no machine holds, or of rows that nobody stored."""
    try:
        shape = array["shape"]
        block = array["chunk_grid"]["configuration"]["chunk_shape"]
        separator = array["chunk_key_encoding"]["configuration"]["separator"]
        size = math.prod(map(int, block))
        rows, length = int(shape[0]), int(block[0])
    except (KeyError, TypeError, IndexError, ValueError, OverflowError):
        return  # which zarr puts into words
    if size > _LARGEST_BLOCK:
        raise FormatError(
            f"{path} cannot be read: {name} has blocks of {size:,} values, expected at most "
            f"{_LARGEST_BLOCK:,}"
        )
    if name != STEP.name or separator != "." or rows < 1 or length < 1:
        return
    if isinstance(path, RemotePath):
        return  # whoever opens it reads the last steps first, and finds that they are missing
    last = (rows - 1) // length
    if last and not (path / name / f"c.{last}").exists() and (path / name / "c.0").exists():
        raise FormatError(
            f"{path} says that it has {rows:,} rows, and the last of them are not stored; see what "
            f"is wrong with: trajstore verify {shlex.quote(str(path))}"
        )


def run_identity(attributes: Mapping[str, Any]) -> Runs:
    """Whose blocks a run holds, by the attributes of its root.

    Raises
    ------
    FormatError
        If they do not say it.
    """
    try:
        runs = tuple((int(block), bytes.fromhex(run).hex()) for block, run in attributes["runs"])
    except (KeyError, TypeError, ValueError) as error:
        raise FormatError(f"the root does not say which run it is of: runs is {error}") from error
    if not runs or runs[0][0] != 0:
        raise FormatError(f"the root does not say whose the first block is: runs is {runs}")
    return runs
