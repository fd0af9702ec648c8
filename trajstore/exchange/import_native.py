"""What a safetensors file of `trajstore.export` holds, under its own names."""

from __future__ import annotations

from typing import Any

import numpy.typing as npt

from trajstore.errors import FormatError
from trajstore.exchange.imported_file import (
    ImportedFile,
    abridged,
    checked_texts,
    checked_tokens,
    imported_variables,
    kept_attributes,
)
from trajstore.exchange.step_labels import true_steps
from trajstore.formats.safetensors import SafetensorsFile
from trajstore.schema import COORDINATES, STEP, VARIABLES

__all__ = ["read_native"]

Array = npt.NDArray[Any]


def read_native(file: SafetensorsFile) -> ImportedFile:
    """Understand a file of the native layout.

    Raises
    ------
    FormatError
        If something is missing, or shapes or types disagree.
    """
    missing = [key for key in (STEP.name, "token") if key not in file.keys]
    if missing:
        raise FormatError(
            f"{file.path}: layout native requires {', '.join(missing)}; "
            f"it holds {abridged(file.keys)}"
        )
    steps, _ = true_steps(_filled(file, STEP.name, ("int64",)), trusted=True)
    token = _filled(file, "token", ("int32", "int64"))
    variables = imported_variables(
        file,
        {name: (name, "after") for name in VARIABLES if name in file.keys},
        rows=len(steps),
        tokens=len(token),
    )
    coordinates: dict[str, Any] = {}
    for name, entry in COORDINATES.items():
        if entry.dtype == "string":
            if name in file.metadata:
                coordinates[name] = checked_texts(file, name, file.metadata[name], len(token))
        elif name != "token" and name in file.keys:
            coordinates[name] = file.vector(name, (entry.dtype,), len(token))
    attributes = kept_attributes(file, file.metadata.get("attributes", "{}"))
    return ImportedFile(
        layout="native",
        steps=steps,
        token=checked_tokens(file, token),
        coordinates=coordinates,
        variables=variables,
        attributes=attributes,
        exact=True,
    )


def _filled(file: SafetensorsFile, key: str, dtypes: tuple[str, ...]) -> Array:
    values = file.vector(key, dtypes)
    if not len(values):
        raise FormatError(f"{file.path}: {key} is empty")
    return values
