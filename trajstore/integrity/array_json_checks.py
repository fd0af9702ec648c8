"""The documents of a run's arrays, each by itself: read strictly, and judged by the schema."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from datetime import datetime
from typing import Any

import zarr
from zarr.buffer import default_buffer_prototype
from zarr.buffer.cpu import Buffer
from zarr.storage import MemoryStore

from trajstore.errors import FormatError
from trajstore.schema import STEP, VARIABLES, Coordinate, Variable, coordinate
from trajstore.store.metadata.object_keys import DOCUMENT
from trajstore.store.reading.array_reader import block_form
from trajstore.strict_json import Document, same
from trajstore.values.native_types import NATIVE_TYPES, STEP_TYPE

__all__ = [
    "block_rows",
    "entry_of",
    "faults",
    "is_canonical",
    "is_length",
    "is_moment",
    "is_series",
    "open_document",
    "with_rows",
]


_FOREIGN = (
    "it is not stored as a recorder stores it, so its values cannot be checked; another program "
    "has written it, or its metadata have been changed"
)
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
    return STEP if name == STEP.name else VARIABLES.get(name) or coordinate(name)


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


def is_moment(text: Any) -> bool:
    """Whether it is a time as a writer writes it: ISO 8601 to the second, with its offset."""
    try:
        return bool(datetime.fromisoformat(text).isoformat(timespec="seconds") == text)
    except (TypeError, ValueError):
        return False


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
        if isinstance(entry, Coordinate):
            return [] if _is_one_chunk(document, opened) else [_FOREIGN]
        form = block_form(opened)
        if form is None:
            return [_FOREIGN]
        native = attributes.get("native_dtype")
        if form.chain.kind == "delta" and form.chain.native.name != native:
            wrong.append(f"it is encoded as {form.chain.native.name}, declared as {native}")
        if form.array != name:
            wrong.append(f"its codec is that of {form.array}")
    return wrong


def _is_one_chunk(document: Document, opened: zarr.Array[Any]) -> bool:
    """Whether a coordinate is stored as a recorder stores it: one chunk, with a checksum."""
    return (
        tuple(opened.chunks) == tuple(opened.shape)
        and opened.shards is None
        and document["chunk_key_encoding"]
        == {"name": "default", "configuration": {"separator": "."}}
        and document["codecs"][-1].get("name") == "crc32c"
    )


def _chunk_shapes(document: Document) -> Iterator[Any]:
    """What a document gives for the shape of a chunk, and of the chunks within it."""
    codecs = document["codecs"]
    for part in (document["chunk_grid"], *(codecs if isinstance(codecs, list) else ())):
        configuration = part.get("configuration") if isinstance(part, dict) else None
        if isinstance(configuration, dict) and "chunk_shape" in configuration:
            yield configuration["chunk_shape"]
