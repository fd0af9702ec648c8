"""The `zarr.json` documents of a run: of each array, made from a few facts, and of the root.

They are made once (`new_run`). Afterwards only the length of the step axis and the attributes of
the root change. The root contains the metadata of all arrays (Zarr's inline consolidated metadata),
and thereby their shapes. The commit is the replacement of this one object.

The attributes of the root that no commit changes are also an attribute of the array ``step``, as
one JSON text: with the arrays' own metadata, a second copy of all that the root holds. `verify`
compares the two, and `repair` takes the whole one. If a resumed run gets other attributes, the
writer replaces the root first. If it dies then, the digests in the root show that the copy is
older.

Writers state the facts of an array, and `metadata_of` makes the document. `facts_of` reads the
facts from a stored one. It is sound if `metadata_of` makes the same one from them; otherwise the
difference names the member. So metadata cannot describe other values than those of the schema.
Attributes that change no values are facts, too. A copy of a run by another program stores the
values in its own way: then all members about the storage are facts.
"""

from __future__ import annotations

import json
import math
import operator
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any, Self

import numpy as np
import numpy.typing as npt
import zarr
from zarr.buffer.cpu import Buffer
from zarr.storage import MemoryStore

from trajstore.codec.block import BlockForm, Runs
from trajstore.codec.block_codec import BLOCK, BlockCodec
from trajstore.errors import FormatError
from trajstore.installation import __version__
from trajstore.schema import (
    INTEGERS,
    STEP,
    Coordinate,
    Variable,
    belongs,
    coordinate,
    entry_of,
    variables_of,
)
from trajstore.store.metadata.metadata_form import (
    CHANGING,
    COPY,
    EXPLAINED,
    NOTES,
    RUNS,
    UNPROVEN,
    Fault,
    Fingerprint,
    Status,
    are_lengths,
    are_runs,
    differing,
    is_length,
    root_of,
    run_identity,
)
from trajstore.store.storage.remote_path import METADATA_KEY
from trajstore.strict_json import MISSING, JsonObject, utc_now
from trajstore.values.native_types import NATIVE_TYPES, STEP_TYPE, NativeType

MOST_CHUNKS = 1 << 16
"""Inner chunks of a block."""

_LARGEST_BLOCK = 1 << 38  # values; 1 TiB of float32

_KEYS = {"name": "default", "configuration": {"separator": "."}}

_STORAGE = ("chunk_grid", "chunk_key_encoding", "fill_value", "codecs", "storage_transformers")

_DECODED = frozenset(
    {"scale_factor", "add_offset", "_FillValue", "missing_value", "_Unsigned", "calendar", "dtype"}
)
"""Attributes by which xarray changes stored values. No array of a run has one."""

_TEXTS = frozenset({"long_name", "units", "state", "native_dtype", "coordinates", COPY})

_TIMES = frozenset(
    {"days", "hours", "minutes", "seconds", "milliseconds", "microseconds", "nanoseconds"}
)

_CODECS = (["bytes", "blosc", "crc32c"], ["vlen-utf8", "crc32c"])
"""Names of the codecs of coordinates: of numbers, and of strings."""


@dataclass(frozen=True, kw_only=True)
class ArrayFacts:
    """What the metadata of an array of a run depends on.

    Attributes
    ----------
    name : str
        A variable or a coordinate of the schema.
    shape : tuple of int
    attributes : mapping
        Attributes that change no values, such as the units.
    form : BlockForm or None
        Storage form of the blocks; None for a coordinate, or without such blocks.
    foreign : mapping or None
        Members about the storage, if another program wrote the array.
    """

    name: str
    shape: tuple[int, ...]
    attributes: Mapping[str, Any]
    form: BlockForm | None = None
    foreign: Mapping[str, Any] | None = None


def is_series(name: str) -> bool:
    """True if an array of a run grows with the rows."""
    return coordinate(name) is None


