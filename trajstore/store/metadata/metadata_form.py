"""The form of the root's metadata: its members, their types and possible values.

Every function that opens a run checks the root here, before zarr reads it. For the metadata
of the arrays see `trajstore.store.metadata.array_metadata`.
"""

from __future__ import annotations

import json
import re
import reprlib
from collections.abc import Collection, Iterator, Mapping
from datetime import datetime
from typing import Any, Literal, NamedTuple, TypeGuard, get_args

from trajstore.codec.block import Runs
from trajstore.errors import FormatError
from trajstore.schema import ENCODINGS, FORMAT, NUMBERS, OPTIMIZER_STATE
from trajstore.store.metadata.fingerprint import CONTENT, FINGERPRINT, NOTES
from trajstore.store.metadata.segments import SEGMENTS, are_segments
from trajstore.strict_json import MISSING, JsonObject, changes, fits
from trajstore.values.optimizer_rule import VECTORS
from trajstore.version import __version__

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

_ATTRIBUTES: dict[str, tuple[Any, str]] = {
    "trajstore_format": (lambda value: type(value) is int and value == FORMAT, str(FORMAT)),
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
            and all(("type" in one) == (one["of"] == "parameter") for one in value)
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
    if type(number) is not int or number == FORMAT:
        return None
    message = (
        f"{path} has store format {number}, and trajstore {__version__} reads format {FORMAT}; "
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
