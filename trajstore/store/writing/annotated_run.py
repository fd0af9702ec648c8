"""Annotations: a run gets more coordinates of its tokens; its rows stay.

The run is made anew beside its place, of hard links, and exchanged with the old one: a reader sees
the one or the other. Coordinates are part of what the content digest is made of, so that of the new
run is another; what is stored is first held against the old one.
"""

from __future__ import annotations

import json
import os
import shlex
import shutil
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from trajstore.errors import FormatError, InvalidArgument, RunExists
from trajstore.schema import ALONG_TOKEN, along_token
from trajstore.store.metadata.fingerprint import coordinate_digests
from trajstore.store.metadata.object_keys import DOCUMENT, chunk_key
from trajstore.store.metadata.zarr_json import RunMetadata
from trajstore.store.reading.open_group import open_group
from trajstore.store.storage.atomic import link_or_copy, put
from trajstore.store.storage.remote_path import RemotePath
from trajstore.store.writing.create import staged_run
from trajstore.store.writing.new_run import coordinate_objects, token_coordinates
from trajstore.store.writing.resumed_run import check_run, resumed_run, stored_fingerprints

__all__ = ["annotate_run", "check_unlabeled"]

_MEMORY = 1 << 40  # no row is written, so no buffer is made


def annotate_run(
    path: str | os.PathLike[str],
    *,
    is_dead: npt.ArrayLike | None = None,
    token_count: npt.ArrayLike | None = None,
    token_text: npt.ArrayLike | None = None,
    overwrite: bool = False,
) -> tuple[str, ...]:
    """Add coordinates along ``token`` to a run that is there.

    Parameters
    ----------
    path : path-like
        A local run, which nobody writes to meanwhile.
    is_dead, token_count, token_text : array_like, (token,), optional
        In the order of the run's tokens.
    overwrite : bool
        Replace coordinates that it has.

    Returns
    -------
    tuple of str
        Coordinates that were added, or replaced.

    Raises
    ------
    RunNotFound, FormatError
        If there is no run, or one that is not whole.
    RunExists
        If it has such a coordinate, and `overwrite` is not set.
    RunLocked
        If another process writes to it.
    InvalidArgument
        If nothing is given, or not a value for each token, or a token is dead and occurs.

    Examples
    --------
    >>> annotate_run("gatsby.zarr", token_text=["?"] * 128, overwrite=True)
    ('token_text',)
    """
    run = _local_run(path)
    given = {"is_dead": is_dead, "token_count": token_count, "token_text": token_text}
    wanted = {name: values for name, values in given.items() if values is not None}
    if not wanted:
        raise InvalidArgument("nothing to add: give is_dead, token_count or token_text")
    with staged_run(run, overwrite=True) as new:
        _make(run, new, wanted, overwrite=overwrite)
    return tuple(wanted)


def check_unlabeled(run: str | os.PathLike[str], coordinates: Iterable[str]) -> None:
    """Refuse to add coordinates that a run has.

    Raises
    ------
    RunNotFound, FormatError
        If there is no run.
    RunExists
        If it has one of them.
    InvalidArgument
        If it is in an object store.
    """
    taken = sorted(set(open_group(_local_run(run))) & set(coordinates))
    if taken:
        raise RunExists(f"{run} has {', '.join(taken)} already; replace them with --overwrite")


def _local_run(path: str | os.PathLike[str]) -> Path:
    place = check_run(path)
    if isinstance(place, RemotePath):
        # Of the documents of all arrays and the root, and of a coordinate that keeps its name, a
        # store replaces one at a time: a reader in between would have some of the old and some new.
        raise InvalidArgument(
            f"cannot annotate {path}: an object store cannot exchange a run at once; copy the run "
            "to a local folder first, annotate it there, and copy it to a new address"
        )
    return Path(os.path.realpath(place))


