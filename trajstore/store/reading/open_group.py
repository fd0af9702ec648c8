"""The Zarr group that a run is, checked."""

from __future__ import annotations

import glob
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import zarr

from trajstore.codec.block_form import Runs
from trajstore.errors import ObjectStoreError, RunNotFound
from trajstore.nearest_name import did_you_mean
from trajstore.store.metadata.object_keys import DOCUMENT
from trajstore.store.metadata.schema_check import check_array
from trajstore.store.reading.checked_documents import checked_root, not_opened, root_document
from trajstore.store.storage.remote_path import Location, RemotePath, RunPath, location
from trajstore.threads import in_parallel

__all__ = ["ends", "open_group", "run_identity", "runs_beside"]


def open_group(path: RunPath) -> zarr.Group:
    """Root group of a run, read-only, at its last commit; its documents are checked.

    The root is checked before zarr sees it, with its copies of the arrays' documents; their own are
    read only if it has none, or by who writes (`check_own_documents`). What it claims to hold is
    compared with the objects that are there.

    Raises
    ------
    RunNotFound
        If there is nothing at `path`.
    FormatError
        If it is not a run, or one of another format; if a document has a member that cannot be, or
        claims rows that are not stored; if an array is not described as the schema has it
        (`trajstore.store.metadata.schema_check.check_array`).
    InvalidArgument, MissingExtra
        If `path` is an address that cannot be read (`location`).
    """
    place = location(path)
    if isinstance(place, Path) and not place.exists():
        raise RunNotFound(f"there is no run at {path}{runs_beside(place)}")
    document = root_document(place)
    attributes, arrays = checked_root(place, document)
    runs = run_identity(attributes)
    group, opened = _zarr_group(place, document, arrays)
    for name, array in opened:
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


def _zarr_group(
    place: Location, document: bytes, arrays: Mapping[str, Any]
) -> tuple[zarr.Group, tuple[tuple[str, Any], ...]]:
    """The group, and its arrays by name."""
    try:
        if isinstance(place, RemotePath):
            store = place.zarr_store({(place / DOCUMENT).key: document})
            group = zarr.open_group(store, path=place.key, mode="r", zarr_format=3)
        else:
            group = zarr.open_group(str(place), mode="r", zarr_format=3)
        return group, tuple(group.arrays())
    except ObjectStoreError:
        raise
    except Exception as error:  # whatever zarr raises for a document that nobody wrote
        if isinstance(place, Path) and not place.exists():  # it has just gone
            raise RunNotFound(f"there is no run at {place}") from error
        raise not_opened(place, arrays, error) from error


def run_identity(attributes: Mapping[str, Any]) -> Runs:
    """Whose blocks a run holds, by the attributes of its root, which are checked."""
    return tuple((block, run) for block, run in attributes["runs"])
