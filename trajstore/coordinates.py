"""Checks of the coordinates along `token`: readable, distinct, and of one mind."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from trajstore.documents import Problem, open_document
from trajstore.encoding import is_intact
from trajstore.foreign import open_foreign
from trajstore.inspection import Inspection
from trajstore.metadata import chunk_key
from trajstore.schema import COORDINATES

__all__ = ["Coordinates", "check_coordinates"]


@dataclass(kw_only=True)
class Coordinates:
    """The coordinates of a run that can be read, and what is wrong with them.

    Attributes
    ----------
    values : dict of str to ndarray
    problems : list of Problem
    notes : list of str
    chunks, bytes : int
        Checked.
    """

    values: dict[str, npt.NDArray[Any]] = field(default_factory=dict)
    problems: list[Problem] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    chunks: int = 0
    bytes: int = 0


def check_coordinates(inspection: Inspection) -> Coordinates:
    """Read every coordinate of a run against its checksum, and compare them.

    Parameters
    ----------
    inspection : Inspection
    """
    found = Coordinates()
    for name in COORDINATES:
        if name in inspection.arrays:
            _read(inspection, name, found)
    token = found.values.get("token")
    path = inspection.path
    if token is not None and len(np.unique(token)) != token.size:
        message = f"{token.size - len(np.unique(token))} of {token.size} ids occur twice"
        found.problems.append(
            Problem(array="token", path=path / chunk_key("token", 0, 1), message=message)
        )
    dead, count = found.values.get("is_dead"), found.values.get("token_count")
    if dead is not None and count is not None and dead.shape == count.shape:
        wrong = np.flatnonzero(dead != (count == 0))
        if wrong.size:
            found.problems.append(
                Problem(
                    array="is_dead",
                    path=path / chunk_key("is_dead", 0, 1),
                    message=f"{wrong.size} tokens are dead and occur, or live and never occur by "
                    f"token_count; the first is at position {wrong[0]}",
                )
            )
    return found


def _read(inspection: Inspection, name: str, found: Coordinates) -> None:
    document = inspection.arrays[name]
    described = open_document(document)
    key = chunk_key(name, 0, 1)
    path = inspection.path / key
    keys = document["chunk_key_encoding"]
    if (
        tuple(described.chunks) != tuple(described.shape)
        or described.shards is not None
        or keys != {"name": "default", "configuration": {"separator": "."}}
        or document["codecs"][-1].get("name") != "crc32c"
    ):
        _read_foreign(inspection, name, found)
        return
    try:
        data = path.read_bytes()
    except OSError as error:
        missing = isinstance(error, FileNotFoundError)
        message = "its values are missing" if missing else f"cannot be read: {error.strerror}"
        found.problems.append(Problem(array=name, path=path, message=message))
        return
    found.chunks += 1
    found.bytes += len(data)
    try:
        if not is_intact(data):
            raise ValueError("the checksum does not fit")
        array = open_document(document, {key.partition("/")[2]: data})
        found.values[name] = np.asarray(array[...])
    except Exception as error:  # whatever the codecs raise for bytes that nobody wrote
        found.problems.append(
            Problem(
                array=name,
                block=0,
                first_byte=0,
                stop_byte=len(data),
                path=path,
                message=f"its values are broken ({error})",
            )
        )


def _read_foreign(inspection: Inspection, name: str, found: Coordinates) -> None:
    """Read a coordinate that is stored in a way of its own, through zarr."""
    array = open_foreign(inspection, name, found.problems, found.notes)
    if array is None:
        return
    try:
        found.values[name] = np.asarray(array[...])
    except Exception as error:  # whatever its codecs raise
        message = f"its values cannot be read ({error})"
        found.problems.append(Problem(array=name, path=inspection.path / name, message=message))
