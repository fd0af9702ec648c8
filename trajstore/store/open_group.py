"""The Zarr group that a run is, checked."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import zarr
from zarr.errors import NodeNotFoundError

from trajstore.codec.block_form import Runs
from trajstore.errors import FormatError, RunNotFound
from trajstore.schema import FORMAT
from trajstore.store.remote_path import RemotePath, RunPath, location

__all__ = ["open_group", "run_identity"]


def open_group(path: RunPath) -> zarr.Group:
    """Root group of a run, read-only, at its last commit.

    Raises
    ------
    RunNotFound
        If there is nothing at `path`.
    FormatError
        If it is not a run, or one of a newer format.
    InvalidArgument, MissingExtra
        If `path` is an address that cannot be read (`trajstore.store.remote_path.location`).
    """
    place = location(path)
    text = str(path)
    if isinstance(place, Path) and not place.exists():
        raise RunNotFound(f"there is no run at {text}")
    try:
        if isinstance(place, Path):
            group = zarr.open_group(text, mode="r", zarr_format=3)
        else:
            group = zarr.open_group(place.zarr_store(), path=place.key, mode="r", zarr_format=3)
    except (NodeNotFoundError, ValueError, KeyError) as error:
        if isinstance(place, RemotePath) and isinstance(error, NodeNotFoundError):
            raise RunNotFound(f"there is no run at {text}") from error
        raise FormatError(f"{text} is not a Zarr v3 group, so not a run: {error}") from error
    number = group.attrs.get("trajstore_format")
    if not isinstance(number, int):
        raise FormatError(f"{text} is a Zarr group, but no run: it has no trajstore_format")
    if number > FORMAT:
        raise FormatError(
            f"{text} is of store format {number}, this version reads up to {FORMAT}; "
            f"install trajstore {group.attrs.get('trajstore_version')} or newer"
        )
    return group


def run_identity(attributes: Mapping[str, Any]) -> Runs | None:
    """Whose blocks a run holds, by the attributes of its root; None in format 1.

    Raises
    ------
    FormatError
        If they do not say it.
    """
    if attributes.get("trajstore_format") == 1:
        return None
    try:
        runs = tuple((int(block), bytes.fromhex(run).hex()) for block, run in attributes["runs"])
    except (KeyError, TypeError, ValueError) as error:
        raise FormatError(f"the root does not say which run it is of: runs is {error}") from error
    if not runs or runs[0][0] != 0:
        raise FormatError(f"the root does not say whose the first block is: runs is {runs}")
    return runs
