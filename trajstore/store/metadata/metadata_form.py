"""The form of the root's metadata: its members, their types and possible values, and its digests.

Every function that opens a run checks the root here, before zarr reads it. For the metadata
of the arrays see `trajstore.store.metadata.zarr_json`.

An extended or forked run was trained with one configuration first and with another later. The root
attribute ``segments`` lists them. A run without it has one segment, with its ``config``.
``provenance.resumed`` records the number of threads of each resumed part.

The *content digest* is a chain over the blocks. It starts from the arrays' metadata and the
coordinates, and each block is added to it. Runs with the same content digest hold the same rows.
The *fingerprint* also covers all attributes of the root that no commit changes, including the
identity of the run. Both cover the committed rows. After a run is cut, they are the digests it had
at that number of rows.

Source: docs/reference/format.md, *Fingerprint*.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import re
import reprlib
import struct
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from copy import copy
from dataclasses import dataclass, replace
from datetime import datetime
from typing import Any, Literal, NamedTuple, TypeGuard, get_args

from trajstore.codec.block import Runs
from trajstore.errors import FormatError
from trajstore.installation import __version__
from trajstore.provenance import RunAttributes
from trajstore.schema import (
    ENCODINGS,
    FORMAT,
    FORMATS,
    NUMBERS,
    OPTIMIZER_STATE,
    belongs,
    coordinate,
    variables_of,
)
from trajstore.store.storage.remote_path import Location, chunk_key
from trajstore.strict_json import MISSING, JsonObject, canonical, changes, fits
from trajstore.values.optimizer_rule import VECTORS

SEGMENTS = "segments"
"""Name of the attribute."""

Entry = dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class Segment:
    """Steps that were trained with one configuration and number of threads.

    Attributes
    ----------
    first, last : int
        The step before the first of them, and the last of them.
    config : dict
        JSON values.
    threads : int or None
        Threads of torch on the CPU; None if the run does not record them.
    modes : dict
        Modes of the process that are not those of a new one.
    """

    first: int
    last: int
    config: dict[str, Any]
    threads: int | None
    modes: dict[str, Any]


def listed_segments(attributes: Mapping[str, Any]) -> list[Entry]:
    """Segments of a run, in order.

    Parameters
    ----------
    attributes : mapping
        Attributes of the root.

    Returns
    -------
    list of dict
        Each with ``step``, the last step before the segment, and its ``config``.

    Examples
    --------
    >>> listed_segments({"config": {"training": {"steps": 100}}})
    [{'step': 0, 'config': {'training': {'steps': 100}}}]
    """
    listed = attributes.get(SEGMENTS)
    return list(listed) if listed else [{"step": 0, "config": attributes.get("config") or {}}]


def segments_attribute(
    attributes: Mapping[str, Any], config: Mapping[str, Any], step: int
) -> dict[str, list[Entry]]:
    """The attribute ``segments`` of a run that is trained after `step` with `config`.

    A segment begins where a setting changes that the training depends on. The recorded variables,
    the commit interval and the name of the device are not such settings.

    Parameters
    ----------
    attributes : mapping
        Present attributes of the root.
    config : mapping
        JSON values.
    step : int
        Last step before the new segment.

    Returns
    -------
    dict
        The attribute by its name; empty if the run never had a second segment.

    Examples
    --------
    >>> run = {"config": {"training": {"steps": 100}}}
    >>> segments_attribute(run, {"training": {"steps": 140}}, 100)["segments"][1]
    {'step': 100, 'config': {'training': {'steps': 140}}}
    """
    kept = [entry for entry in listed_segments(attributes) if entry["step"] < step]
    if kept and _training_settings(kept[-1]["config"]) == _training_settings(config):
        segments = [*kept[:-1], {**kept[-1], "config": dict(config)}]
    else:
        segments = [*kept, {"step": step if kept else 0, "config": dict(config)}]
    return {SEGMENTS: segments} if len(segments) > 1 or SEGMENTS in attributes else {}


def trained_segments(attributes: Mapping[str, Any], first: int, last: int) -> list[Segment]:
    """Segments that cover a range of steps.

    Parameters
    ----------
    attributes : mapping
        Attributes of the root of the run.
    first, last : int
        The step before the range, and its last step.

    """
    listed, run = listed_segments(attributes), RunAttributes.of(attributes)
    begins = {entry["step"] for entry in (*listed, *run.resumed)}
    bounds = sorted({first, last, *(step for step in begins if first < step < last)})
    segments: list[Segment] = []
    for begin, end in itertools.pairwise(bounds):
        segment = Segment(
            first=begin,
            last=end,
            config=[entry["config"] for entry in listed if entry["step"] <= begin][-1],
            threads=run.threads_after(begin),
            modes=run.modes_after(begin),
        )
        if segments and replace(segments[-1], first=begin, last=end) == segment:
            segments[-1] = replace(segments[-1], last=end)
        else:
            segments.append(segment)
    return segments


def are_segments(value: Any) -> bool:
    """True if the attribute can have this value: from step 0, in increasing order."""
    if not value or not fits(value, [{"step": int, "config": dict}]):
        return False
    steps = [entry["step"] for entry in value if len(entry) == 2]
    rising = all(a < b for a, b in itertools.pairwise(steps))
    return len(steps) == len(value) and steps[0] == 0 and rising


def _training_settings(config: Mapping[str, Any]) -> Entry:
    """Settings that the training depends on."""
    settings = {name: fields for name, fields in config.items() if name != "recording"}
    training = settings.get("training")
    if isinstance(training, Mapping):
        settings["training"] = {name: value for name, value in training.items() if name != "device"}
    return settings


CONTENT = "content_digest"
FINGERPRINT = "fingerprint"
"""Attributes of the root."""

ShardDigest = tuple[str, int, int, bytes]
"""Array, part, rows and digest of a shard."""

_SHARD = struct.Struct("<II32s")
NOTES = "notes"
"""Attribute of the root: what the recording could not see, or not as its loop suggests."""

CHANGING = ("status", "committed_rows", "updated", CONTENT, FINGERPRINT, NOTES)
"""Attributes of the root that commits set."""

COPY = "root_attributes"
"""Attribute of ``step`` that holds a copy of the root's other attributes."""

