"""The documents of a run's arrays, each by itself: read strictly, and judged by the schema."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any, Literal

import zarr
from zarr.core.buffer import default_buffer_prototype
from zarr.core.buffer.cpu import Buffer
from zarr.storage import MemoryStore

from trajstore.bits import NATIVE_TYPES, STEP_TYPE
from trajstore.errors import FormatError
from trajstore.metadata import DOCUMENT
from trajstore.schema import COORDINATES, STEP, VARIABLES, Coordinate, Variable
from trajstore.stored import stored_array

__all__ = [
    "Document",
    "Problem",
    "block_rows",
    "differences",
    "entry_of",
    "faults",
    "is_canonical",
    "is_length",
    "is_moment",
    "is_series",
    "open_document",
    "parse",
    "read_document",
    "same",
    "with_rows",
]

Document = dict[str, Any]

_LONGEST = 1 << 48
_ARRAY_KEYS = {
    "zarr_format",
    "node_type",
    "shape",
    "data_type",
    "chunk_grid",
    "chunk_key_encoding",
    "fill_value",
    "codecs",
    "attributes",
    "dimension_names",
}


@dataclass(frozen=True, kw_only=True)
class Problem:
    """Something that is wrong with a run.

    Attributes
    ----------
    array : str or None
        None for what concerns the run as a whole.
    block : int or None
        Of the array, where it lies in one.
    first_byte, stop_byte : int or None
        What is broken in the file, from the first byte up to, not including, the last.
    path : Path
        The file.
    message : str
        One sentence.
    remedy : {'rewrite', 'cut', 'remove', 'none'}
        What a repair can do: write the document anew from what else is known, drop the rows from
        this block on, remove the file, or nothing.
    """

    array: str | None
    path: Path
    message: str
    remedy: Literal["rewrite", "cut", "remove", "none"] = "none"
    block: int | None = None
    first_byte: int | None = None
    stop_byte: int | None = None

    def __str__(self) -> str:
        where = [] if self.array is None else [self.array]
        if self.block is not None:
            where.append(f"block {self.block}")
        if self.first_byte is not None:
            where.append(f"bytes {self.first_byte} to {self.stop_byte}")
        return f"{', '.join(where) or self.path.name}: {self.message}"


def read_document(path: Path, array: str | None) -> Document | Problem:
    """Read a JSON object, strictly; what is wrong where it is none.

    Parameters
    ----------
    path : Path
    array : str or None
        Whose document it is; None for the root.
    """
    first: int | None = None
    size = 0
    try:
        data = path.read_bytes()
        size = len(data)
        value = parse(data.decode())
        if isinstance(value, dict):
            return value
        message = "it is no JSON object"
    except FileNotFoundError:
        message = "it is missing"
    except OSError as error:
        # What the system refuses today it may give tomorrow: nothing is written in its place.
        message = f"{DOCUMENT} cannot be read: {error.strerror or error}"
        return Problem(array=array, path=path, message=message, remedy="none")
    except UnicodeDecodeError as error:
        first, message = error.start, f"it is no JSON: {error.reason} at byte {error.start}"
    except json.JSONDecodeError as error:
        first, message = error.pos, f"it is no JSON: {error}"
    except (ValueError, RecursionError) as error:
        message = f"it is no JSON: {error}"
    return Problem(
        array=array,
        path=path,
        first_byte=first,
        stop_byte=None if first is None else size,
        message=f"{DOCUMENT} cannot be read: {message}",
        remedy="rewrite",
    )


def parse(text: str) -> Any:
    """Value of a JSON text that has no name twice, and no NaN or infinity.

    Raises
    ------
    ValueError
        If it is none.
    """
    return json.loads(text, object_pairs_hook=_distinct, parse_constant=_no_constant)


def _distinct(pairs: list[tuple[str, Any]]) -> Document:
    made = dict(pairs)
    if len(made) != len(pairs):
        raise ValueError("a name occurs twice in it")
    return made


def _no_constant(name: str) -> Any:
    raise ValueError(f"{name} is no JSON value")


def open_document(
    document: Document, objects: Mapping[str, bytes] | None = None
) -> zarr.Array[Any]:
    """Array that a document describes, over the objects that are given, by key.

    Raises
    ------
    FormatError
        If zarr does not understand it.
    """
    contents = {DOCUMENT: json.dumps(document).encode(), **(objects or {})}
    store = MemoryStore({key: Buffer.from_bytes(data) for key, data in contents.items()})
    try:
        return zarr.open_array(store, mode="r", zarr_format=3)
    except Exception as error:  # whatever zarr raises for a document that nobody wrote
        raise FormatError(f"zarr cannot open it: {error}") from error


def is_canonical(document: Document) -> bool:
    """Whether zarr would write the document as it is: it passes over names that it does not know.

    Raises
    ------
    FormatError
        If zarr does not understand it.
    """
    metadata = open_document(document).metadata
    written = metadata.to_buffer_dict(default_buffer_prototype())[DOCUMENT].to_bytes()
    return same(json.loads(written), document)


def entry_of(name: str) -> Variable | Coordinate | None:
    """What the schema says of an array; None if it does not know it."""
    return STEP if name == STEP.name else VARIABLES.get(name) or COORDINATES.get(name)


def is_series(name: str) -> bool:
    """Whether an array grows with the rows."""
    return name == STEP.name or name in VARIABLES


def is_length(value: Any) -> bool:
    """Whether a JSON value can be the length of a dimension, which is below 2**48."""
    return type(value) is int and 0 <= value < _LONGEST


def block_rows(document: Document) -> int:
    """Rows that an array stores together: those of a shard, or of a chunk without shards."""
    return int(document["chunk_grid"]["configuration"]["chunk_shape"][0])


def with_rows(name: str, document: Document, rows: int) -> Document:
    """The document with another number of rows, if it has any."""
    if not is_series(name):
        return document
    return document | {"shape": [rows, *document["shape"][1:]]}


def same(one: Any, other: Any) -> bool:
    """Whether two JSON values are the same; 1, 1.0 and true are three values."""
    return bool(json.dumps(one, sort_keys=True) == json.dumps(other, sort_keys=True))


def is_moment(text: Any) -> bool:
    """Whether it is a time as a writer writes it: ISO 8601 to the second, with its offset."""
    try:
        return bool(datetime.fromisoformat(text).isoformat(timespec="seconds") == text)
    except (TypeError, ValueError):
        return False


def differences(one: Any, other: Any, at: str = "") -> list[str]:
    """Places in which two JSON values differ, such as ``codecs.0.name``."""
    if isinstance(one, dict) and isinstance(other, dict):
        return [
            line
            for key in sorted(one.keys() | other.keys())
            for line in (
                differences(one[key], other[key], f"{at}.{key}" if at else key)
                if key in one and key in other
                else [f"{at}.{key}" if at else key]
            )
        ]
    if isinstance(one, list) and isinstance(other, list) and len(one) == len(other):
        return [
            line
            for number, pair in enumerate(zip(one, other, strict=True))
            for line in differences(*pair, f"{at}.{number}")
        ]
    return [] if same(one, other) else [at]


def faults(name: str, document: Any) -> list[str]:
    """What is wrong with a document of an array by itself."""
    if not isinstance(document, dict):
        return ["its document is no JSON object"]
    entry = entry_of(name)
    if entry is None:
        return ["it is no variable or coordinate that this version knows"]
    wrong = [f"its document has no {key}" for key in sorted(_ARRAY_KEYS - document.keys())]
    unknown = document.keys() - _ARRAY_KEYS - {"storage_transformers"}
    wrong += [f"its document has an unknown entry {key!r}" for key in sorted(unknown)]
    if wrong:
        return wrong
    if document["dimension_names"] != list(entry.dims):
        wrong.append(f"its dimensions are not {', '.join(entry.dims)}")
    shape, attributes = document["shape"], document["attributes"]
    if (
        not isinstance(shape, list)
        or len(shape) != len(entry.dims)
        or not all(map(is_length, shape))
    ):
        wrong.append(f"its shape {shape!r} is none of {len(entry.dims)} lengths")
    wrong += [
        f"its chunk_shape {chunk!r} is none of {len(entry.dims)} lengths"
        for chunk in _chunk_shapes(document)
        if not isinstance(chunk, list)
        or len(chunk) != len(entry.dims)
        or not all(is_length(length) and length > 0 for length in chunk)
    ]
    if not isinstance(attributes, dict):
        return [*wrong, "its attributes are no JSON object"]
    if name in VARIABLES:
        native = attributes.get("native_dtype")
        known = NATIVE_TYPES.get(native) if isinstance(native, str) else None
        if known is None:
            wrong.append(f"its native_dtype {native!r} is none of {', '.join(NATIVE_TYPES)}")
        expected = None if known is None else known.stored.name
    else:
        expected = entry.dtype if isinstance(entry, Coordinate) else STEP_TYPE.name
    if expected is not None and document["data_type"] != expected:
        wrong.append(f"it is of type {document['data_type']!r}, expected {expected}")
    if not wrong:
        try:
            opened = open_document(document)
        except FormatError as error:
            return [str(error)]
        if name in VARIABLES:
            stored = stored_array(".", name, opened)
            if stored and stored.chain.kind == "delta" and stored.chain.native.name != native:
                wrong.append(f"it is encoded as {stored.chain.native.name}, declared as {native}")
    return wrong


def _chunk_shapes(document: Document) -> Iterator[Any]:
    """What a document gives for the shape of a chunk, and of the chunks within it."""
    codecs = document["codecs"]
    for part in (document["chunk_grid"], *(codecs if isinstance(codecs, list) else ())):
        configuration = part.get("configuration") if isinstance(part, dict) else None
        if isinstance(configuration, dict) and "chunk_shape" in configuration:
            yield configuration["chunk_shape"]