def rows_of(metadata: Any) -> int | None:
    """Rows of an array, from a metadata file that may be damaged."""
    shape = metadata.get("shape") if isinstance(metadata, dict) else None
    return shape[0] if isinstance(shape, list) and shape and is_length(shape[0]) else None


def with_rows(name: str, metadata: JsonObject, rows: int) -> JsonObject:
    """The metadata file with another number of rows, if the array grows with the rows."""
    if not is_series(name) or rows_of(metadata) is None:
        return metadata
    return metadata | {"shape": [rows, *metadata["shape"][1:]]}


def recorded_attributes(
    name: str, native: str | None = None, coordinates: Collection[str] = ()
) -> dict[str, Any]:
    """Attributes of an array of a new run.

    Parameters
    ----------
    name : str
    native : str, optional
        Native type of a variable.
    coordinates : collection of str
        Coordinates along ``token``, without ``token`` itself.
    """
    entry = entry_of(name)
    if isinstance(entry, Coordinate):
        return dict(entry.attributes)
    attributes = {"long_name": entry.long_name, "units": entry.units}
    if native is not None:
        attributes |= {"state": entry.state, "native_dtype": native}
    if "token" in entry.dims and coordinates:
        attributes["coordinates"] = " ".join(coordinates)  # CF: xarray adds the coordinates
    return attributes


def metadata_of(facts: ArrayFacts) -> JsonObject:
    """Metadata of an array, in the order in which zarr writes its members."""
    entry = entry_of(facts.name)
    native, block = _native(facts.name, facts.attributes), facts.shape
    codecs: list[JsonObject] = []
    if isinstance(entry, Coordinate):
        dtype, fill, codecs = entry.dtype, entry.fill_value, _coordinate_codecs(entry)
    else:
        # A lost object must not read as a plausible number.
        fill = -1 if native is STEP_TYPE else "NaN"
        dtype = native.stored.name if native else ""
    if facts.form is not None and native is not None:
        form, block = facts.form, facts.form.shape
        chain = replace(form.chain, native=native)
        codec = BlockCodec(array=facts.name, chunk_shape=form.chunk, chain=chain, runs=form.runs)
        codecs = [codec.to_dict()]
    return {
        "shape": list(facts.shape),
        "data_type": dtype,
        "chunk_grid": {"name": "regular", "configuration": {"chunk_shape": list(block)}},
        "chunk_key_encoding": _KEYS,
        "fill_value": fill,
        "codecs": codecs,
        "attributes": dict(facts.attributes),
        "dimension_names": list(entry.dims),
        "zarr_format": 3,
        "node_type": "array",
        "storage_transformers": [],
        **(facts.foreign or {}),
    }


def facts_of(name: str, metadata: Any) -> ArrayFacts | Fault:
    """Facts of a stored metadata file, or the first member from which they cannot be read.

    Parameters
    ----------
    name : str
        A variable or a coordinate of the schema.
    metadata : object
        Value of a JSON text.
    """
    entry = entry_of(name)
    if not isinstance(metadata, dict):
        return Fault("", "an object", metadata)
    shape, attributes = metadata.get("shape", MISSING), metadata.get("attributes", MISSING)
    if not are_lengths(shape) or len(shape) != len(entry.dims):
        return Fault("shape", f"{len(entry.dims)} lengths", shape)
    if not isinstance(attributes, dict):
        return Fault("attributes", "an object", attributes)
    native = _native(name, attributes)
    if isinstance(entry, Variable) and native is None:
        types, received = ", ".join(NATIVE_TYPES), attributes.get("native_dtype", MISSING)
        return Fault("attributes.native_dtype", f"one of {types}", received)
    block = _chunk_shape(metadata.get("chunk_grid"))
    if not _are_sizes(block, len(shape)) or math.prod(block) > _LARGEST_BLOCK:
        expected = f"{len(shape)} positive lengths, at most {_LARGEST_BLOCK:,} values"
        return Fault("chunk_grid.configuration.chunk_shape", expected, block)
    codecs = metadata.get("codecs", MISSING)
    names = [_codec_name(codec) for codec in codecs] if isinstance(codecs, list) else []
    if not names or None in names:
        return Fault("codecs", "a list of objects with name and configuration", codecs)
    if "sharding_indexed" in names:
        return Fault("codecs", "no shards of zarr, whose blocks have no labels", codecs)
    form = _form(codecs[names.index(BLOCK)], block) if BLOCK in names else None
    if isinstance(form, Fault):
        return form
    kept = {key: value for key, value in attributes.items() if not _changes_values(key, value)}
    facts = ArrayFacts(name=name, shape=tuple(shape), attributes=kept, form=form)
    recorded = [BLOCK] if isinstance(entry, Variable) else _CODECS[entry.dtype == "string"]
    if metadata.get("chunk_key_encoding") != _KEYS or names != recorded:
        return _foreign(facts, entry, metadata)
    return _form_fault(facts) or facts


