"""Runs of an older format as runs of the present one: the same rows, bit for bit."""

from __future__ import annotations

import os
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from trajstore.byte_sizes import DEFAULT_MEMORY
from trajstore.errors import FormatError, InvalidArgument, RunExists
from trajstore.exchange.exporting.export_zarr import write_zarr
from trajstore.exchange.selection import select
from trajstore.schema import FORMAT, STEP, VARIABLES, coordinate
from trajstore.store.metadata.object_keys import CHECKPOINT, checkpoint_folder
from trajstore.store.metadata.zarr_json import CHANGING
from trajstore.store.reading.open_group import open_group
from trajstore.store.reading.tiled_reader import TiledRun, open_tiled
from trajstore.store.storage.atomic import link_or_copy
from trajstore.store.storage.remote_path import local_path
from trajstore.store.writing.create import staged_run
from trajstore.threads import Progress

__all__ = ["Upgraded", "upgrade"]

_OF_THE_WRITER = ("trajstore_format", "trajstore_version", "encoding", "block_rows", "timeline")


@dataclass(frozen=True, kw_only=True)
class Upgraded:
    """What was made.

    Attributes
    ----------
    path : Path
    from_format, to_format : int
    rows : int
    variables : tuple of str
    status : str
    checkpoints : int
        That the new run has beside it, too.
    bytes : int
        On disk, without checkpoints.
    notes : tuple of str
        What is not as it was.
    """

    path: Path
    from_format: int
    to_format: int
    rows: int
    variables: tuple[str, ...]
    status: str
    checkpoints: int
    bytes: int
    notes: tuple[str, ...]


def upgrade(
    run: str | os.PathLike[str],
    new: str | os.PathLike[str],
    *,
    memory: int | str = DEFAULT_MEMORY,
    overwrite: bool = False,
    on_progress: Progress | None = None,
) -> Upgraded:
    """Make a run of the present format of one of an older format, which is only read.

    Rows, coordinates, status and attributes are those of the old one, bit for bit, ``created``
    among them; so are encoding and rows of a block. The attribute ``upgraded`` says where it is
    from. Checkpoints become checkpoints of the new run, as hard links or copies, so that
    ``record --resume`` goes on with it.

    Parameters
    ----------
    run : path-like
        A local run of an older format.
    new : path-like
        Made beside its place, then moved there.
    memory : int or str, default 1 GiB
        For a block of the run, and what encoding it takes.
    overwrite : bool
        Replace a run, and checkpoints, that are there.
    on_progress : callable, optional
        Called with the bytes that are done, and those there are.

    Returns
    -------
    Upgraded

    Raises
    ------
    RunNotFound, FormatError
        If there is no run, or one that cannot be read as a whole.
    RunExists
        If there is something at `new`, or checkpoints beside it, and `overwrite` is not set.
    InvalidArgument
        If the run is of the present format already, `run` is an address, both are the same, or the
        memory is too small.

    Examples
    --------
    >>> upgrade("gatsby.zarr", "new.zarr")
    Traceback (most recent call last):
    trajstore.errors.InvalidArgument: gatsby.zarr is of store format 2 already, ...
    """
    source, target = _paths(run, new)
    group = open_group(source)
    number = group.attrs["trajstore_format"]
    assert isinstance(number, int)  # which `open_group` has checked
    if number >= FORMAT:
        raise InvalidArgument(
            f"{run} is of store format {number} already, the newest there is; there is nothing to "
            "upgrade"
        )
    recorded = open_tiled(source)
    if "encoding" not in recorded.attributes or "block_rows" not in recorded.attributes:
        raise FormatError(
            f"the root of {run} has lost attributes that every run has; bring them back with: "
            f"trajstore repair {shlex.quote(str(run))}"
        )
    checkpoints = _checkpoints(source, target, overwrite=overwrite)
    status: Literal["complete", "interrupted"] = (
        "complete" if recorded.attributes.get("status") == "complete" else "interrupted"
    )
    selection = select(recorded)
    with staged_run(target, overwrite=overwrite, on_place=lambda: _take(checkpoints)) as path:
        write_zarr(
            path,
            recorded,
            selection,
            block_rows=int(recorded.attributes["block_rows"]),
            encoding=str(recorded.attributes["encoding"]),
            memory=memory,
            attributes=_attributes(recorded),
            status=status,
            on_progress=on_progress,
        )
    names = {name for name, _ in group.arrays()}
    return Upgraded(
        path=Path(new),
        from_format=number,
        to_format=FORMAT,
        rows=len(recorded.steps),
        variables=selection.variables,
        status=status,
        checkpoints=len(checkpoints),
        bytes=sum(file.stat().st_size for file in target.rglob("*") if file.is_file()),
        notes=tuple(_notes(recorded, names)),
    )


def _paths(run: str | os.PathLike[str], new: str | os.PathLike[str]) -> tuple[Path, Path]:
    if "://" in os.fspath(run):
        raise InvalidArgument(f"cannot upgrade {run}: copy the run to a local folder first")
    source, target = Path(run).absolute(), local_path(new).absolute()
    if source == target or (target.exists() and source.exists() and target.samefile(source)):
        raise InvalidArgument(f"{new} is the run itself; choose another path for the new run")
    return source, target


def _attributes(run: TiledRun) -> dict[str, Any]:
    """Attributes of the new root: all that the old one has and that stay true."""
    dropped = {*CHANGING, *_OF_THE_WRITER}
    kept = {name: value for name, value in run.attributes.items() if name not in dropped}
    before = ("trajstore_format", "trajstore_version", "updated")
    return kept | {"upgraded": {name: run.attributes.get(name) for name in before}}


def _checkpoints(source: Path, target: Path, *, overwrite: bool) -> list[tuple[Path, Path]]:
    """Checkpoints that the new run shall have, and where."""
    old, new = checkpoint_folder(source), checkpoint_folder(target)
    if old == new:
        return []
    there = _named_as_checkpoints(new)
    if there and not overwrite:
        raise RunExists(
            f"{new} holds {len(there)} checkpoints of another run; remove them, choose another "
            "path, or overwrite them (--overwrite)"
        )
    return [(file, new / file.name) for file in _named_as_checkpoints(old)]


def _named_as_checkpoints(folder: Path) -> list[Path]:
    if not folder.is_dir():
        return []
    return sorted(file for file in folder.iterdir() if CHECKPOINT.fullmatch(file.name))


def _take(checkpoints: list[tuple[Path, Path]]) -> None:
    """Have the other's checkpoints, too: files that are replaced whole, and never written into."""
    for source, target in checkpoints:
        target.parent.mkdir(exist_ok=True)
        target.unlink(missing_ok=True)
        link_or_copy(source, target)


def _notes(run: TiledRun, names: set[str]) -> Iterator[str]:
    if run.attributes.get("status") == "recording":
        yield "the run is or was being recorded: the new one has the rows that were committed"
    for name in sorted(name for name in names - {STEP.name, *VARIABLES} if not coordinate(name)):
        yield f"{name} is an array that is not part of the run, and was left out"
