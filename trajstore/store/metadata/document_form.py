"""The form of a run's documents: the members of each, their types and possible values.

Every function that opens a run checks the root here, before zarr reads it. `verify` also checks the
document of each array. Data covered by the checksums of the blocks is not checked here.
"""

from __future__ import annotations

import json
import math
import operator
import re
import reprlib
from collections.abc import Callable, Collection, Iterator, Mapping
from datetime import datetime
from functools import lru_cache
from typing import Any, Literal, NamedTuple, get_args

import zarr
from zarr.buffer.cpu import Buffer
from zarr.storage import MemoryStore

from trajstore.errors import FormatError
from trajstore.schema import ENCODINGS, FORMAT
from trajstore.store.metadata.fingerprint import COMING, CONTENT, COPY, FINGERPRINT
from trajstore.store.metadata.object_keys import DOCUMENT
from trajstore.store.metadata.stretches import STRETCHES, are_stretches
from trajstore.strict_json import Document
from trajstore.values.vector_rule import VECTORS

__all__ = [
    "ARRAY_MEMBERS",
    "MOST_CHUNKS",
    "REQUIRED",
    "STATUSES",
    "Fault",
    "Status",
    "array_faults",
    "attribute_faults",
    "is_digest",
    "is_length",
    "is_moment",
    "is_possible",
    "open_document",
    "root_faults",
]

Status = Literal["recording", "complete", "interrupted"]
STATUSES: tuple[Status, ...] = get_args(Status)

MOST_CHUNKS = 1 << 16
"""Inner chunks of a block."""

_LONGEST = 1 << 48
_LARGEST_BLOCK = 1 << 38  # values; 1 TiB of float32
_CACHED = 64 << 10  # characters; shorter documents are kept in memory after they are opened
_MISSING = object()
_CONFIGURED = "an object with name and configuration"


class Fault(NamedTuple):
    """A member of a document with a missing or impossible value.

    Attributes
    ----------
    member : str
        Path of the member, such as ``codecs.0.name``; empty for the whole document.
    expected : str
        Description of possible values.
    received : object
        Value of the member, if the document has one.
    """

    member: str
    expected: str
    received: Any = _MISSING

    def __str__(self) -> str:
        name = self.member or "the document"
        if self.received is _MISSING:
            return f"{name} is missing, expected {self.expected}"
        return f"{name} is {_SHORT.repr(self.received)}, expected {self.expected}"

    def within(self, member: str) -> Fault:
        """The same fault, if the document is a member of another one."""
        return self._replace(member=f"{member}.{self.member}".rstrip("."))


_SHORT = reprlib.Repr()
_SHORT.maxlevel, _SHORT.maxstring, _SHORT.maxother, _SHORT.maxlong = 2, 60, 60, 40


def is_length(value: Any) -> bool:
    """True if a JSON value can be the length of a dimension, below 2**48."""
    return type(value) is int and 0 <= value < _LONGEST


def is_digest(value: Any) -> bool:
    """True for a SHA-256 in 64 hexadecimal digits."""
    return isinstance(value, str) and re.fullmatch("[0-9a-f]{64}", value) is not None


def is_moment(text: Any) -> bool:
    """True for a time as writers write it: ISO 8601, to the second, with its offset."""
    try:
        return bool(datetime.fromisoformat(text).isoformat(timespec="seconds") == text)
    except (TypeError, ValueError):
        return False


def _are_runs(value: Any) -> bool:
    """True for a list of identities, each with its first block, from block 0."""
    if not isinstance(value, list) or not value:
        return False
    for entry in value:
        if not isinstance(entry, list) or len(entry) != 2 or not is_length(entry[0]):
            return False
        if not isinstance(entry[1], str) or not re.fullmatch("([0-9a-f]{2})+", entry[1]):
            return False
    return bool(value[0][0] == 0)


def _are_parameters(value: Any) -> bool:
    """True for a table of parameters, each with its place in W or params."""
    return isinstance(value, list) and all(map(_is_parameter, value))


def _is_parameter(entry: Any) -> bool:
    if not _is_tensor(entry):
        return False
    group, tied = entry.get("group"), entry.get("tied", [])
    return (
        entry.get("variable") in ("W", "params")
        and ("offset" in entry) == (entry["variable"] == "params")
        and (group is None or is_length(group))
        and is_length(entry.get("position", 0))
        and type(entry.get("requires_grad")) is bool
        and isinstance(tied, list)
        and all(isinstance(name, str) for name in tied)
        and all(isinstance(entry.get(f"{kind}_dtype", ""), str) for kind in VECTORS)
    )