_BY_RESUMING = "resumed"


class Fingerprint:
    """Digests of the rows of a run.

    Parameters
    ----------
    arrays : mapping of str to dict
        Metadata of each array.
    attributes : mapping
        Attributes of the root. Those that commits change are ignored.
    coordinates : mapping of str to bytes
        SHA-256 of each stored object of the coordinates, by its key.
    block_rows : int
    """

    def __init__(
        self,
        arrays: Mapping[str, Mapping[str, Any]],
        attributes: Mapping[str, Any],
        coordinates: Mapping[str, bytes],
        block_rows: int,
    ) -> None:
        stored = {key: digest.hex() for key, digest in coordinates.items()}
        # Other arrays in the group do not belong to the run.
        variables = variables_of(attributes)
        lasting = {
            name: _lasting(name, arrays[name]) for name in arrays if belongs(name, variables)
        }
        self._block_rows = block_rows
        self._metadata = _sha256_of(_fixed(attributes))
        self._whole = _sha256_of({"arrays": lasting, "coordinates": stored})
        self._tip = self._whole

    def added(self, rows: int, digest: bytes) -> Fingerprint:
        """Add the next block. It replaces the last one, if that was not full.

        Parameters
        ----------
        rows : int
            Rows of the block.
        digest : bytes
            Result of `block_digest`.
        """
        longer = copy(self)
        longer._tip = hashlib.sha256(self._whole + digest).digest()
        if rows == self._block_rows:
            longer._whole = longer._tip
        return longer

    def ended(self, shards: Sequence[ShardDigest]) -> Fingerprint:
        """Add the shards of the last, unfinished block; none if the last block is full."""
        return self.added(shards[0][2], block_digest(shards)) if shards else self

    def of_attributes(self, attributes: Mapping[str, Any]) -> Fingerprint:
        """Digests of the same rows, with other attributes of the root."""
        other = copy(self)
        other._metadata = _sha256_of(_fixed(attributes))
        return other

    def attributes(self) -> dict[str, str]:
        """Both digests of the added blocks, as attributes of the root."""
        return {
            CONTENT: self._tip.hex(),
            FINGERPRINT: hashlib.sha256(self._metadata + self._tip).hexdigest(),
        }


