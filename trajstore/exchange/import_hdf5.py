"""What an HDF5 file holds: one of `trajstore.export`, or of a loop with h5py."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from trajstore.errors import FormatError
from trajstore.exchange.dead_tokens import dead_tokens
from trajstore.exchange.imported_file import (
    ImportedFile,
    abridged,
    checked_texts,
    checked_tokens,
    first_row_is_blank,
    imported_variables,
    kept_attributes,
)
from trajstore.exchange.key_names import DEAD_IDS, HDF5_KEYS, HDF5_TEXTS, MASKS, STEPS_KEY
from trajstore.exchange.step_labels import true_steps, unlabelled_steps
from trajstore.formats.hdf5 import Hdf5File
from trajstore.schema import VARIABLES

__all__ = ["read_hdf5"]

Array = npt.NDArray[Any]


def read_hdf5(file: Hdf5File) -> ImportedFile:
    """Understand an HDF5 file.

    Raises
    ------
    FormatError
        If it lacks W, or shapes or types disagree.
    """
    known = {HDF5_KEYS.get(name, name): name for name in VARIABLES}
    matrix = next((key for key in ("W", "delta") if key in file.keys), None)
    if matrix is None:
        raise FormatError(
            f"{file.path}: the dataset W is missing; it holds {abridged(file.keys)}, and known "
            f"are {', '.join(known)}"
        )
    shape = file.shape(matrix)
    if len(shape) != 3 or not all(shape):
        raise FormatError(
            f"{file.path}: W has shape {shape}, expected (step, token, hidden), none of them 0"
        )
    rows, tokens = shape[:2]
    # A file of trajstore says which steps, types and dead tokens it means.
    own = HDF5_TEXTS["attributes"] in file.keys
    steps, note = _steps(file, rows, trusted=own)
    notes = [note] if note else []
    variables = imported_variables(
        file,
        {key: (name, "after") for key, name in known.items() if key in file.keys},
        rows=rows,
        tokens=tokens,
    )
    absent = [key for key, name in known.items() if key not in file.keys and name in HDF5_KEYS]
    if absent:
        notes.append(f"the file does not hold {', '.join(absent)}")
    if steps[0] == 0 and not own:
        for held in variables:
            if VARIABLES[held.variable].row0 == "nan" and not first_row_is_blank(held):
                raise FormatError(
                    f"{file.path}: {held.key} has values in the row of step 0, where no step had "
                    "been taken; a run holds in each row the gradient, logits and loss of its "
                    "step, and the state after it"
                )
    token = _whole(file, "token", tokens) if "token" in file.keys else np.arange(tokens)
    coordinates = _coordinates(file, tokens)
    attributes = kept_attributes(file, file.text(HDF5_TEXTS["attributes"])) if own else {}
    return ImportedFile(
        layout="hdf5",
        steps=steps,
        token=checked_tokens(file, token),
        coordinates=coordinates,
        variables=variables,
        attributes=attributes,
        exact=own,
        notes=tuple(notes),
    )


def _steps(file: Hdf5File, rows: int, *, trusted: bool) -> tuple[Array, str | None]:
    for key in (STEPS_KEY, "steps", "step"):
        if key in file.keys:
            return true_steps(_whole(file, key, rows), trusted=trusted)
    return unlabelled_steps(rows)


def _coordinates(file: Hdf5File, tokens: int) -> dict[str, Any]:
    coordinates: dict[str, Any] = {}
    told = {key: file.read(key) for key in (*MASKS, *DEAD_IDS) if key in file.keys}
    if told:
        coordinates["is_dead"] = dead_tokens(file.path, told, tokens)
    if "token_count" in file.keys:
        coordinates["token_count"] = _whole(file, "token_count", tokens)
    if HDF5_TEXTS["token_text"] in file.keys:
        text = file.text(HDF5_TEXTS["token_text"])
        coordinates["token_text"] = checked_texts(file, "token_text", text, tokens)
    return coordinates


def _whole(file: Hdf5File, key: str, length: int) -> Array:
    values = file.read(key) if file.shape(key) == (length,) else None
    if values is None or values.dtype.kind not in "iu":
        raise FormatError(
            f"{file.path}: {key} is {file.dtype(key)} of shape {file.shape(key)}, expected whole "
            f"numbers of shape ({length},)"
        )
    return values.astype(np.int64)
