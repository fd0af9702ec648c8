"""Creation of a run: checks of its path, and atomic creation of its folder."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from trajstore.errors import InvalidArgument, RunExists
from trajstore.schema import COORDINATES, STEP, VARIABLES
from trajstore.store.metadata.object_keys import METADATA_KEY
from trajstore.store.metadata.zarr_json import RunMetadata
from trajstore.store.reading.open_group import is_run
from trajstore.store.storage.atomic import (
    PARTIAL_SUFFIX,
    check_writable,
    exchange,
    flush,
    flush_tree,
    make_folder,
    named_errors,
    put,
    sweep,
)
from trajstore.store.storage.lock import RunLock, check_unlocked
from trajstore.store.storage.remote_path import Location, RemotePath, RunPath, local_path, location


def check_target(path: RunPath, *, overwrite: bool = False) -> Location:
    """Check that a run may be created at a path, and return its place.

    Raises
    ------
    RunLocked
        If another process writes to a run there.
    RunExists
        If the path exists, and `overwrite` is not set, or it is not a run, or it is a link.
    InvalidArgument, MissingExtra
        If the path has no name, such as ``/``, or its folder or address cannot be written to.
    """
    target = location(path).absolute()
    if isinstance(target, RemotePath):
        if not target.listed:
            raise InvalidArgument(
                f"cannot record to {path}: web servers are read-only; choose a local path or an "
                "object store"
            )
        if not target.exists() or _is_begun(target):
            return target
    else:
        _check_local(path, target)
        if not target.exists():
            return target
        check_unlocked(target)
    if not overwrite:
        raise RunExists(
            f"{path} already exists; choose another path, or replace it with overwrite=True"
        )
    if not is_run(target):
        raise RunExists(f"{path} is not a run and is not overwritten; choose another path")
    return target


def check_folder(path: RunPath) -> None:
    """Check that this user can write to the folder of a local run, and to the run if it exists.

    Raises
    ------
    InvalidArgument
        With the name of the folder.
    """
    if isinstance(target := location(path).absolute(), Path):
        check_writable(target)
        if target.is_dir():
            check_writable(target / METADATA_KEY)


def check_local_target(path: RunPath, *, overwrite: bool = False) -> Path:
    """Check that a run may be created at a local path. Only recordings can be remote.

    Raises
    ------
    RunExists
        See `check_target`.
    InvalidArgument
        If the path has no name, such as ``/``, or is an address.
    """
    if isinstance((target := check_target(path, overwrite=overwrite)), RemotePath):
        raise InvalidArgument(
            f"cannot create {path}: only recordings can be in an object store; choose a local path"
        )
    return target


def check_file_target(target: str | os.PathLike[str], *, overwrite: bool = False) -> Path:
    """Check that a file may be created at a path, and return the path.

    Raises
    ------
    RunExists
        If there is a folder, or a file and `overwrite` is not set.
    InvalidArgument
        If the path is an address.
    """
    path = local_path(target)
    check_writable(path)
    if path.is_dir():
        raise RunExists(f"{path} is a folder; choose another path")
    if path.exists() and not overwrite:
        raise RunExists(
            f"{path} already exists; choose another path, or replace it with overwrite=True"
        )
    return path


def _check_local(path: RunPath, target: Path) -> None:
    if not str(path) or not target.name:
        raise InvalidArgument(f"got {str(path)!r} as a run, expected a path such as run.zarr")
    check_writable(target)
    if target.is_symlink():
        raise RunExists(
            f"{path} is a link to {os.readlink(target)}, and links are not replaced; pass its "
            "target, or choose another path"
        )


def _is_begun(path: RemotePath) -> bool:
    """True if there are only remains of a killed creation of a run."""
    if (path / METADATA_KEY).exists():
        return False
    known = {STEP.name, *VARIABLES, *COORDINATES}
    return all(entry.name in known for entry in path.iterdir())


def create_folder(
    path: Location,
    metadata: RunMetadata,
    chunks: Mapping[str, bytes],
    digests: Mapping[str, str],
    *,
    overwrite: bool,
    fsync: bool,
) -> None:
    """Create a run without rows under a temporary name, and rename it.

    An object store cannot rename a folder. There the root is written last, and makes the objects a
    run. If a run is replaced, its root is removed first.

    Parameters
    ----------
    path : Path or RemotePath
    metadata : RunMetadata
        Metadata of the root and every array.
    chunks : mapping of str to bytes
        Encoded coordinates, by key.
    digests : mapping of str to str
        Attributes of the root (`trajstore.store.metadata.fingerprint.Fingerprint.attributes`).
    overwrite : bool
        Replace an existing run.
    fsync : bool
        Flush the run to disk.

    Raises
    ------
    RunExists
        If another process created `path` meanwhile.
    """
    if isinstance(path, RemotePath):
        if overwrite:
            remove_folder(path)
        _put_all(path, metadata, chunks, digests)
        return
    new = _temporary(path)
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
            raise RunExists(
                f"{path} was created by another process meanwhile; choose another path"
            ) from error
        raise
    if old.exists():
        shutil.rmtree(old, ignore_errors=True)  # the next writer sweeps any rest


def remove_folder(path: Location) -> None:
    """Remove a run. The caller must hold its lock.

    The run disappears atomically. If its files cannot all be removed, the next writer sweeps them.
    """
    if isinstance(path, RemotePath):
        (path / METADATA_KEY).unlink()
        path.remove_below()
        return
    old = _temporary(path).with_suffix(".old")
    path.rename(old)
    flush([path.parent])
    shutil.rmtree(old)


def move_into_place(
    new: Path, path: Path, *, old: Path, overwrite: bool, fsync: bool = True
) -> None:
    """Rename a file or folder to its final path; replace an old one atomically, if supported.

    The content is flushed before the rename, and the new name before the old content is removed.

    Parameters
    ----------
    new, path : Path
        Present and final path.
    old : Path
        New path of a replaced file or folder.
    overwrite : bool
        Replace an existing `path`.
    fsync : bool
        Flush to disk.
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
    if new.exists():  # after the exchange it is the old one
        new.rename(old)


