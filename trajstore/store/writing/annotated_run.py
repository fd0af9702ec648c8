"""Annotations add token coordinates to a run and keep its rows.

A new run is built from hard links under a temporary name, and exchanged with the old one
atomically. Readers see one or the other. The content digest covers the coordinates, so that of the
new run differs. Before, the stored rows are compared with the old digest.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from trajstore.arguments import checks_types
from trajstore.errors import InvalidArgument, RunExists
from trajstore.schema import ALONG_TOKEN, along_token
from trajstore.store.metadata.object_keys import METADATA_KEY
from trajstore.store.metadata.zarr_json import RunMetadata
from trajstore.store.reading.open_group import open_group, whole
from trajstore.store.storage.remote_path import RemotePath
from trajstore.store.writing.create import staged_run
from trajstore.store.writing.linked_run import link_run
from trajstore.store.writing.new_run import coordinate_objects, token_coordinates
from trajstore.store.writing.resumed_run import check_run, resumed_run

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