def fingerprint_of(attributes: Mapping[str, Any], content: bytes) -> str:
    """Fingerprint of a run with these attributes of the root and this content digest."""
    return hashlib.sha256(_sha256_of(_fixed(attributes)) + content).hexdigest()


def block_digest(shards: Iterable[ShardDigest]) -> bytes:
    """Digest of a block."""
    total = hashlib.sha256()
    for name, part, rows, digest in sorted(shards):
        total.update(name.encode() + b"\0" + _SHARD.pack(part, rows, digest))
    return total.digest()


def coordinate_digests(path: Location, names: Iterable[str]) -> dict[str, bytes]:
    """SHA-256 of the stored objects of a run's coordinates, by their keys.

    Raises
    ------
    OSError
        If one cannot be read.
    """
    digests = {}
    for name in names:
        key = chunk_key(name, 0, 1)
        if coordinate(name):
            with suppress(FileNotFoundError):
                digests[key] = hashlib.sha256((path / key).read_bytes()).digest()
    return digests


def _lasting(name: str, metadata: Mapping[str, Any]) -> dict[str, Any]:
    """Part of an array's metadata that depends neither on the number of rows nor on the run."""
    lasting = dict(metadata)
    lasting["attributes"] = {
        key: value for key, value in metadata["attributes"].items() if key != COPY
    }
    lasting["codecs"] = [_without_runs(codec) for codec in metadata["codecs"]]
    if coordinate(name) is None:
        lasting["shape"] = [0, *metadata["shape"][1:]]
    return lasting


def _without_runs(codec: Mapping[str, Any]) -> dict[str, Any]:
    if "configuration" not in codec:
        return dict(codec)
    configuration = {key: value for key, value in codec["configuration"].items() if key != "runs"}
    return dict(codec) | {"configuration": configuration}


def _fixed(attributes: Mapping[str, Any]) -> dict[str, Any]:
    """Attributes of the root that never change."""
    fixed = {key: value for key, value in attributes.items() if key not in CHANGING}
    provenance = fixed.get("provenance")
    if isinstance(provenance, Mapping):
        fixed["provenance"] = {
            key: value for key, value in provenance.items() if key != _BY_RESUMING
        }
    return fixed


def _sha256_of(value: Any) -> bytes:
    return hashlib.sha256(canonical(value).encode()).digest()


Status = Literal["recording", "complete", "interrupted"]
STATUSES: tuple[Status, ...] = get_args(Status)

_LONGEST = 1 << 48

UNPROVEN = "unproven"
"""Member of a note: ranges of steps that do not follow from the recorded values alone."""

EXPLAINED = object()
"""Received value of a fault whose other text is a whole explanation."""


class Fault(NamedTuple):
    """A member of a metadata file with a missing or impossible value.

    Attributes
    ----------
    member : str
        Path of the member, such as ``codecs.0.name``; empty for the whole metadata file.
    expected : str
        Description of possible values.
    received : object
        Value of the member, `MISSING` or `EXPLAINED`.
    """

    member: str
    expected: str
    received: Any = MISSING

    def __str__(self) -> str:
        name = self.member or "the metadata file"
        if self.received is EXPLAINED:
            return f"{name}: {self.expected}"
        if self.received is MISSING:
            return f"{name} is missing, expected {self.expected}"
        return f"{name} is {_SHORT.repr(self.received)}, expected {self.expected}"

    def within(self, member: str) -> Fault:
        """The same fault, if the metadata file is a member of another one."""
        return self._replace(member=f"{member}.{self.member}".rstrip("."))