def _put_all(
    path: Location,
    metadata: RunMetadata,
    chunks: Mapping[str, bytes],
    digests: Mapping[str, str],
) -> None:
    for name in metadata.names():
        put(path / name / METADATA_KEY, [metadata.array(name, 0)], fsync=False)
    for key, data in chunks.items():
        put(path / key, [data], fsync=False)
    put(path / METADATA_KEY, [metadata.root(0, "recording", digests)], fsync=False)


@contextmanager
def staged_file(target: str | os.PathLike[str], *, overwrite: bool = False) -> Iterator[Path]:
    """Temporary file that becomes `target` if the ``with`` block succeeds, else is removed.

    Raises
    ------
    RunExists
        If there is a folder, or a file and `overwrite` is not set.
    """
    path = check_file_target(target, overwrite=overwrite)
    with staged_folder(path) as folder:
        new = folder / path.name
        new.write_bytes(b"")
        yield new
        check_file_target(path, overwrite=overwrite)
        flush([new])
        new.replace(path)
        flush([path.parent])


@contextmanager
def staged_folder(target: str | os.PathLike[str]) -> Iterator[Path]:
    """Empty temporary folder next to `target`, removed at the end of the ``with`` block.

    The target is locked meanwhile, and temporary files of dead processes are removed.

    Raises
    ------
    RunLocked
        If another process is creating the target.
    """
    path = local_path(target).absolute()
    make_folder(path.parent)
    folder = _temporary(path)
    with RunLock.acquire(path):
        sweep(path)
        folder.mkdir()
        try:
            with named_errors(path):
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
    """Temporary path for a new run that becomes `target` if the ``with`` block succeeds.

    Parameters
    ----------
    target : path-like
    overwrite : bool
        Replace an existing run.
    on_place : callable, optional
        Called after the rename, before the old run is removed. If it fails, the old run is
        restored.
    check : callable, optional
        Called with the target and `overwrite`, before and after; returns the path to create.

    Raises
    ------
    RunExists
        If `target` exists, and `overwrite` is not set or it is not a run.
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


def _temporary(path: Path) -> Path:
    return path.with_name(f".{path.name}.{os.getpid()}{PARTIAL_SUFFIX}")
