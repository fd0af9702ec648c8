"""What an HDF5 file holds."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from trajstore.bits import NATIVE_TYPES, NativeType
from trajstore.contents import (
    DEAD_IDS,
    Content,
    Held,
    checked_texts,
    dead_tokens,
    is_blank,
    kept_attributes,
    listed,
    parsed_json,
    token_ids,
)
from trajstore.errors import FormatError
from trajstore.hdf5 import HDF5_KEYS, MASKS, STEPS_KEY, Hdf5File
from trajstore.labels import true_steps
from trajstore.schema import VARIABLES

__all__ = ["hdf5_content"]

Array = npt.NDArray[Any]


def hdf5_content(file: Hdf5File) -> Content:
    """Content of an HDF5 file.

    Raises
    ------
    FormatError
        If it lacks W, or shapes or types disagree.
    """
    variables = {HDF5_KEYS.get(name, name): name for name in VARIABLES}
    found = {key: name for key, name in variables.items() if key in file.keys}
    if "W" not in found and "delta" not in found:
        raise FormatError(
            f"{file.path}: the dataset W is missing; it holds {listed(file.keys)}, and known "
            f"are {', '.join(variables)}"
        )
    notes = []
    own = "trajstore_json" in file.keys
    shape = file.shape("W" if "W" in found else "delta")
    if len(shape) != 3 or not all(shape):
        raise FormatError(
            f"{file.path}: W has shape {shape}, expected (step, token, hidden), none of them 0"
        )
    rows, tokens, hidden = shape
    labelled = next((key for key in (STEPS_KEY, "steps", "step") if key in file.keys), None)
    if labelled is None:
        steps = np.arange(rows, dtype=np.int64)
        notes.append(f"the file labels no steps; its rows were taken as steps 0 to {rows - 1}")
    else:
        labels = _whole(file, labelled, rows)
        steps, corrected = true_steps(labels, trusted=own)
        if corrected:
            notes.append(corrected)
    held = []
    for key, name in found.items():
        lengths = {"step": rows, "token": tokens, "hidden": hidden}
        expected = tuple(lengths[dim] for dim in VARIABLES[name].dims)
        if file.shape(key) != expected:
            raise FormatError(
                f"{file.path}: {key} has shape {file.shape(key)}, expected {expected}"
            )
        native = _hdf5_native(file, key)

        def read(start: int, stop: int, key: str = key, native: NativeType = native) -> Array:
            return np.ascontiguousarray(file.read(key, start, stop)).view(native.bits)

        held.append(
            Held(
                variable=name,
                key=key,
                native=native,
                wanted=native,
                rows=rows,
                row_shape=expected[1:],
                time="after",
                read=read,
            )
        )
    absent = [key for key, name in variables.items() if key not in found and name in HDF5_KEYS]
    if absent:
        notes.append(f"the file does not hold {', '.join(absent)}")
    if steps[0] == 0 and not own:
        for one in held:
            if VARIABLES[one.variable].row0 == "nan" and not is_blank(one):
                raise FormatError(
                    f"{file.path}: {one.key} has values in the row of step 0, where no step had "
                    "been taken; a run holds in each row the gradient, logits and loss of its "
                    "step, and the state after it"
                )
    token = _whole(file, "token", tokens) if "token" in file.keys else np.arange(tokens)
    coordinates: dict[str, Any] = {}
    told = {key: file.read(key) for key in (*MASKS, *DEAD_IDS) if key in file.keys}
    if told:
        coordinates["is_dead"] = dead_tokens(file.path, told, tokens)
    else:
        notes.append("the file does not tell which tokens are dead")
    if "token_count" in file.keys:
        coordinates["token_count"] = _whole(file, "token_count", tokens)
    if "token_text_json" in file.keys:
        texts = parsed_json(file, file.text("token_text_json"))
        coordinates["token_text"] = checked_texts(file, "token_text", texts, tokens)
    attributes = (
        kept_attributes(file, parsed_json(file, file.text("trajstore_json"))) if own else {}
    )
    return Content(
        layout="hdf5",
        steps=steps,
        token=token_ids(file, token),
        hidden=hidden,
        coordinates=coordinates,
        held=tuple(held),
        attributes=attributes,
        exact=own,
        notes=tuple(notes),
    )


def _whole(file: Hdf5File, key: str, length: int) -> Array:
    values = file.read(key) if file.shape(key) == (length,) else None
    if values is None or values.dtype.kind not in "iu":
        raise FormatError(
            f"{file.path}: {key} is {file.dtype(key)} of shape {file.shape(key)}, expected whole "
            f"numbers of shape ({length},)"
        )
    return values.astype(np.int64)


def _hdf5_native(file: Hdf5File, key: str) -> NativeType:
    dtype, said = file.dtype(key), file.native_dtype(key)
    if dtype == np.uint16 and said in (None, "bfloat16", "float16"):
        return NATIVE_TYPES[said or "bfloat16"]
    if dtype.kind == "f" and dtype.name in NATIVE_TYPES:
        return NATIVE_TYPES[dtype.name]
    raise FormatError(
        f"{file.path}: {key} is of type {dtype}"
        f"{f' (native_dtype: {said})' if said else ''}, expected uint16 bits of bfloat16, or "
        f"{', '.join(name for name in NATIVE_TYPES if name != 'bfloat16')}"
    )
