"""Creation of the folder of a run, atomically: empty, or of hard links to the blocks of another.

The path is checked first. Objects of a store are replaced and never modified, so two runs may share
a file: resuming, cutting or repairing one of them does not change the other.

Annotations add token coordinates to a run and keep its rows. The new run is built from hard links
under a temporary name, and exchanged with the old one atomically, so readers see one or the other.
The content digest covers the coordinates, so that of the new run differs. Before, the stored rows
are compared with the old digest.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from trajstore.arguments import checks_types
from trajstore.errors import InvalidArgument, RunExists
from trajstore.schema import ALONG_TOKEN, COORDINATES, STEP, VARIABLES, along_token
from trajstore.store.metadata.metadata_form import Status, run_identity
from trajstore.store.metadata.zarr_json import RunMetadata
from trajstore.store.reading.open_group import RUN, is_run, open_group, repaired, whole
from trajstore.store.storage.atomic import (
    PARTIAL_SUFFIX,
    check_writable,
    exchange,
    flush,
    flush_tree,
    link_or_copy,
    make_folder,
    named_errors,
    put,
    sweep,
)
from trajstore.store.storage.lock import RunLock, check_unlocked
from trajstore.store.storage.remote_path import (
    METADATA_KEY,
    Location,
    RemotePath,
    RunPath,
    local_path,
    location,
)
from trajstore.store.writing.new_run import coordinate_objects, token_coordinates
from trajstore.store.writing.resumed_run import (
    ResumedRun,
    block_fingerprints,
    check_run,
    resumed_run,
)


def check_target(
    path: RunPath, *, overwrite: bool = False, mark: str = RUN, what: str = "a run"
) -> Location:
    """Check that a run may be created at a path, and return its place.

    Parameters
    ----------
    path : path-like, str or RemotePath
    overwrite : bool
    mark, what : str
        Attribute of the root of what may be overwritten, and its name.

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
    if not is_run(target, mark):
        advice = "" if is_run(target) else repaired(target)
        raise RunExists(f"{path} is not {what} and is not overwritten; choose another path{advice}")
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


