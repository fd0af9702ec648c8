"""The Zarr group that a run is, checked."""

from __future__ import annotations

import os

import zarr
from zarr.errors import NodeNotFoundError

from trajstore.errors import FormatError, MissingExtra, RunNotFound
from trajstore.schema import FORMAT

__all__ = ["open_group"]


def open_group(path: str | os.PathLike[str]) -> zarr.Group:
    """Root group of a run, read-only, at its last commit.

    Raises
    ------
    RunNotFound
        If there is nothing at `path`.
    FormatError
        If it is not a run, or one of a newer format.
    MissingExtra
        If `path` is an address, and what reads such addresses is not installed.
    """
    text = os.fspath(path)
    if "://" not in text and not os.path.exists(text):
        raise RunNotFound(f"there is no run at {text}")
    try:
        group = zarr.open_group(text, mode="r", zarr_format=3)
    except (NodeNotFoundError, ValueError, KeyError) as error:
        raise FormatError(f"{text} is not a Zarr v3 group, so not a run: {error}") from error
    except ImportError as error:
        remedy = "run: pip install 'trajstore[s3]'" if text.startswith("s3://") else "install it"
        raise MissingExtra(
            f"{text} needs a package that is not installed ({error}); {remedy}"
        ) from error
    number = group.attrs.get("trajstore_format")
    if not isinstance(number, int):
        raise FormatError(f"{text} is a Zarr group, but no run: it has no trajstore_format")
    if number > FORMAT:
        raise FormatError(
            f"{text} is of store format {number}, this version reads up to {FORMAT}; "
            f"install trajstore {group.attrs.get('trajstore_version')} or newer"
        )
    return group