def array_faults(
    facts: ArrayFacts | Fault, metadata: Any, runs: Runs | None = None
) -> Iterator[Fault]:
    """Members in which a metadata file differs from that of its facts.

    Parameters
    ----------
    facts : ArrayFacts or Fault
        Result of `facts_of`.
    metadata : object
    runs : Runs, optional
        Identity of the run, which the metadata file must have.
    """
    if isinstance(facts, Fault):
        yield facts
        return
    if facts.form is not None and runs not in (None, facts.form.runs):
        facts = replace(facts, form=replace(facts.form, runs=runs))
    # Zarr allows it to be omitted.
    stored = metadata | {"storage_transformers": metadata.get("storage_transformers", [])}
    expected = metadata_of(facts)
    if repr(stored) == repr(expected):  # in most cases, and faster
        return
    for fault in differing(stored, expected):
        changing = fault.member.startswith("attributes.")
        text = "no attribute by which xarray changes the values"
        yield fault._replace(expected=text) if changing else fault


def checked_arrays(
    attributes: Mapping[str, Any], arrays: Mapping[str, Any]
) -> tuple[dict[str, ArrayFacts], list[tuple[str | None, Fault]]]:
    """Facts of the arrays of a run, and faults, each with its array; None for the root.

    Parameters
    ----------
    attributes : mapping
        Attributes of the root, without faults.
    arrays : mapping
        Metadata of all arrays in the group. Those that are not of the run have no faults.
    """
    variables, runs = variables_of(attributes), run_identity(attributes)
    checked: dict[str, ArrayFacts] = {}
    faults: list[tuple[str | None, Fault]] = []
    for name in (STEP.name, "token", *arrays):
        if name not in arrays:
            faults.append((name, Fault("", "the metadata of an array, in every run")))
        elif belongs(name, variables) and name not in checked:
            facts = facts_of(name, arrays[name])
            faults += [(name, fault) for fault in array_faults(facts, arrays[name], runs)]
            if isinstance(facts, ArrayFacts):
                checked[name] = facts
    lengths = [
        (name, dim, length)
        for name, facts in checked.items()
        for dim, length in zip(entry_of(name).dims, facts.shape, strict=True)
    ]
    most: dict[str, int] = {}
    for (dim, length), _ in reversed(Counter(item[1:] for item in lengths).most_common()):
        most[dim] = length
    for name, dim, length in lengths:
        if length != most[dim]:
            text = f"{length} along {dim}, and others have {most[dim]}"
            faults.append((name, Fault("shape", text, EXPLAINED)))
    step, committed = checked.get(STEP.name), attributes["committed_rows"]
    if step is not None and step.foreign is None and step.shape != (committed,):
        expected = f"{step.shape[0]}, the rows of its arrays"
        faults.append((None, Fault("attributes.committed_rows", expected, committed)))
    return checked, faults


