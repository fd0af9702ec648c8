"""Checks of each array's document alone: strict JSON that fits the schema."""

from __future__ import annotations

import json
from typing import Any

import zarr
from zarr.buffer import default_buffer_prototype

from trajstore.errors import FormatError
from trajstore.schema import STEP, VARIABLES, Coordinate, entry_of
from trajstore.store.metadata.document_form import ARRAY_MEMBERS, array_faults, open_document
from trajstore.store.metadata.object_keys import DOCUMENT
from trajstore.store.reading.array_reader import block_form
from trajstore.strict_json import Document, same
from trajstore.values.native_types import NATIVE_TYPES, STEP_TYPE

__all__ = [
    "block_rows",
    "faults",
    "is_canonical",
    "is_series",
    "with_rows",
]


_FOREIGN = (
    "its storage differs from that of a recorder, so its values cannot be checked; another "
    "program wrote it or changed its metadata"
)


def is_canonical(document: Document) -> bool:
    """True if zarr would write the same document; zarr ignores unknown names.

    Raises
    ------
    FormatError
        If zarr cannot read it.
    """
    metadata = open_document(document).metadata
    written = metadata.to_buffer_dict(default_buffer_prototype())[DOCUMENT].to_bytes()
    return same(json.loads(written), document)


def is_series(name: str) -> bool:
    """True if an array grows with the rows."""
    return name == STEP.name or name in VARIABLES


def block_rows(document: Document) -> int:
    """Rows per block of an array: those of a shard, or of a chunk without shards."""
    return int(document["chunk_grid"]["configuration"]["chunk_shape"][0])


def with_rows(name: str, document: Document, rows: int) -> Document:
    """The document with another number of rows, if the array grows with rows."""
    if not is_series(name):
        return document
    return document | {"shape": [rows, *document["shape"][1:]]}


def faults(name: str, document: Any) -> list[str]:
    """Faults of an array's document alone."""
    if not isinstance(document, dict):
        return ["its document is not a JSON object"]
    entry = entry_of(name)
    if entry is None:
        return ["this version has no variable or coordinate of this name"]
    missing = ARRAY_MEMBERS - document.keys() - {"storage_transformers"}
    wrong = [f"its document has no {key}" for key in sorted(missing)]
    unknown = document.keys() - ARRAY_MEMBERS
    wrong += [f"its document has an unknown entry {key!r}" for key in sorted(unknown)]
    wrong = wrong or [str(fault) for fault in array_faults(document)]
    if wrong:
        return wrong
    shape, attributes = document["shape"], document["attributes"]
    if len(shape) != len(entry.dims) or document["dimension_names"] != list(entry.dims):
        wrong.append(f"its dimensions are not {', '.join(entry.dims)}")
    if name in VARIABLES:
        native = attributes.get("native_dtype", "")
        known = NATIVE_TYPES.get(native)
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
    """True if a coordinate is stored as a recorder writes it: one chunk, with a checksum."""
    return (
        tuple(opened.chunks) == tuple(opened.shape)
        and opened.shards is None
        and document["chunk_key_encoding"]
        == {"name": "default", "configuration": {"separator": "."}}
        and document["codecs"][-1] == {"name": "crc32c"}
    )