_SHORT = reprlib.Repr()
_SHORT.maxlevel, _SHORT.maxstring, _SHORT.maxother, _SHORT.maxlong = 2, 60, 60, 40


def is_length(value: Any) -> bool:
    """True if a JSON value can be the length of a dimension, below 2**48."""
    return type(value) is int and 0 <= value < _LONGEST


def are_lengths(value: Any) -> bool:
    """True for a list of lengths."""
    return fits(value, [is_length])


def is_digest(value: Any) -> TypeGuard[str]:
    """True for a SHA-256 in 64 hexadecimal digits."""
    return isinstance(value, str) and re.fullmatch("[0-9a-f]{64}", value) is not None


def is_moment(text: Any) -> bool:
    """True for a time as writers write it: ISO 8601, to the second, with its offset."""
    try:
        return bool(datetime.fromisoformat(text).isoformat(timespec="seconds") == text)
    except (TypeError, ValueError):
        return False


def are_runs(value: Any) -> bool:
    """True for a list of identities, each with its first block, from block 0."""
    return fits(value, [_is_run]) and [entry[0] for entry in value[:1]] == [0]


def _is_run(entry: Any) -> bool:
    if not fits(entry, list) or len(entry) != 2 or not is_length(entry[0]):
        return False
    return isinstance(entry[1], str) and re.fullmatch("([0-9a-f]{2})+", entry[1]) is not None


_TENSOR: dict[str, Any] = {"name": str, "dtype": str, "shape": are_lengths, "offset?": is_length}
_PARAMETER = _TENSOR | {
    "variable": ("W", "params").__contains__,
    "group?": lambda value: value is None or is_length(value),
    "position?": is_length,
    "requires_grad": bool,
    "tied?": [str],
    **{f"{kind}_dtype?": str for kind in VECTORS},
}


_KEPT = {
    "name": str,
    "of": ("element", "parameter", "other").__contains__,
    "type?": NUMBERS.__contains__,
}


def _are_parameters(value: Any) -> bool:
    """True for a table of parameters, each with its place in W or params."""
    return fits(value, [_PARAMETER]) and all(
        ("offset" in entry) == (entry["variable"] == "params") for entry in value
    )


def _is_range(value: Any) -> bool:
    return fits(value, [int]) and len(value) == 2 and value[0] <= value[1]


_NOTE = {
    "note": str, "first_step": int, "last_step": int, "count": int, f"{UNPROVEN}?": [_is_range],
}  # fmt: skip

RUNS = "a list of [block, identity of the run], from block 0"

_FORMATS = " or ".join(map(str, FORMATS))

_ATTRIBUTES: dict[str, tuple[Any, str]] = {
    "trajstore_format": (lambda value: type(value) is int and value in FORMATS, _FORMATS),
    "trajstore_version": (str, "a string"),
    "status": (lambda value: value in STATUSES, f"one of {', '.join(STATUSES)}"),
    "committed_rows": (is_length, "a number of rows"),
    "created": (is_moment, "a time, ISO 8601"),
    "updated": (is_moment, "a time, ISO 8601"),
    "encoding": (lambda value: value in ENCODINGS, " or ".join(ENCODINGS)),
    "block_rows": (lambda value: is_length(value) and value > 0, "a number of rows"),
    "config": (dict, "an object"),
    "runs": (are_runs, RUNS),
    CONTENT: (is_digest, "a SHA-256"),
    FINGERPRINT: (is_digest, "a SHA-256"),
    SEGMENTS: (are_segments, "a list of step and config, from step 0, in order"),
    "parameters": (
        _are_parameters,
        "a list of objects with name, shape, dtype, variable, offset, group, requires_grad",
    ),
    "buffers": (
        [_TENSOR | {"offset": is_length}],
        "a list of objects with name, shape, dtype, offset",
    ),
    NOTES: ([_NOTE], "a list of objects with note, first_step, last_step, count"),
    "model_config": (
        {"class": str, "transformers": str, "config": dict},
        "an object with class, transformers and config",
    ),
    OPTIMIZER_STATE: (
        lambda value: (
            fits(value, [_KEPT])
            and all(("type" in entry) == (entry["of"] == "parameter") for entry in value)
        ),
        "a list of objects with name, of, and of a number its type",
    ),
}
"""Attributes of the root that the format defines: their forms (`fits`), and in words."""

