"""Where a run may be created, and its folder: whole and empty, or not there at all."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Mapping
from pathlib import Path

from trajstore.errors import InvalidArgument, RunExists
from trajstore.metadata import DOCUMENT, Documents
from trajstore.objects import PARTIAL_SUFFIX, flush_folder, put

__all__ = ["check_target", "create_folder"]


def check_target(path: str | os.PathLike[str], *, overwrite: bool = False) -> Path:
    """Local path of a run that may be created there.

    Raises
    ------
    RunExists
        If something is there and `overwrite` is not set, or it is not a run.
    InvalidArgument
        If it is an address, not a local path.
    """
    text = os.fspath(path)
    if "://" in text:
        raise InvalidArgument(f"cannot record to {text}: a run is recorded to a local folder")
    target = Path(path).absolute()
    if not target.exists():
        return target
    if not overwrite:
        raise RunExists(
            f"{path} is already there; choose another path, or overwrite it (--overwrite)"
        )
    if not _is_run(target):
        raise RunExists(f"{path} is not a run, so it is not overwritten; choose another path")
    return target


def _is_run(path: Path) -> bool:
    try:
        document = json.loads((path / DOCUMENT).read_bytes())
        return "trajstore_format" in document["attributes"]
    except (OSError, ValueError, KeyError, TypeError):
        return False


def create_folder(
    path: Path, documents: Documents, chunks: Mapping[str, bytes], *, overwrite: bool, fsync: bool
) -> None:
    """Make the folder of a run without rows beside its place, and move it there.

    Parameters
    ----------
    path : Path
    documents : Documents
        Of the root and every array.
    chunks : mapping of str to bytes
        Encoded coordinates, by their keys.
    overwrite : bool
        Replace a run that is there.
    fsync : bool
        Have it survive a loss of power.

    Raises
    ------
    RunExists
        If another process has made something at `path` meanwhile.
    """
    beside = f".{path.name}.{os.getpid()}"
    new, old = path.with_name(f"{beside}{PARTIAL_SUFFIX}"), path.with_name(f"{beside}.old")
    for left in (new, old):  # of a killed process that had the same number
        shutil.rmtree(left, ignore_errors=True)
    new.mkdir()
    try:
        for name in documents.names():
            (new / name).mkdir()
            put(new / name / DOCUMENT, [documents.array(name, 0)], fsync=fsync)
        for key, data in chunks.items():
            put(new / key, [data], fsync=fsync)
        put(new / DOCUMENT, [documents.root(0, "recording")], fsync=fsync)
        if overwrite and path.exists():
            path.rename(old)
            new.rename(path)
            shutil.rmtree(old)
        else:
            new.rename(path)
    except BaseException as error:
        shutil.rmtree(new, ignore_errors=True)
        if isinstance(error, OSError) and path.exists() and not overwrite:
            raise RunExists(f"{path} has just been made by another process") from error
        raise
    if fsync:
        flush_folder(path.parent)