def open_metadata(
    metadata: JsonObject, objects: Mapping[str, bytes] | None = None
) -> zarr.Array[Any]:
    """Array that a metadata file describes, with the given objects by key.

    Raises
    ------
    FormatError
        If zarr cannot open it.
    """
    store = MemoryStore(_buffers(metadata, objects or {}))
    try:
        return zarr.open_array(store, mode="r", zarr_format=3)
    except Exception as error:  # zarr raises many types for a damaged metadata file
        raise FormatError(f"zarr cannot open it: {error}") from error


def stored_values(metadata: JsonObject, values: npt.NDArray[Any]) -> bytes:
    """Object with all values of an array of one chunk."""
    objects = _buffers(metadata, {})
    array = zarr.open_array(MemoryStore(objects), mode="r+", zarr_format=3)
    array.with_config({"write_empty_chunks": True})[...] = values
    del objects[METADATA_KEY]
    (data,) = objects.values()
    return bytes(data.to_bytes())


def _buffers(metadata: JsonObject, objects: Mapping[str, bytes]) -> dict[str, Any]:
    contents = {METADATA_KEY: json.dumps(metadata).encode(), **objects}
    return {key: Buffer.from_bytes(data) for key, data in contents.items()}


def _native(name: str, attributes: Mapping[str, Any]) -> NativeType | None:
    """Native type of a variable; None for a coordinate, and for an unknown type."""
    if name == STEP.name:
        return STEP_TYPE
    declared = attributes.get("native_dtype")
    if not is_series(name) or not isinstance(declared, str):
        return None
    types = {STEP_TYPE.name: STEP_TYPE} if name in INTEGERS else NATIVE_TYPES
    return types.get(declared)


def _coordinate_codecs(entry: Coordinate) -> list[JsonObject]:
    if entry.dtype == "string":
        return [{"name": "vlen-utf8", "configuration": {}}, {"name": "crc32c"}]
    size = np.dtype(entry.dtype).itemsize
    order = {"configuration": {"endian": "little"}} if size > 1 else {}
    settings = {"cname": "zstd", "clevel": 1, "shuffle": "shuffle", "blocksize": 0}
    return [
        {"name": "bytes", **order},
        {"name": "blosc", "configuration": {"typesize": size, **settings}},
        {"name": "crc32c"},
    ]


def _chunk_shape(grid: Any) -> Any:
    configuration = grid.get("configuration") if isinstance(grid, dict) else None
    return configuration.get("chunk_shape") if isinstance(configuration, dict) else MISSING


def _are_sizes(value: Any, ndim: int) -> bool:
    return are_lengths(value) and len(value) == ndim and 0 not in value


def _codec_name(codec: Any) -> str | None:
    name = codec.get("name") if isinstance(codec, dict) else codec
    return name if isinstance(name, str) else None


def _form(codec: Any, block: Sequence[int]) -> BlockForm | Fault:
    """Storage form of blocks of that shape."""
    member = "codecs.0.configuration"
    settings = codec.get("configuration", MISSING) if isinstance(codec, dict) else MISSING
    if not isinstance(settings, dict):
        return Fault(member, "an object", settings)
    if not isinstance(settings.get("array"), str):
        return Fault(f"{member}.array", "a string", settings.get("array", MISSING))
    if not are_runs(settings.get("runs")):
        return Fault(f"{member}.runs", RUNS, settings.get("runs", MISSING))
    chunk = settings.get("chunk_shape", MISSING)
    if not _are_sizes(chunk, len(block)):
        return Fault(f"{member}.chunk_shape", f"{len(block)} positive lengths", chunk)
    if math.prod(map(operator.floordiv, block, chunk)) > MOST_CHUNKS:
        expected = f"at most {MOST_CHUNKS:,} chunks in a block of {block}"
        return Fault(f"{member}.chunk_shape", expected, chunk)
    try:
        return BlockCodec.from_dict(codec).form(tuple(block))
    except FormatError:
        return Fault(member, "the settings of a codec", settings)


