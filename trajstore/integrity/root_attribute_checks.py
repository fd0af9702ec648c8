"""The attributes of a run's root: which it has, what they can be, and their copy in `step`."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any, get_args

from trajstore.errors import FormatError
from trajstore.integrity.array_json_checks import is_moment, is_series
from trajstore.integrity.checked_metadata import CheckedMetadata
from trajstore.schema import ENCODING, FORMAT, STEP
from trajstore.store.metadata.fingerprint import COMING, CONTENT, FINGERPRINT
from trajstore.store.metadata.stretches import STRETCHES, are_stretches
from trajstore.store.metadata.zarr_json import CHANGING, COPY, Status
from trajstore.store.reading.open_group import run_identity
from trajstore.strict_json import Document, differences, parse, same

__all__ = [
    "REQUIRED",
    "STATUSES",
    "check_attributes",
    "fixed_attributes",
    "is_digest",
    "is_possible",
    "parsed_copy",
    "settle_announced",
]

REQUIRED = (
    "trajstore_format",
    "trajstore_version",
    "status",
    "committed_rows",
    "created",
    "updated",
    "timeline",
    "encoding",
    "block_rows",
    "config",
    "runs",
    CONTENT,
    FINGERPRINT,
)
"""Attributes that every root has."""

STATUSES: tuple[Status, ...] = get_args(Status)


def is_digest(value: Any) -> bool:
    """Whether it is a SHA-256 as a root has it."""
    return isinstance(value, str) and re.fullmatch("[0-9a-f]{64}", value) is not None


_POSSIBLE: dict[str, Callable[[Any], bool]] = {
    "trajstore_format": lambda value: type(value) is int and value == FORMAT,
    "status": lambda value: value in STATUSES,
    "created": is_moment,
    "updated": is_moment,
    "timeline": lambda value: value == "post-step",
    "encoding": lambda value: value == ENCODING,
    "block_rows": lambda value: type(value) is int and value > 0,
    "config": lambda value: isinstance(value, dict),
    STRETCHES: are_stretches,
    CONTENT: is_digest,
    FINGERPRINT: is_digest,
}

# How many rows a block has is held against the arrays, the number of the format has its own check.
_EXPECTED = {
    "status": f"one of {', '.join(STATUSES)}",
    "created": "a time, ISO 8601",
    "updated": "a time, ISO 8601",
    "timeline": "post-step",
    "encoding": ENCODING,
    "config": "a JSON object",
    STRETCHES: "a list of step and config, from step 0 on, in order",
    CONTENT: "a SHA-256",
    FINGERPRINT: "a SHA-256",
}


def settle_announced(found: CheckedMetadata) -> None:
    """Have the copy in `step` be that of the root's attributes, if they were just being changed."""
    own = found.own.get(STEP.name)
    attributes = None if own is None else own.get("attributes")
    if own is None or not isinstance(attributes, dict) or COMING not in attributes:
        return
    before = {key: value for key, value in attributes.items() if key != COMING}
    changed = same(parsed_copy(attributes[COMING]), fixed_attributes(found.attributes))
    settled = before | {COPY: attributes[COMING]} if changed else before
    found.own[STEP.name] = own | {"attributes": settled}
    found.announced = True
    found.notes.append(
        "the attributes of the root are being changed, as a writer leaves it that ends, or is, in "
        "the middle of a resume"
    )


def check_attributes(found: CheckedMetadata) -> None:
    """Hold the attributes of the root against their copy, and against what they can be.

    Raises
    ------
    FormatError
        If the run is one of another format.
    """
    step = found.arrays.get(STEP.name)
    if step is not None:
        found.copy = parsed_copy(step["attributes"].get(COPY))
        if found.copy is None:
            found.report(STEP.name, f"its attribute {COPY} is missing, or is no JSON object")
    if found.root is None:
        return
    attributes = found.attributes
    if found.copy is not None:
        fixed = fixed_attributes(attributes)
        for key in sorted(fixed.keys() | found.copy.keys()):
            if key not in fixed or key not in found.copy:
                where = "the root" if key not in fixed else f"its copy in {STEP.name}"
                found.report(None, f"the attribute {key} is missing in {where}")
            elif not same(fixed[key], found.copy[key]):
                found.report(
                    None,
                    f"the attribute {key} is not as in its copy in {STEP.name}: "
                    f"{', '.join(differences(fixed[key], found.copy[key], key))}",
                )
    _check_identity(found)
    for key in REQUIRED:
        if key not in attributes and not (found.copy and key in found.copy):
            found.report(None, f"the attribute {key} is missing")
    number = attributes.get("trajstore_format")
    copied = (found.copy or {}).get("trajstore_format", number)
    if type(number) is int and number != FORMAT and copied == number:
        raise FormatError(
            f"{found.path} is of store format {number}, and this version checks format {FORMAT}; "
            f"install trajstore {attributes.get('trajstore_version')}, which wrote it"
        )
    if number is not None and not is_possible("trajstore_format", number):
        found.report(None, f"trajstore_format is {number!r}, expected {FORMAT}")
    for key, what in _EXPECTED.items():
        if key in attributes and not is_possible(key, attributes[key]):
            found.report(None, f"the attribute {key} is {attributes[key]!r}, expected {what}")
    listed: Any = attributes.get(STRETCHES)
    if are_stretches(listed) and not same(listed[-1]["config"], attributes.get("config")):
        found.report(None, f"the last configuration of {STRETCHES} is not the attribute config")


def _check_identity(found: CheckedMetadata) -> None:
    """The arrays must say of whose blocks they are as the root does."""
    try:
        runs = run_identity(found.attributes)
    except FormatError as error:
        found.report(None, str(error))
        return
    for name in filter(is_series, found.arrays):
        if found.stored(name).form.runs != runs:
            found.report(name, "its metadata say it is of another run than the root says")


def is_possible(key: str, value: Any) -> bool:
    """Whether a root can have an attribute of that value."""
    return key not in _POSSIBLE or _POSSIBLE[key](value)


def fixed_attributes(attributes: Document) -> Document:
    """Those that no commit changes."""
    return {key: value for key, value in attributes.items() if key not in CHANGING}


def parsed_copy(text: Any) -> Document | None:
    """The fixed attributes as the attribute of `step` has them; None if it holds none."""
    try:
        value = parse(text)
    except (TypeError, ValueError):
        return None
    return value if isinstance(value, dict) else None