def _are_buffers(value: Any) -> bool:
    """True for a table of buffers, each with its place in the variable."""
    return isinstance(value, list) and all(
        _is_tensor(entry) and "offset" in entry for entry in value
    )


def _is_tensor(entry: Any) -> bool:
    return (
        isinstance(entry, dict)
        and isinstance(entry.get("name"), str)
        and isinstance(entry.get("dtype"), str)
        and _are_lengths(entry.get("shape"))
        and is_length(entry.get("offset", 0))
    )


def _is_model_config(value: Any) -> bool:
    return (
        isinstance(value, dict)
        and isinstance(value.get("class"), str)
        and isinstance(value.get("transformers"), str)
        and isinstance(value.get("config"), dict)
    )


_RUNS = "a list of [block, identity of the run], from block 0"

_ATTRIBUTES: dict[str, tuple[Callable[[Any], bool], str]] = {
    "trajstore_format": (lambda value: type(value) is int and value == FORMAT, str(FORMAT)),
    "trajstore_version": (lambda value: isinstance(value, str), "a string"),
    "status": (lambda value: value in STATUSES, f"one of {', '.join(STATUSES)}"),
    "committed_rows": (is_length, "a number of rows"),
    "created": (is_moment, "a time, ISO 8601"),
    "updated": (is_moment, "a time, ISO 8601"),
    "timeline": (lambda value: value == "post-step", "post-step"),
    "encoding": (lambda value: value in ENCODINGS, " or ".join(ENCODINGS)),
    "block_rows": (lambda value: is_length(value) and value > 0, "a number of rows"),
    "config": (lambda value: isinstance(value, dict), "an object"),
    "runs": (_are_runs, _RUNS),
    CONTENT: (is_digest, "a SHA-256"),
    FINGERPRINT: (is_digest, "a SHA-256"),
    STRETCHES: (are_stretches, "a list of step and config, from step 0, in order"),
    "parameters": (
        _are_parameters,
        "a list of objects with name, shape, dtype, variable, offset, group, requires_grad",
    ),
    "buffers": (_are_buffers, "a list of objects with name, shape, dtype, offset"),
    "model_config": (_is_model_config, "an object with class, transformers and config"),
}
"""Attributes of the root that the format defines: a check of the value, and its description."""

_OPTIONAL = (STRETCHES, "parameters", "buffers", "model_config")
REQUIRED = tuple(name for name in _ATTRIBUTES if name not in _OPTIONAL)
"""Attributes that every root has."""


def is_possible(key: str, value: Any) -> bool:
    """True if a root can have an attribute with that value."""
    return key not in _ATTRIBUTES or _ATTRIBUTES[key][0](value)


def attribute_faults(
    attributes: Mapping[str, Any], required: Collection[str] = ()
) -> Iterator[Fault]:
    """Attributes of a root with impossible values, and required ones that are missing."""
    for name, (possible, expected) in _ATTRIBUTES.items():
        value = attributes.get(name, _MISSING)
        if name in required if value is _MISSING else not possible(value):
            yield Fault(f"attributes.{name}", expected, value)


def root_faults(root: Any) -> Iterator[Fault]:
    """Faults of the document of a root, except its attributes and arrays."""
    if not isinstance(root, dict):
        yield Fault("", "an object", root)
        return
    yield from _node_faults(root, "group")
    yield from _unknown(root, {"zarr_format", "node_type", "attributes", "consolidated_metadata"})
    if "attributes" not in root:
        yield Fault("attributes", "an object")
    # zarr drops the consolidated metadata when another program sets an attribute.
    block = root.get("consolidated_metadata")
    if block is None:
        return
    if not isinstance(block, dict):
        yield Fault("consolidated_metadata", "an object", block)
        return
    if block.get("kind") != "inline":
        yield Fault("consolidated_metadata.kind", "inline", block.get("kind", _MISSING))
    if block.get("must_understand") is not False:
        received = block.get("must_understand", _MISSING)
        yield Fault("consolidated_metadata.must_understand", "false", received)
    known = {"kind", "must_understand", "metadata"}
    yield from (fault.within("consolidated_metadata") for fault in _unknown(block, known))
    arrays = block.get("metadata", _MISSING)
    if not isinstance(arrays, dict):
        yield Fault("consolidated_metadata.metadata", "an object", arrays)


