"""Where a run may be created, and its folder: whole and empty, or not there at all."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from trajstore.errors import InvalidArgument, RunExists
from trajstore.schema import COORDINATES, STEP, VARIABLES
from trajstore.store.metadata.object_keys import DOCUMENT
from trajstore.store.metadata.zarr_json import RunMetadata
from trajstore.store.storage.atomic import (
    PARTIAL_SUFFIX,
    exchange,
    flush,
    flush_tree,
    make_folder,
    put,
    sweep,
)
from trajstore.store.storage.lock import RunLock
from trajstore.store.storage.remote_path import Location, RemotePath, RunPath, local_path, location

__all__ = [
    "check_file_target",
    "check_local_target",
    "check_target",
    "create_folder",
    "move_into_place",
    "remove_folder",
    "staged_file",
    "staged_folder",
    "staged_run",
]


def check_target(path: RunPath, *, overwrite: bool = False) -> Location:
    """Where a run may be created.

    Raises
    ------
    RunExists
        If something is there and `overwrite` is not set, or it is not a run, or it is a link.
    InvalidArgument, MissingExtra
        If it has no name, as ``/``, or is an address that cannot be written to.
    """
    target = location(path).absolute()
    if isinstance(target, RemotePath):
        if not target.listed:
            raise InvalidArgument(f"cannot record to {path}: a web server is only read from")
        if not target.exists() or _is_begun(target):
            return target
    else:
        _check_local(path, target)
        if not target.exists():
            return target
    if not overwrite:
        raise RunExists(
            f"{path} is already there; choose another path, or overwrite it (--overwrite)"
        )
    if not _is_run(target):
        raise RunExists(f"{path} is not a run, so it is not overwritten; choose another path")
    return target


def check_local_target(path: RunPath, *, overwrite: bool = False) -> Path:
    """Where a run may be made that is no recording: not in an object store.

    Raises
    ------
    RunExists
        As `check_target`.
    InvalidArgument
        If it has no name, as ``/``, or is an address.
    """
    target = check_target(path, overwrite=overwrite)
    if isinstance(target, RemotePath):
        raise InvalidArgument(
            f"cannot make {path}: recordings can go to an object store, other runs are made in a "
            "local folder"
        )
    return target


def check_file_target(target: str | os.PathLike[str], *, overwrite: bool = False) -> Path:
    """Where a file may be made.

    Raises
    ------
    RunExists
        If there is a folder, or a file and `overwrite` is not set.
    InvalidArgument
        If it is an address.
    """
    path = local_path(target)
    if path.is_dir():
        raise RunExists(f"{path} is a folder; choose the path of a file")
    if path.exists() and not overwrite:
        raise RunExists(
            f"{path} is already there; choose another path, or overwrite it (--overwrite)"
        )
    return path


def _check_local(path: RunPath, target: Path) -> None:
    if not str(path) or not target.name:
        raise InvalidArgument(f"a run needs a name of its own, got {str(path)!r}; such as run.zarr")
    if target.is_symlink():
        raise RunExists(
            f"{path} is a link to {os.readlink(target)}, and links are not replaced; name what it "
            "points to, or choose another path"
        )


def _is_begun(path: RemotePath) -> bool:
    """Whether nothing is there but what the creation of a run leaves that was killed."""
    if (path / DOCUMENT).exists():
        return False
    known = {STEP.name, *VARIABLES, *COORDINATES}
    return all(entry.name in known for entry in path.iterdir())


def _is_run(path: Location) -> bool:
    try:
        document = json.loads((path / DOCUMENT).read_bytes())
        return "trajstore_format" in document["attributes"]
    except (OSError, ValueError, KeyError, TypeError):
        return False


def create_folder(
    path: Location,
    metadata: RunMetadata,
    chunks: Mapping[str, bytes],
    digests: Mapping[str, str],
    *,
    overwrite: bool,
    fsync: bool,
) -> None:
    """Make the folder of a run without rows beside its place, and move it there.

    In an object store, which cannot move a folder, the root comes last, and is what makes a run of
    it; to replace one, its root goes first.

    Parameters
    ----------
    path : Path or RemotePath
    metadata : RunMetadata
        Of the root and every array.
    chunks : mapping of str to bytes
        Encoded coordinates, by their keys.
    digests : mapping of str to str
        Attributes of the root (`trajstore.store.metadata.fingerprint.Fingerprint.attributes`).
    overwrite : bool
        Replace a run that is there.
    fsync : bool
        Have it survive a loss of power.

    Raises
    ------
    RunExists
        If another process has made something at `path` meanwhile.
    """
    if isinstance(path, RemotePath):
        if overwrite:
            remove_folder(path)
        _put_all(path, metadata, chunks, digests)
        return
    new = _beside(path)
    old = new.with_suffix(".old")
    new.mkdir()
    try:
        for name in metadata.names():
            (new / name).mkdir()
        _put_all(new, metadata, chunks, digests)
        move_into_place(new, path, old=old, overwrite=overwrite, fsync=fsync)
    except BaseException as error:
        shutil.rmtree(new, ignore_errors=True)
        if isinstance(error, OSError) and path.exists() and not overwrite:
            raise RunExists(f"{path} has just been made by another process") from error
        raise
    if old.exists():
        shutil.rmtree(old, ignore_errors=True)  # the new one is there; the next writer sweeps


def remove_folder(path: Location) -> None:
    """Remove a run; only whoever holds its lock may.

    It is gone at once, or there as a whole: what is left of it then, the next writer sweeps.
    """
    if isinstance(path, RemotePath):
        (path / DOCUMENT).unlink()
        path.remove_below()
        return
    old = _beside(path).with_suffix(".old")
    path.rename(old)
    flush([path.parent])
    shutil.rmtree(old)


def move_into_place(
    new: Path, path: Path, *, old: Path, overwrite: bool, fsync: bool = True
) -> None:
    """Put a file, or a folder, in its place, at once if possible: there always is one then.

    All of it is flushed before it has its name, and its name before anything is removed.

    Parameters
    ----------
    new, path : Path
    old : Path
        Where what is replaced goes.
    overwrite : bool
        Replace what is there.
    fsync : bool
        Have it survive a loss of power.
    """
    if fsync:
        flush_tree(new)
    if not (overwrite and path.exists()):
        new.rename(path)
    elif not exchange(new, path):
        path.rename(old)
        new.rename(path)
    if fsync:
        flush({path.parent, new.parent})
    if new.exists():  # it is the old one now
        new.rename(old)


def _put_all(
    path: Location,
    metadata: RunMetadata,
    chunks: Mapping[str, bytes],
    digests: Mapping[str, str],
) -> None:
    for name in metadata.names():
        put(path / name / DOCUMENT, [metadata.array(name, 0)], fsync=False)
    for key, data in chunks.items():
        put(path / key, [data], fsync=False)
    put(path / DOCUMENT, [metadata.root(0, "recording", digests)], fsync=False)


@contextmanager
def staged_file(target: str | os.PathLike[str], *, overwrite: bool = False) -> Iterator[Path]:
    """Path of an empty file that becomes `target` when the block ends well, and is removed if not.

    Raises
    ------
    RunExists
        If there is a folder, or a file and `overwrite` is not set.
    """
    path = check_file_target(target, overwrite=overwrite)
    make_folder(path.parent)
    partial = _beside(path)
    with _alone(path):
        try:
            partial.write_bytes(b"")
            yield partial
            check_file_target(path, overwrite=overwrite)
            flush([partial])
            partial.replace(path)
            flush([path.parent])
        except BaseException:
            partial.unlink(missing_ok=True)
            raise


@contextmanager
def staged_folder(target: str | os.PathLike[str]) -> Iterator[Path]:
    """Empty folder beside `target` for what is going to be put there; removed at the end.

    Nobody else makes anything of that name meanwhile, and what died while it did is removed.

    Raises
    ------
    RunLocked
        If another process is making it.
    """
    path = local_path(target).absolute()
    make_folder(path.parent)
    folder = _beside(path)
    with _alone(path):
        folder.mkdir()
        try:
            yield folder
        finally:
            shutil.rmtree(folder, ignore_errors=True)


@contextmanager
def staged_run(
    target: str | os.PathLike[str],
    *,
    overwrite: bool = False,
    on_place: Callable[[], object] | None = None,
    check: Callable[..., Path] = check_local_target,
) -> Iterator[Path]:
    """Free path for a new run that becomes `target` when the block ends well.

    Parameters
    ----------
    target : path-like
    overwrite : bool
        Replace a run that is there.
    on_place : callable, optional
        Called when the new run is in its place, before the old one is removed; where it fails, the
        old one is put back.
    check : callable, optional
        Called with the target and `overwrite`, before and after; returns the path to make.

    Raises
    ------
    RunExists
        If something is there and `overwrite` is not set, or it is not a run.
    """
    path = check(target, overwrite=overwrite)
    with staged_folder(path) as folder:
        new, old = folder / "new", folder / "old"
        try:
            yield new
            check(path, overwrite=overwrite)
            move_into_place(new, path, old=old, overwrite=overwrite)
            if on_place is not None:
                try:
                    on_place()
                except BaseException:
                    path.rename(new)
                    raise
        finally:
            if old.exists() and not path.exists():
                old.rename(path)
                flush([path.parent])


@contextmanager
def _alone(path: Path) -> Iterator[None]:
    """While nobody else makes anything there, and after what died while it did is removed."""
    with RunLock.acquire(path):
        sweep(path)
        yield


def _beside(path: Path) -> Path:
    return path.with_name(f".{path.name}.{os.getpid()}{PARTIAL_SUFFIX}")