def _form_fault(facts: ArrayFacts) -> Fault | None:
    """Fault of blocks that do not cover the array, or of inner chunks that do not divide them."""
    form = facts.form
    if form is None:
        return None
    if any(map(operator.gt, facts.shape[2:], form.shape[2:])):
        expected = f"lengths that blocks of {list(form.shape)} cover"
        return Fault("shape", expected, list(facts.shape))
    codec = BlockCodec(array=form.array, chunk_shape=form.chunk, chain=form.chain, runs=form.runs)
    stored = SimpleNamespace(to_native_dtype=lambda: form.chain.native.stored)
    try:
        codec.validate(
            shape=facts.shape, dtype=stored, chunk_grid=SimpleNamespace(chunk_shape=form.shape)
        )
    except ValueError as error:
        return Fault("codecs.0.configuration", str(error), EXPLAINED)
    return None


def _foreign(facts: ArrayFacts, entry: Variable | Coordinate, metadata: JsonObject) -> ArrayFacts:
    """Facts of an array that another program stored in its own way."""
    storage = {key: metadata[key] for key in _STORAGE if key in metadata}
    attributes = {**facts.attributes}
    if facts.form is not None:
        del storage["codecs"]  # its blocks are those of a run
    if isinstance(entry, Coordinate) and entry.dtype == "string" and "data_type" in metadata:
        storage["data_type"] = metadata["data_type"]
    decoded = {key: metadata["attributes"][key] for key in _DECODED & metadata["attributes"].keys()}
    if isinstance(entry, Coordinate) and entry.dtype == "bool" and decoded == {"dtype": "bool"}:
        # xarray before 2026.9 stores a mask as int8.
        storage["data_type"], attributes["dtype"] = "int8", "bool"
    return replace(facts, attributes=attributes, foreign=storage)


def _changes_values(name: str, value: Any) -> bool:
    """True for an attribute by which xarray changes the values, or that it cannot read."""
    if name == "units" and isinstance(value, str):
        return " since " in value or value in _TIMES
    # xarray adds the fill value NaN in its copies. It changes nothing.
    is_nan = name == "_FillValue" and value in ("AAAAAAAA+H8=", "NaN")
    return (name in _DECODED and not is_nan) or (name in _TEXTS and not isinstance(value, str))


OF_THE_STORE = ("trajstore_format", "trajstore_version", "runs", "encoding", "block_rows")
"""Attributes of the root that no copy takes over, besides those that every commit sets."""