_OPTIONAL = (SEGMENTS, NOTES, "parameters", "buffers", "model_config", OPTIMIZER_STATE)
REQUIRED = tuple(name for name in _ATTRIBUTES if name not in _OPTIONAL)
"""Attributes that every root has."""


def is_possible(key: str, value: Any) -> bool:
    """True if a root can have an attribute with that value."""
    return key not in _ATTRIBUTES or fits(value, _ATTRIBUTES[key][0])


def attribute_faults(
    attributes: Mapping[str, Any], required: Collection[str] = ()
) -> Iterator[Fault]:
    """Attributes of a root with impossible values, and required ones that are missing."""
    for name, (form, expected) in _ATTRIBUTES.items():
        value = attributes.get(name, MISSING)
        if name in required if value is MISSING else not fits(value, form):
            yield Fault(f"attributes.{name}", expected, value)


def run_identity(attributes: Mapping[str, Any]) -> Runs:
    """Identities of the blocks of a run, from the checked attributes of its root."""
    return tuple((block, run) for block, run in attributes["runs"])


def root_of(attributes: JsonObject, arrays: JsonObject) -> JsonObject:
    """Metadata of a root with these attributes, and with these of its arrays."""
    return {
        "zarr_format": 3,
        "node_type": "group",
        "attributes": attributes,
        "consolidated_metadata": {
            "kind": "inline",
            "must_understand": False,
            "metadata": arrays,
        },
    }


def root_faults(root: Any) -> Iterator[Fault]:
    """Faults of the metadata of a root, except its attributes and arrays."""
    if not isinstance(root, dict):
        yield Fault("", "an object", root)
        return
    attributes, block = root.get("attributes"), root.get("consolidated_metadata")
    arrays = block.get("metadata") if isinstance(block, dict) else None
    expected = root_of(*(each if isinstance(each, dict) else {} for each in (attributes, arrays)))
    if block is None:  # zarr drops it when another program sets an attribute
        expected["consolidated_metadata"] = None
        root = {"consolidated_metadata": None, **root}
    yield from differing(root, expected)


def other_format(path: object, attributes: JsonObject) -> FormatError | None:
    """Error for a run of another format than this version reads; it names one that reads it."""
    number, writer = attributes.get("trajstore_format"), attributes.get("trajstore_version")
    if type(number) is not int or number in FORMATS:
        return None
    message = (
        f"{path} has store format {number}, and trajstore {__version__} reads format {_FORMATS}; "
        f"open it with the trajstore {writer} that recorded it (development builds of one version "
        "differ)"
    )
    if number < FORMAT:
        message += ", or export it there to a .safetensors file, and import that file here"
    return FormatError(message)


def differing(stored: JsonObject, expected: JsonObject) -> Iterator[Fault]:
    """Members in which a metadata file differs from the expected one."""
    for member, received, wanted in changes(stored, expected):
        if wanted is MISSING:
            text = "no member of that name"
        else:
            text = "an object" if isinstance(wanted, dict) else json.dumps(wanted)
        yield Fault(member or "''", text, received)