def check_local_target(path: RunPath, *, overwrite: bool = False, **own: str) -> Path:
    """As `check_target`, at a local path. Only recordings can be remote.

    Raises
    ------
    RunExists
        See `check_target`.
    InvalidArgument
        If the path has no name, such as ``/``, or is an address.
    """
    if isinstance((target := check_target(path, overwrite=overwrite, **own)), RemotePath):
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
        Attributes of the root (`trajstore.store.metadata.metadata_form.Fingerprint.attributes`).
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
    check: Callable[..., Path] = check_local_target,
) -> Iterator[Path]:
    """Temporary path for a new run that becomes `target` if the ``with`` block succeeds.

    Parameters
    ----------
    target : path-like
    overwrite : bool
        Replace an existing run.
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
        finally:
            if old.exists() and not path.exists():
                old.rename(path)
                flush([path.parent])


def _temporary(path: Path) -> Path:
    return path.with_name(f".{path.name}.{os.getpid()}{PARTIAL_SUFFIX}")


def link_run(
    stored: ResumedRun,
    new: Path,
    keys: Iterable[str],
    metadata: RunMetadata,
    *,
    status: Status,
    chunks: Mapping[str, bytes] | None = None,
) -> None:
    """Create a run that shares the objects of another one.

    Nothing is flushed here; `staged_run` flushes the run before it renames it.

    Parameters
    ----------
    stored : ResumedRun
        The local source, with the rows of the new run.
    new : Path
        A folder that does not exist yet.
    keys : iterable of str
        Objects of the source to link, or to copy if the file system does not support links.
        Metadata files of the new run, and `chunks`, replace some of them.
    metadata : RunMetadata
        Metadata of the new run.
    status : str
    chunks : mapping of str to bytes, optional
        Other objects of the new run, by key.
    """
    written = {
        f"{name}/{METADATA_KEY}": metadata.array(name, stored.rows) for name in metadata.names()
    }
    written |= chunks or {}
    assert isinstance(stored.path, Path)  # only local runs can be sources
    for key in keys:
        if key not in written and key != METADATA_KEY:
            (new / key).parent.mkdir(parents=True, exist_ok=True)
            link_or_copy(stored.path / key, new / key)
    for key, data in written.items():
        (new / key).parent.mkdir(parents=True, exist_ok=True)
        put(new / key, [data], fsync=False)
    runs = run_identity(metadata.attributes)
    arrays = {
        name: replace(array, path=new, form=replace(array.form, runs=runs))
        for name, array in stored.arrays.items()
        if name in metadata.series()
    }
    full = block_fingerprints(new, metadata, arrays, stored.layout.block_rows, stored.rows)[-1]
    fingerprint = full.ended([shard for shard in stored.unfinished if shard[0] in arrays])
    put(
        new / METADATA_KEY,
        [metadata.root(stored.rows, status, fingerprint.attributes())],
        fsync=False,
    )


_MEMORY = 1 << 40  # no row is written, so no buffer is made


@checks_types
def annotate_run(
    path: str | os.PathLike[str],
    *,
    is_dead: npt.ArrayLike | None = None,
    token_count: npt.ArrayLike | None = None,
    token_text: npt.ArrayLike | None = None,
    overwrite: bool = False,
) -> tuple[str, ...]:
    """Add coordinates along ``token`` to an existing run.

    Parameters
    ----------
    path : path-like
        A local run that no process is writing to.
    is_dead, token_count, token_text : array_like, (token,), optional
        Values in the order of the run's tokens.
    overwrite : bool
        Replace existing coordinates.

    Returns
    -------
    tuple of str
        Coordinates that were added or replaced.

    Raises
    ------
    RunNotFound, FormatError
        If there is no run, or it is damaged.
    RunExists
        If the run has such a coordinate, and `overwrite` is not set.
    RunLocked
        If another process writes to the run.
    InvalidArgument
        If no coordinate is given, a coordinate does not have one value per token, or a dead token
        has a count above 0.

    Examples
    --------
    >>> annotate_run("gatsby.zarr", token_text=["?"] * 128, overwrite=True)
    ('token_text',)
    """
    run = _local_run(path)
    given = {"is_dead": is_dead, "token_count": token_count, "token_text": token_text}
    if not (wanted := {name: values for name, values in given.items() if values is not None}):
        raise InvalidArgument("got no coordinate, expected is_dead, token_count or token_text")
    with staged_run(run, overwrite=True) as new:
        _make(run, new, wanted, overwrite=overwrite)
    return tuple(wanted)


def check_unlabeled(run: str | os.PathLike[str], coordinates: Iterable[str]) -> None:
    """Raise an error if a run has one of these coordinates.

    Raises
    ------
    RunNotFound, FormatError
        If there is no run.
    RunExists
        If it has one of them.
    InvalidArgument
        If it is in an object store.
    """
    if taken := sorted(set(open_group(_local_run(run))) & set(coordinates)):
        raise RunExists(f"{run} already has {', '.join(taken)}; replace them with overwrite=True")


def _local_run(path: str | os.PathLike[str]) -> Path:
    if isinstance((place := check_run(path)), RemotePath):
        # A store replaces one object at a time: metadata files of arrays, the root, coordinates.
        # Readers could see some old and some new ones.
        raise InvalidArgument(
            f"cannot annotate {path}: an object store cannot replace a run atomically; copy the "
            "run to a local folder, annotate it there, and copy it to a new address"
        )
    return Path(os.path.realpath(place))


def _make(run: Path, new: Path, wanted: Mapping[str, npt.ArrayLike], *, overwrite: bool) -> None:
    stored = resumed_run(run, None, memory=_MEMORY)
    root = json.loads((run / METADATA_KEY).read_bytes())
    group = open_group(run)
    there: dict[str, Any] = {name: whole(run, group, name) for name in ALONG_TOKEN if name in group}
    if not overwrite:
        check_unlabeled(run, wanted)
    coordinates = _in_order({**there, **wanted})
    made, chunks = coordinate_objects({name: coordinates[name] for name in wanted})
    before = root["consolidated_metadata"]["metadata"]
    # Including the populations, which do not change.
    auxiliary = " ".join(name for name in along_token({*before, *wanted}) if name != "token")
    arrays = {name: _with_coordinates(before[name], auxiliary) for name in before}
    metadata = RunMetadata(arrays | made, stored.metadata.attributes)
    metadata.notes = stored.metadata.notes
    files = (file for file in run.rglob("*") if file.is_symlink() or not file.is_dir())
    keys = (file.relative_to(run).as_posix() for file in files)
    link_run(stored, new, keys, metadata, status=root["attributes"]["status"], chunks=chunks)


def _in_order(coordinates: Mapping[str, npt.ArrayLike]) -> dict[str, npt.NDArray[Any]]:
    """Coordinates in the order of the schema, checked for consistency."""
    ordered = {name: coordinates[name] for name in ALONG_TOKEN if name in coordinates}
    checked = token_coordinates(ordered.pop("token"), populations=None, **ordered)
    if "is_dead" in checked and "token_count" in checked:
        dead, counts = checked["is_dead"], checked["token_count"]
        if (wrong := np.flatnonzero(dead != (counts == 0))).size:
            raise InvalidArgument(
                f"is_dead and token_count contradict each other for {wrong.size} tokens, the first "
                f"at position {wrong[0]}: a token is dead if its count is 0; pass both coordinates"
            )
    return checked


def _with_coordinates(metadata: dict[str, Any], auxiliary: str) -> dict[str, Any]:
    """Metadata of an array, with the coordinates in its attributes if it lists them."""
    if "token" not in (metadata.get("dimension_names") or ()) or "native_dtype" not in metadata.get(
        "attributes", ()
    ):
        return metadata
    return metadata | {"attributes": metadata["attributes"] | {"coordinates": auxiliary}}