class RunMetadata:
    """Metadata of one run, as text.

    Parameters
    ----------
    arrays : mapping of str to dict
        Metadata of each array, including coordinates, with any number of rows.
    attributes : mapping
        Attributes of the root except `CHANGING`; JSON values.

    Attributes
    ----------
    attributes : dict
        Attributes of the root except `CHANGING`.
    notes : list of dict
        The attribute `NOTES` of the next root.
    """

    def __init__(self, arrays: Mapping[str, dict[str, Any]], attributes: Mapping[str, Any]) -> None:
        self.notes: list[dict[str, Any]] = []
        variables = variables_of(attributes)
        self._arrays = {
            name: array for name, array in arrays.items() if not is_outgrown(name, array, variables)
        }
        self._set(attributes)
        # Other arrays in the group do not belong to the run and do not change.
        self._series = tuple(
            name for name in self._arrays if belongs(name, variables) and coordinate(name) is None
        )

    def _set(self, attributes: Mapping[str, Any]) -> None:
        copy = json.dumps(dict(attributes), allow_nan=False)
        self.attributes: dict[str, Any] = json.loads(copy)  # makes all keys strings
        step = self._arrays[STEP.name]
        self._arrays[STEP.name] = step | {"attributes": step["attributes"] | {COPY: copy}}

    def raise_format(self, number: int) -> None:
        """Set the number of the format, and the version that needs it."""
        raised = {"trajstore_format": number, "trajstore_version": __version__}
        self._set(self.attributes | raised)

    @classmethod
    def stored(cls, root: Mapping[str, Any], attributes: Mapping[str, Any] | None = None) -> Self:
        """Metadata of an existing run.

        Parameters
        ----------
        root : mapping
            Root of the run.
        attributes : mapping, optional
            Attributes that replace present ones.
        """
        present = root["attributes"] | dict(attributes or {})
        metadata = cls(root["consolidated_metadata"]["metadata"], fixed_attributes(present))
        metadata.notes = notes_of(present)
        return metadata

    def array(self, name: str, rows: int) -> bytes:
        """Metadata of an array with that number of rows."""
        return _dump(self._with_rows(name, rows))

    def names(self) -> tuple[str, ...]:
        """All arrays, including coordinates."""
        return tuple(self._arrays)

    def series(self) -> tuple[str, ...]:
        """Arrays that grow with the rows."""
        return self._series

    def fingerprint(self, coordinates: Mapping[str, bytes], block_rows: int) -> Fingerprint:
        """Digests of the run without rows. `coordinates` are digests by key."""
        return Fingerprint(self._arrays, self.attributes, coordinates, block_rows)

    def root(self, rows: int, status: Status, digests: Mapping[str, str]) -> bytes:
        """Metadata of the root: attributes, digests, and every array with that number of rows."""
        changing: dict[str, Any] = {
            "status": status,
            "committed_rows": rows,
            "updated": utc_now(),
            **digests,
        }
        if self.notes:
            changing[NOTES] = self.notes
        arrays = {name: self._with_rows(name, rows) for name in self._arrays}
        return _dump(root_of(self.attributes | changing, arrays))

    def _with_rows(self, name: str, rows: int) -> dict[str, Any]:
        array = self._arrays[name]
        return with_rows(name, array, rows) if name in self._series else array


def fixed_attributes(attributes: Mapping[str, Any]) -> dict[str, Any]:
    """Attributes of the root that no commit changes."""
    return {name: value for name, value in attributes.items() if name not in CHANGING}


def notes_of(attributes: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the notes of a run, from the checked attributes of its root."""
    return [dict(note) for note in attributes.get(NOTES, [])]


def notes_until(notes: Iterable[Mapping[str, Any]], step: int) -> list[dict[str, Any]]:
    """Return the notes that begin at a step or before it, with their unproven steps up to it."""
    kept = []
    for note in notes:
        if note["first_step"] > step:
            continue
        entry = dict(note)
        if ranges := entry.pop(UNPROVEN, None):
            entry[UNPROVEN] = [[a, min(b, step)] for a, b in ranges if a <= step]
        kept.append(entry)
    return kept


def unproven_rows(attributes: Mapping[str, Any], steps: npt.NDArray[Any]) -> dict[int, str]:
    """Return the rows that do not follow from the row before, each with the note that says why.

    Parameters
    ----------
    attributes : mapping
        Attributes of the root of the run.
    steps : ndarray of int, (step,)
        Steps of its rows.
    """
    reasons: dict[int, str] = {}
    for note in notes_of(attributes):
        for first, last in note.get(UNPROVEN, []):
            start, end = np.searchsorted(steps, (first, last))
            # The step between two rows belongs to the later one.
            for row in range(max(start, 1), min(end + 1, len(steps))):
                reasons.setdefault(row, note["note"])
    return reasons


def is_outgrown(name: str, array: Mapping[str, Any], variables: Collection[str]) -> bool:
    """True for an array of a user along ``step``, which contradicts a run with other rows."""
    dims = array.get("dimension_names")
    return not belongs(name, variables) and isinstance(dims, list) and STEP.name in dims


def _dump(metadata: Mapping[str, Any]) -> bytes:
    return json.dumps(metadata, indent=1, allow_nan=False).encode()
