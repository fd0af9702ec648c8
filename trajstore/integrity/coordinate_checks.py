"""Checks of the coordinates: checksums, distinct names, masks that match the counts."""

from __future__ import annotations

import errno
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from trajstore.codec.crc32c_check import is_intact
from trajstore.errors import ObjectStoreError
from trajstore.integrity.checked_metadata import CheckedMetadata
from trajstore.integrity.problem import Problem
from trajstore.schema import along_token
from trajstore.store.metadata.array_document import open_document
from trajstore.store.metadata.object_keys import chunk_key
from trajstore.store.storage.object_file import size_of

__all__ = ["CheckedCoordinates", "check_coordinates"]


_LARGEST = 1 << 28
"""Largest size of a coordinate in bytes: texts of millions of tokens are far below."""


@dataclass(kw_only=True)
class CheckedCoordinates:
    """Readable coordinates of a run, and their problems.

    Attributes
    ----------
    values : dict of str to ndarray
    problems : list of Problem
    chunks, bytes : int
        Checked.
    """

    values: dict[str, npt.NDArray[Any]] = field(default_factory=dict)
    problems: list[Problem] = field(default_factory=list)
    chunks: int = 0
    bytes: int = 0


def check_coordinates(metadata: CheckedMetadata) -> CheckedCoordinates:
    """Compare every coordinate of a run with its checksum, and with each other."""
    found = CheckedCoordinates()
    for name in (*along_token(metadata.arrays), "parameter"):
        if name in metadata.arrays:
            _read(metadata, name, found)
    _compare(metadata, found)
    return found


def _read(metadata: CheckedMetadata, name: str, found: CheckedCoordinates) -> None:
    key = chunk_key(name, 0, 1)
    path = metadata.path / key
    try:
        if size_of(path) > _LARGEST:
            raise OSError(errno.EFBIG, f"it has more than {_LARGEST:,} bytes", str(path))
        data = path.read_bytes()
    except ObjectStoreError:
        raise
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
        array = open_document(metadata.arrays[name], {key.partition("/")[2]: data})
        found.values[name] = np.asarray(array[...])
    except Exception as error:  # codecs raise anything for foreign bytes
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


def _compare(metadata: CheckedMetadata, found: CheckedCoordinates) -> None:
    for name, what in (("token", "ids"), ("parameter", "names")):
        values = found.values.get(name)
        if values is not None and len(np.unique(values)) != values.size:
            message = f"{values.size - len(np.unique(values))} of {values.size} {what} occur twice"
            path = metadata.path / chunk_key(name, 0, 1)
            found.problems.append(Problem(array=name, path=path, message=message))
    dead, count = found.values.get("is_dead"), found.values.get("token_count")
    if dead is None or count is None or dead.shape != count.shape:
        return
    wrong = np.flatnonzero(dead != (count == 0))
    if wrong.size:
        found.problems.append(
            Problem(
                array="is_dead",
                path=metadata.path / chunk_key("is_dead", 0, 1),
                message=f"is_dead and token_count disagree for {wrong.size} tokens, the first at "
                f"position {wrong[0]}",
            )
        )
