"""Content of a native safetensors file of `trajstore.export`."""

from __future__ import annotations

from typing import Any

import numpy.typing as npt

from trajstore.errors import FormatError
from trajstore.exchange.guessing.detect_arrays import Detection, abridged
from trajstore.exchange.importing.file_rows import checked_labels
from trajstore.exchange.importing.imported_file import (
    ImportedFile,
    ImportedRun,
    ImportedVariable,
    Source,
    checked_texts,
    checked_tokens,
    kept_attributes,
)
from trajstore.formats.safetensors import SafetensorsFile
from trajstore.schema import (
    ALONG_TOKEN,
    COORDINATES,
    OF_PARAMETERS,
    STEP,
    TRAJECTORIES,
    VARIABLES,
    along_token,
)
from trajstore.values.native_types import NATIVE_TYPES

__all__ = ["read_native"]

Array = npt.NDArray[Any]


def read_native(file: SafetensorsFile) -> ImportedFile:
    """Interpret a file of the native layout.

    Raises
    ------
    FormatError
        If a key is missing, or shapes or types contradict.
    """
    missing = [key for key in (STEP.name, "token") if key not in file.keys]
    if missing:
        raise FormatError(
            f"{file.path}: layout native requires {', '.join(missing)}, but the file holds "
            f"{abridged(file.keys)}"
        )
    steps = checked_labels(file.path, STEP.name, _filled(file, STEP.name, ("int64",)))
    token = _filled(file, "token", ("int32", "int64"))
    coordinates: dict[str, Any] = {}
    populations = {
        name: file.vector(name, ("bool",), len(token)).astype(bool)
        for name in along_token(file.keys)
        if name not in COORDINATES
    }
    for name in ALONG_TOKEN:
        entry = COORDINATES[name]
        if entry.dtype == "string":
            if name in file.attributes:
                coordinates[name] = checked_texts(file, name, file.attributes[name], len(token))
        elif name != "token" and name in file.keys:
            coordinates[name] = file.vector(name, (entry.dtype,), len(token))
    parameters = _parameters(file)
    run = ImportedRun(
        steps=steps,
        token=checked_tokens(file, token),
        coordinates=coordinates,
        variables=_variables(file, len(steps), len(token), len(parameters)),
        parameters=parameters,
        populations=populations,
        attributes=kept_attributes(file, file.attributes.get("attributes", "{}")),
    )
    known = (STEP.name, *COORDINATES, *VARIABLES, *populations)
    table = tuple(
        Detection(name=key, dtype=file.dtype(key), shape=file.shape(key),
              kind=key if key in known else "", why="" if key in known else "unknown name")
        for key in file.keys
    )  # fmt: skip
    return ImportedFile(layout="native", runs=(run,), table=table)


def _parameters(file: SafetensorsFile) -> tuple[str, ...]:
    """Names of the parameters, for variables of the model."""
    held = [name for name in OF_PARAMETERS if name in file.keys]
    if not held:
        return ()
    shape = file.shape(held[0])
    if len(shape) != 2 or "parameter" not in file.attributes:
        raise FormatError(
            f"{file.path}: {held[0]} has shape {shape}, but the file does not name its parameters "
            "(metadata parameter)"
        )
    names = checked_texts(file, "parameter", file.attributes["parameter"], shape[1])
    if len(set(names)) != len(names):
        raise FormatError(f"{file.path}: parameter repeats a name, expected distinct names")
    return tuple(names)


def _variables(
    file: SafetensorsFile, rows: int, tokens: int, parameters: int
) -> tuple[ImportedVariable, ...]:
    """Variables of the file, with checked shapes and types."""
    hidden = next((file.shape(key)[-1] for key in TRAJECTORIES if key in file.keys
                   and len(file.shape(key)) == 3), None)  # fmt: skip
    if hidden is None:
        raise FormatError(
            f"{file.path} holds {abridged(file.keys)}, but a run needs one of "
            f"{', '.join(TRAJECTORIES)} of (step, token, hidden)"
        )
    found = []
    lengths = {"step": rows, "token": tokens, "hidden": hidden, "parameter": parameters}
    for name, entry in VARIABLES.items():
        if name not in file.keys:
            continue
        shape, dtype = file.shape(name), file.dtype(name)
        if len(shape) == len(entry.dims):
            for dim, length in zip(entry.dims, shape, strict=True):
                lengths.setdefault(dim, length)  # the first variable defines examples, positions
        elif not lengths.keys() >= set(entry.dims):
            raise FormatError(
                f"{file.path}: {name} has shape {shape}, expected ({', '.join(entry.dims)})"
            )
        expected = tuple(lengths[dim] for dim in entry.dims)
        if shape != expected:
            raise FormatError(f"{file.path}: {name} has shape {shape}, expected {expected}")
        if not all(shape):
            raise FormatError(f"{file.path}: {name} has shape {shape}, expected no length of 0")
        if dtype not in NATIVE_TYPES:
            raise FormatError(
                f"{file.path}: {name} has type {dtype}, expected {', '.join(NATIVE_TYPES)}"
            )
        native = NATIVE_TYPES[dtype]
        found.append(
            ImportedVariable(
                file=file,
                variable=name,
                sources=(Source(key=name),),
                native=native,
                wanted=native,
                rows=rows,
                row_shape=shape[1:],
            )
        )
    return tuple(found)


def _filled(file: SafetensorsFile, key: str, dtypes: tuple[str, ...]) -> Array:
    values = file.vector(key, dtypes)
    if not len(values):
        raise FormatError(f"{file.path}: {key} is empty")
    return values
