"""Content of a file that holds a whole run: an export in the layout native or hdf5."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy.typing as npt

from trajstore.errors import FormatError
from trajstore.exchange.file_rows import checked_labels
from trajstore.exchange.guessed_layout import abridged
from trajstore.exchange.imported_run import (
    ImportedFile,
    ImportedRun,
    ImportedVariable,
    TableLine,
    reader,
)
from trajstore.exchange.layouts import KEPT_ATTRIBUTES, Column, Layout, layout_of, text_key
from trajstore.exchange.token_tables import TokenTable, token_arrays, token_table
from trajstore.formats.array_file import ArrayFile, labels_of
from trajstore.schema import (
    COORDINATES,
    NAMES,
    OPTIMIZER_STATE,
    STEP,
    TRAJECTORIES,
    VARIABLES,
    along_token,
    variables_of,
)
from trajstore.strict_json import parse
from trajstore.values.native_types import NATIVE_TYPES

Array = npt.NDArray[Any]

_DEEPEST_JSON = 32
_TEXTS = ("attributes", "variables", "token_text", *NAMES)


def whole_layout(file: ArrayFile) -> Layout | None:
    """The layout of an export of a whole run; None for other files."""
    if file.format == "safetensors" and file.attributes.get("format") == "trajstore":
        return layout_of("native")
    hdf5 = layout_of("hdf5")
    return hdf5 if file.format == "hdf5" and text_key(hdf5, "attributes") in file.keys else None


def read_whole(file: ArrayFile, layout: Layout) -> ImportedFile:
    """Interpret an export of a whole run, which has the required keys of its layout.

    Raises
    ------
    FormatError
        If shapes, types or marks of tokens contradict.
    """
    texts = _texts(file, layout)
    attributes = _kept_attributes(file, texts.get("attributes", "{}"))
    steps, token = (_vector(file, key, ("int64", "int32")) for key in layout.required)
    for key, values in zip(layout.required, (steps, token), strict=True):
        if not len(values):
            raise FormatError(f"{file.path}: {key} is empty")
    keys = {name: name for name in variables_of(attributes)}
    keys |= {column.variable: column.key for column in layout.columns}
    names = _names(file, texts)
    populations = {
        name: _vector(file, name, ("bool",), len(token))
        for name in along_token(file.keys)
        if name not in COORDINATES
    }
    tokens = _tokens(file, layout, texts, len(token))
    run = ImportedRun(
        steps=checked_labels(file.path, layout.required[0], steps),
        token=tokens.token,
        coordinates=tokens.coordinates,
        variables=_variables(
            file,
            keys,
            {"step": len(steps), "token": len(token)}
            | {name: len(values) for name, values in names.items()},
        ),
        names=names,
        populations=populations,
        attributes=attributes,
    )
    labels = dict(zip((STEP.name, "token"), layout.required, strict=True))
    kinds = {key: name for name, key in (keys | labels).items()}
    kinds |= {key: key for key in populations} | dict(layout.marks)
    table = tuple(
        TableLine(name=key, dtype=file.dtype(key), shape=file.shape(key),
                  kind=kinds.get(key, ""), why="" if key in kinds else "unknown name")
        for key in file.keys
        if file.format == "safetensors" or key not in [text_key(layout, name) for name in _TEXTS]
    )  # fmt: skip
    return ImportedFile(layout=layout.name, runs=(run,), table=table)


def _checked_texts(file: ArrayFile, name: str, text: str, length: int) -> list[str]:
    """Parse the strings of a coordinate from a JSON text."""
    texts = _parsed(file, text)
    sound = isinstance(texts, list) and all(isinstance(text, str) for text in texts)
    if sound and len(texts) == length:
        try:
            "".join(texts).encode()
            return list(texts)
        except UnicodeEncodeError:
            sound = False
    raise FormatError(f"{file.path}: {name} must hold {length} strings")


def _kept_attributes(file: ArrayFile, text: str) -> dict[str, Any]:
    """Parse the attributes that remain valid for an imported run, from a JSON text."""
    attributes = _parsed(file, text)
    if not isinstance(attributes, dict):
        raise FormatError(
            f"{file.path}: its attributes are {type(attributes).__name__}, expected a JSON object"
        )
    kept = {name: attributes[name] for name in KEPT_ATTRIBUTES if name in attributes}
    for name, value in kept.items():
        kind = {"created": str, OPTIMIZER_STATE: list}.get(name, dict)
        if not isinstance(value, kind):
            wanted = {str: "a string", list: "a list", dict: "an object"}[kind]
            raise FormatError(
                f"{file.path}: its attribute {name} is {type(value).__name__}, expected {wanted}"
            )
    return kept


def _parsed(file: ArrayFile, text: str) -> Any:
    """Value of a JSON text, if the attributes of a run can hold it."""
    try:
        value = parse(text)
    except ValueError as error:
        raise FormatError(f"{file.path}: cannot read its attributes ({error})") from None
    if not _is_shallow(value, _DEEPEST_JSON):
        raise FormatError(
            f"{file.path}: its attributes are nested deeper than {_DEEPEST_JSON}, or hold a number "
            "beyond float64"
        )
    return value


def _is_shallow(value: Any, depth: int) -> bool:
    if not isinstance(value, dict | list):
        # A number beyond float64 is parsed as infinity, which JSON cannot represent.
        return not isinstance(value, float) or math.isfinite(value)
    inner: Any = value.values() if isinstance(value, Mapping) else value
    return depth > 0 and all(_is_shallow(item, depth - 1) for item in inner)


def _texts(file: ArrayFile, layout: Layout) -> dict[str, str]:
    """Texts of JSON: metadata of safetensors, bytes in HDF5."""
    if layout.format == "safetensors":
        return dict(file.attributes)
    texts = {}
    for name in _TEXTS:
        key = text_key(layout, name)
        if key in file.keys:
            try:
                texts[name] = _vector(file, key, ("uint8",)).tobytes().decode()
            except UnicodeDecodeError as error:
                raise FormatError(f"{file.path}: cannot read {key} ({error})") from None
    return texts


def _tokens(file: ArrayFile, layout: Layout, texts: Mapping[str, str], tokens: int) -> TokenTable:
    """Ids, dead tokens, on which all marks must agree, counts and texts, as the file has them."""
    kinds = {layout.required[1]: "token"} | dict(layout.marks)
    columns = [Column(key=key, variable=kind) for key, kind in kinds.items() if key in file.keys]
    table = token_table(
        file.path, tokens, token_arrays(file, columns), {}, sizes={}, rows_of="a row", by_place=True
    )
    if {column.kind for column in columns} <= {"token", "token_count"}:
        table.coordinates.pop("is_dead", None)  # the run did not say so
    if "token_text" in texts:
        text = _checked_texts(file, "token_text", texts["token_text"], tokens)
        table.coordinates["token_text"] = text
    return table


def _names(file: ArrayFile, texts: Mapping[str, str]) -> dict[str, tuple[str, ...]]:
    """Coordinates of names, for variables along them."""
    coordinates = {}
    for name, needing in NAMES.items():
        for key in [key for key in needing if key in file.keys][:1]:
            shape = file.shape(key)
            if len(shape) != 2 or name not in texts:
                raise FormatError(
                    f"{file.path}: {key} has shape {shape}, but the file does not name its "
                    f"{name}s (text {name})"
                )
            names = _checked_texts(file, name, texts[name], shape[1])
            if len(set(names)) != len(names):
                raise FormatError(f"{file.path}: {name} repeats a name, expected distinct names")
            coordinates[name] = tuple(names)
    return coordinates


def _variables(
    file: ArrayFile, keys: Mapping[str, str], lengths: dict[str, int]
) -> tuple[ImportedVariable, ...]:
    """Variables of the file. The first one with a dimension defines its length, unless given."""
    variables = []
    for name, key in keys.items():
        dims = VARIABLES[name].dims
        if key not in file.keys:
            continue
        shape, dtype = file.shape(key), file.dtype(key)
        if len(shape) == len(dims):
            lengths = dict(zip(dims, shape, strict=True)) | lengths
        expected = tuple(lengths.get(dim, dim) for dim in dims)
        if shape != expected or not all(shape):
            raise FormatError(
                f"{file.path}: {key} has shape {shape}, expected ({', '.join(map(str, expected))}) "
                "and no length of 0"
            )
        if dtype not in NATIVE_TYPES:
            raise FormatError(
                f"{file.path}: {key} has type {dtype}, expected {', '.join(NATIVE_TYPES)}"
            )
        native = NATIVE_TYPES[dtype]
        variables.append(
            ImportedVariable(
                variable=name,
                keys=(key,),
                read=reader(file, key, native),
                native=native,
                wanted=native,
                rows=shape[0],
                row_shape=shape[1:],
            )
        )
    if not any(variable.variable in TRAJECTORIES for variable in variables):
        raise FormatError(
            f"{file.path} holds {abridged(file.keys)}, but a run needs one of "
            f"{', '.join(TRAJECTORIES)} of (step, token, hidden)"
        )
    return tuple(variables)


def _vector(file: ArrayFile, key: str, dtypes: tuple[str, ...], length: int | None = None) -> Array:
    """Values of a 1-D array of one of the types, of any length if none is given."""
    dtype, shape = file.dtype(key), file.shape(key)
    if dtype not in dtypes or len(shape) != 1 or length not in (None, *shape):
        raise FormatError(
            f"{file.path}: {key} is {dtype} of shape {shape}, expected {' or '.join(dtypes)} of "
            f"shape ({'any' if length is None else length},)"
        )
    return labels_of(file, key)