def array_faults(document: Any, required: Collection[str] = ()) -> Iterator[Fault]:
    """Faults of the document of an array.

    Parameters
    ----------
    document : object
        Value of a JSON text.
    required : collection of str
        Members that it must have, although Zarr allows it to omit them.
    """
    faults = list(_member_faults(document, required))
    yield from faults or _size_faults(document)


def _member_faults(document: Any, required: Collection[str]) -> Iterator[Fault]:
    if not isinstance(document, dict):
        yield Fault("", "an object", document)
        return
    yield from _node_faults(document, "array")
    for name in required:
        if name not in document:
            yield Fault(name, "a member of that name")
    shape = document.get("shape", _MISSING)
    if not _are_lengths(shape):
        yield Fault("shape", "a list of lengths", shape)
        return
    data_type = document.get("data_type", _MISSING)
    if not isinstance(data_type, str) and not _is_named(data_type):
        yield Fault("data_type", f"a name, or {_CONFIGURED}", data_type)
    yield from _grid_faults(document, len(shape))
    yield from _key_faults(document.get("chunk_key_encoding", _MISSING))
    yield from _codec_faults(document.get("codecs", _MISSING), len(shape))
    if not _is_fill_value(document):
        yield Fault("fill_value", "a value of data_type", document.get("fill_value", _MISSING))
    yield from _dimension_faults(document, len(shape))
    if document.get("storage_transformers", []) != []:
        yield Fault("storage_transformers", "an empty list", document["storage_transformers"])
    for fault in _unknown(document, ARRAY_MEMBERS):
        received = fault.received
        if not isinstance(received, dict) or received.get("must_understand") is not False:
            yield fault


def open_document(
    document: Document, objects: Mapping[str, bytes] | None = None
) -> zarr.Array[Any]:
    """Array that a document describes, with the given objects by key.

    Raises
    ------
    FormatError
        If zarr cannot open it.
    """
    text = json.dumps(document)
    if objects or len(text) > _CACHED:
        return _opened(text, objects or {})
    return _opened_alone(text)


@lru_cache(maxsize=256)  # a check of a run opens each document many times, without values
def _opened_alone(text: str) -> zarr.Array[Any]:
    return _opened(text, {})


def _opened(text: str, objects: Mapping[str, bytes]) -> zarr.Array[Any]:
    contents = {DOCUMENT: text.encode(), **objects}
    store = MemoryStore({key: Buffer.from_bytes(data) for key, data in contents.items()})
    try:
        return zarr.open_array(store, mode="r", zarr_format=3)
    except Exception as error:  # zarr raises many types for a damaged document
        raise FormatError(f"zarr cannot open it: {error}") from error


def _node_faults(document: Document, kind: str) -> Iterator[Fault]:
    if type(document.get("zarr_format")) is not int or document["zarr_format"] != 3:
        yield Fault("zarr_format", "3", document.get("zarr_format", _MISSING))
    if document.get("node_type") != kind:
        yield Fault("node_type", kind, document.get("node_type", _MISSING))
    attributes = document.get("attributes", {})
    if not isinstance(attributes, dict):
        yield Fault("attributes", "an object", attributes)
    elif kind == "array":
        for name in _TEXTS & attributes.keys():
            if not isinstance(attributes[name], str):
                yield Fault(f"attributes.{name}", "a string", attributes[name])


ARRAY_MEMBERS = {
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
    "storage_transformers",
}
"""Members of the document of an array. A recorder writes all except the last one."""

_TEXTS = {"long_name", "units", "native_dtype", "coordinates", COPY, COMING}


def _unknown(document: Document, known: set[str]) -> Iterator[Fault]:
    for name in sorted(document.keys() - known):
        yield Fault(name or "''", "no member of that name", document[name])


def _are_lengths(value: Any) -> bool:
    return isinstance(value, list) and all(map(is_length, value))


def _are_sizes(value: Any, ndim: int) -> bool:
    return _are_lengths(value) and len(value) == ndim and 0 not in value


def _is_named(value: Any) -> bool:
    return (
        isinstance(value, dict)
        and isinstance(value.get("name"), str)
        and isinstance(value.get("configuration", {}), dict)
    )


def _key_faults(keys: Any) -> Iterator[Fault]:
    if not _is_named(keys):
        yield Fault("chunk_key_encoding", _CONFIGURED, keys)
        return
    separator = keys.get("configuration", {}).get("separator", ".")
    if separator not in (".", "/"):
        yield Fault("chunk_key_encoding.configuration.separator", "'.' or '/'", separator)