def _make(run: Path, new: Path, wanted: Mapping[str, npt.ArrayLike], *, overwrite: bool) -> None:
    stored = resumed_run(run, None, attributes=None, memory=_MEMORY, threads=None)
    root = json.loads((run / DOCUMENT).read_bytes())
    group = open_group(run)
    there: dict[str, Any] = {name: np.asarray(group[name]) for name in ALONG_TOKEN if name in group}
    if "token" not in there:
        raise FormatError(
            f"{run} has lost its tokens; see: trajstore verify {shlex.quote(str(run))}"
        )
    if not overwrite:
        check_unlabeled(run, wanted)
    coordinates = _in_order({**there, **wanted})
    made, chunks = coordinate_objects({name: coordinates[name] for name in wanted})
    before = root["consolidated_metadata"]["metadata"]
    # Also the populations, which stay as they are.
    auxiliary = " ".join(name for name in along_token({*before, *wanted}) if name != "token")
    arrays = {name: _with_coordinates(before[name], auxiliary) for name in before}
    arrays |= made
    metadata = RunMetadata(arrays, stored.metadata.attributes)
    replaced = {f"{name}/{DOCUMENT}" for name in arrays} | {DOCUMENT}
    replaced |= {chunk_key(name, 0, 1) for name in wanted}
    _link(run, new, replaced)
    for name in wanted:
        (new / name).mkdir(exist_ok=True)
        key = chunk_key(name, 0, 1)
        put(new / key, [chunks[key]], fsync=False)
    for name in metadata.names():
        put(new / name / DOCUMENT, [metadata.array(name, stored.rows)], fsync=False)
    held = stored_fingerprints(new, metadata, stored.arrays, stored.layout, stored.rows)
    status = root["attributes"]["status"]
    put(new / DOCUMENT, [metadata.root(stored.rows, status, held[-1].attributes())], fsync=False)
    _check_kept(new, metadata, run, wanted)


def _in_order(coordinates: Mapping[str, npt.ArrayLike]) -> dict[str, npt.ArrayLike]:
    """Coordinates in the order of the schema, checked against each other."""
    ordered = {name: coordinates[name] for name in ALONG_TOKEN if name in coordinates}
    checked = token_coordinates(ordered.pop("token"), populations=None, **ordered)
    if "is_dead" in checked and "token_count" in checked:
        dead, counts = np.asarray(checked["is_dead"], bool), np.asarray(checked["token_count"])
        wrong = np.flatnonzero(dead != (counts == 0))
        if wrong.size:
            raise InvalidArgument(
                f"{wrong.size} tokens are dead and occur, or live and never occur by token_count; "
                f"the first is at position {wrong[0]}; replace both coordinates, or none"
            )
    return checked


def _with_coordinates(document: dict[str, Any], auxiliary: str) -> dict[str, Any]:
    """Document of an array that says its coordinates; others stay as they are."""
    if "token" not in (document.get("dimension_names") or ()) or "native_dtype" not in document.get(
        "attributes", ()
    ):
        return document
    return document | {"attributes": document["attributes"] | {"coordinates": auxiliary}}


def _link(run: Path, new: Path, replaced: set[str]) -> None:
    """Have all files of a run in another folder, too, but those that are made anew."""
    for parent, folders, files in os.walk(run):
        below = Path(parent).relative_to(run)
        (new / below).mkdir(parents=True, exist_ok=True)
        for name in [*files, *(name for name in folders if (Path(parent) / name).is_symlink())]:
            if (below / name).as_posix() in replaced:
                continue
            source = Path(parent) / name
            if source.is_symlink():
                shutil.copy(source, new / below / name, follow_symlinks=False)
            else:
                link_or_copy(source, new / below / name)


def _check_kept(
    new: Path, metadata: RunMetadata, run: Path, wanted: Mapping[str, npt.ArrayLike]
) -> None:
    """Insist that every other coordinate is stored as it was."""
    names = [name for name in metadata.names() if name not in wanted]
    if coordinate_digests(new, names) != coordinate_digests(run, names):
        raise FormatError(f"{run} has changed while it was annotated; try again")
