"""Checks of the coordinates: checksums, distinct names, masks that match the counts."""

from __future__ import annotations

import errno
from collections.abc import Iterator
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt

from trajstore.codec.chunk import is_intact
from trajstore.errors import ObjectStoreError
from trajstore.integrity.checked_metadata import CheckedMetadata
from trajstore.integrity.chunk_checks import CheckedChunks
from trajstore.integrity.problem import Problem
from trajstore.schema import NAMES, along_token
from trajstore.store.metadata.metadata_form import chunk_key
from trajstore.store.metadata.zarr_json import open_metadata
from trajstore.store.storage.atomic import size_of

Array = npt.NDArray[Any]

_LARGEST = 1 << 28
"""Largest size of a coordinate in bytes: texts of millions of tokens are far below."""


def check_coordinates(metadata: CheckedMetadata) -> CheckedChunks:
    """Compare every coordinate of a run with its checksum, and with each other."""
    found = CheckedChunks()
    values = {
        name: array
        for name in (*along_token(metadata.arrays), *NAMES)
        if name in metadata.arrays
        if (array := _read(metadata, name, found)) is not None
    }
    found.problems += _contradictions(metadata, values)
    return found


def _read(metadata: CheckedMetadata, name: str, found: CheckedChunks) -> Array | None:
    """Values of a coordinate; None if they are missing or broken."""
    key = chunk_key(name, 0, 1)
    path = metadata.path / key
    problem = partial(Problem, array=name, path=path)
    try:
        if size_of(path) > _LARGEST:
            raise OSError(errno.EFBIG, f"it has more than {_LARGEST:,} bytes", str(path))
        data = path.read_bytes()
    except ObjectStoreError:
        raise
    except OSError as error:
        missing = isinstance(error, FileNotFoundError)
        message = "its values are missing" if missing else f"cannot be read: {error.strerror}"
        found.problems.append(problem(message=message))
        return None
    found.chunks += 1
    found.bytes += len(data)
    try:
        if not is_intact(data):
            raise ValueError("the checksum does not fit")
        array = open_metadata(metadata.arrays[name], {key.partition("/")[2]: data})
        return np.asarray(array[...])
    except Exception as error:  # codecs raise anything for foreign bytes
        message = f"its values are broken ({error})"
        found.problems.append(problem(block=0, first_byte=0, stop_byte=len(data), message=message))
        return None


def _contradictions(metadata: CheckedMetadata, values: dict[str, Array]) -> Iterator[Problem]:
    def problem(name: str, message: str) -> Problem:
        path = metadata.path / chunk_key(name, 0, 1)
        return Problem(array=name, path=path, message=message)

    for name, what in (("token", "ids"), *((one, "names") for one in NAMES)):
        if name in values and (twice := values[name].size - len(np.unique(values[name]))):
            yield problem(name, f"{twice} of {values[name].size} {what} occur twice")
    dead, count = values.get("is_dead"), values.get("token_count")
    if dead is None or count is None or dead.shape != count.shape:
        return
    wrong = np.flatnonzero(dead != (count == 0))
    if wrong.size:
        yield problem(
            "is_dead",
            f"is_dead and token_count disagree for {wrong.size} tokens, the first at position "
            f"{wrong[0]}",
        )