def _grid_faults(document: Document, ndim: int) -> Iterator[Fault]:
    grid = document.get("chunk_grid", _MISSING)
    if not isinstance(grid, dict) or grid.get("name") != "regular":
        yield Fault("chunk_grid", "an object with the name regular", grid)
        return
    configuration = grid.get("configuration", _MISSING)
    if not isinstance(configuration, dict) or configuration.keys() != {"chunk_shape"}:
        yield Fault("chunk_grid.configuration", "an object with chunk_shape", configuration)
    elif not _are_sizes(configuration["chunk_shape"], ndim):
        member = "chunk_grid.configuration.chunk_shape"
        yield Fault(member, f"{ndim} positive lengths", configuration["chunk_shape"])


def _codec_faults(codecs: Any, ndim: int) -> Iterator[Fault]:
    if not isinstance(codecs, list) or not codecs:
        yield Fault("codecs", "a list of codecs", codecs)
        return
    for number, codec in enumerate(codecs):
        member = f"codecs.{number}"
        if isinstance(codec, str):
            continue
        if not isinstance(codec, dict) or not isinstance(codec.get("name"), str):
            yield Fault(member, _CONFIGURED, codec)
            continue
        configuration = codec.get("configuration", {})
        if not isinstance(configuration, dict):
            yield Fault(f"{member}.configuration", "an object", configuration)
            continue
        for name, (possible, expected) in _CONFIGURATION.items():
            if name in configuration and not possible(configuration[name]):
                yield Fault(f"{member}.configuration.{name}", expected, configuration[name])
        if not _are_sizes(configuration.get("chunk_shape", [1] * ndim), ndim):
            member = f"{member}.configuration.chunk_shape"
            yield Fault(member, f"{ndim} positive lengths", configuration["chunk_shape"])


def _size_faults(document: Document) -> Iterator[Fault]:
    """Blocks that exceed any memory, or that have more inner chunks than those of any run."""
    block, codec = document["chunk_grid"]["configuration"]["chunk_shape"], document["codecs"][0]
    if math.prod(block) > _LARGEST_BLOCK:
        member = "chunk_grid.configuration.chunk_shape"
        yield Fault(member, f"at most {_LARGEST_BLOCK:,} values", block)
    configuration = codec.get("configuration", {}) if isinstance(codec, dict) else {}
    inner = configuration.get("chunk_shape", block)
    if math.prod(map(operator.floordiv, block, inner)) > MOST_CHUNKS:
        member = "codecs.0.configuration.chunk_shape"
        yield Fault(member, f"at most {MOST_CHUNKS:,} chunks in a block of {block}", inner)


def _is_text(value: Any) -> bool:
    return isinstance(value, str)


def _is_number(value: Any) -> bool:
    return type(value) is int and abs(value) < _LONGEST


_CONFIGURATION: dict[str, tuple[Callable[[Any], bool], str]] = {
    "array": (_is_text, "a string"),
    "runs": (_are_runs, _RUNS),
    "native_dtype": (_is_text, "a string"),
    "kind": (_is_text, "a string"),
    "compressor": (_is_text, "a string"),
    "cname": (_is_text, "a string"),
    "shuffle": (_is_text, "a string"),
    "endian": (_is_text, "a string"),
    "level": (_is_number, "a whole number"),
    "clevel": (_is_number, "a whole number"),
    "typesize": (_is_number, "a whole number"),
    "blocksize": (_is_number, "a whole number"),
    "token_first": (lambda value: type(value) is bool, "true or false"),
    "checksum": (lambda value: type(value) is bool, "true or false"),
}
"""Members of the configurations of codecs, in a run or in a copy by another program."""


def _is_fill_value(document: Document) -> bool:
    """True if the fill value has a JSON type that zarr accepts for the array's data type."""
    value, kind = document.get("fill_value", _MISSING), document.get("data_type")
    if not isinstance(kind, str):
        return value is not _MISSING
    if kind == "bool":
        return type(value) is bool
    if kind.startswith(("int", "uint")):
        return type(value) is int
    if kind.startswith("float"):
        return type(value) in (int, float, str)
    return value is not _MISSING if kind != "string" else isinstance(value, str)


def _dimension_faults(document: Document, ndim: int) -> Iterator[Fault]:
    names = document.get("dimension_names")
    if names is None:
        return
    if (
        not isinstance(names, list)
        or len(names) != ndim
        or not all(name is None or isinstance(name, str) for name in names)
    ):
        yield Fault("dimension_names", f"{ndim} names", names)
