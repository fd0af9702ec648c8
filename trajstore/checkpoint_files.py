"""Checks of the checkpoints beside a run: `NAME.ckpt/*.safetensors`, each with its checksums.

The metadata of such a file hold two texts: ``trajstore``, a JSON object that says dtype, shape and
crc32c of every tensor under ``tensors``; and ``crc32c``, that of the first text, in decimal.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import google_crc32c

from trajstore.errors import FormatError
from trajstore.inspection import Problem
from trajstore.safetensors import Entry, SafetensorsFile

__all__ = ["check_checkpoints", "checkpoint_folder"]

_PIECE = 4 << 20

# What the format calls types of torch that a run has no use for, and a random generator has.
_NAMES = {
    "uint8": "U8",
    "int8": "I8",
    "int16": "I16",
    "uint16": "U16",
    "uint32": "U32",
    "uint64": "U64",
}


def checkpoint_folder(run: Path) -> Path:
    """Where the checkpoints of a run lie: beside it, as ``NAME.ckpt``."""
    return run.with_name(f"{run.name.removesuffix('.zarr')}.ckpt")


def check_checkpoints(run: Path) -> Iterator[Problem]:
    """Check every checkpoint of a run.

    Parameters
    ----------
    run : Path

    Yields
    ------
    Problem
        Whose array is None; its path says which checkpoint it is in.
    """
    for path in sorted(checkpoint_folder(run).glob("*.safetensors")):
        try:
            with SafetensorsFile(path) as file:
                yield from _check(file)
        except FormatError as error:
            yield _broken(path, str(error))


def _check(file: SafetensorsFile) -> Iterator[Problem]:
    text = file.metadata.get("trajstore", "")
    if file.metadata.get("crc32c") != str(google_crc32c.value(text.encode())):
        yield _broken(file.path, "its description does not fit its checksum")
        return
    tensors = json.loads(text)["tensors"]
    for name in sorted(tensors.keys() ^ file.entries.keys()):
        where = "missing" if name in tensors else "not in its description"
        yield _broken(file.path, f"the tensor {name} is {where}")
    for name in sorted(tensors.keys() & file.entries.keys()):
        entry, told = file.entries[name], tensors[name]
        dtype = _NAMES.get(told["dtype"], told["dtype"])
        if entry.dtype != dtype or list(entry.shape) != told["shape"]:
            yield _broken(file.path, f"the tensor {name} is not of its type and shape", entry)
        elif _checksum(file.path, entry) != told["crc32c"]:
            yield _broken(file.path, f"the tensor {name} does not fit its checksum", entry)


def _broken(path: Path, fault: str, entry: Entry | None = None) -> Problem:
    span: dict[str, Any] = {}
    if entry is not None:
        span = {"first_byte": entry.begin, "stop_byte": entry.end}
    message = f"the checkpoint is broken: {fault}"
    return Problem(array=None, path=path, message=message, remedy="remove", **span)


def _checksum(path: Path, entry: Entry) -> int:
    """crc32c of a tensor's bytes, read piece by piece."""
    value = 0
    with path.open("rb") as file:
        file.seek(entry.begin)
        left = entry.end - entry.begin
        while left:
            piece = file.read(min(left, _PIECE))
            if not piece:
                raise FormatError(f"{path}: the file ends within a tensor; it was cut short")
            value = google_crc32c.extend(value, piece)
            left -= len(piece)
    return value
