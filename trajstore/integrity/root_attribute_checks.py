"""Checks of the root's attributes: presence, values, and the copy in `step`."""

from __future__ import annotations

from typing import Any

from trajstore.integrity.checked_metadata import CheckedMetadata
from trajstore.schema import STEP
from trajstore.store.metadata.array_metadata import is_series
from trajstore.store.metadata.fingerprint import (
    CHANGING,
    CONTENT,
    COPY,
    FINGERPRINT,
    fingerprint_of,
)
from trajstore.store.metadata.metadata_form import (
    REQUIRED,
    attribute_faults,
    is_digest,
    is_possible,
    other_format,
    run_identity,
)
from trajstore.store.metadata.segments import SEGMENTS, are_segments
from trajstore.strict_json import MISSING, JsonObject, changes, parse, same


def is_replaced(found: CheckedMetadata, copy: JsonObject, own: JsonObject) -> bool:
    """True if `step` only holds the attributes that the root had before a resume.

    A resume replaces the root before the metadata file of `step`. The fingerprint covers the
    attributes, so it shows that those of the root, and of its copy of that metadata file, are the
    present ones.

    Parameters
    ----------
    found : CheckedMetadata
    copy, own : dict
        Metadata file of `step` in the root, and in its folder.
    """
    attributes = found.attributes
    content = attributes.get(CONTENT)
    return (
        attributes.get("status") == "recording"
        and is_digest(content)
        and attributes.get(FINGERPRINT) == fingerprint_of(attributes, bytes.fromhex(content))
        and same(parsed_copy(copy["attributes"].get(COPY)), fixed_attributes(attributes))
        and parsed_copy(own["attributes"].get(COPY)) is not None
    )


def check_attributes(found: CheckedMetadata) -> None:
    """Compare the attributes of the root with their copy and their possible values.

    Raises
    ------
    FormatError
        If the run is one of another format.
    """
    step = found.arrays.get(STEP.name)
    if step is not None:
        found.copy = parsed_copy(step["attributes"].get(COPY))
        if found.copy is None:
            found.report(STEP.name, f"its attribute {COPY} is missing, or is not a JSON object")
    if found.root is None:
        return
    attributes = found.attributes
    if found.copy is not None:
        for key, value, copied in changes(fixed_attributes(attributes), found.copy):
            where = "the root" if value is MISSING else f"its copy in {STEP.name}"
            lost = value is MISSING or copied is MISSING
            how = "is missing in" if lost else "differs from"
            found.report(None, f"the attribute {key} {how} {where}")
    if is_possible("runs", attributes.get("runs")):  # otherwise it is reported below
        runs = run_identity(attributes)
        for name in filter(is_series, found.arrays):
            if found.stored(name).form.runs != runs:
                found.report(name, "its metadata name another run than the root")
    number = attributes.get("trajstore_format")
    agrees = (found.copy or {}).get("trajstore_format", number) == number  # otherwise it is damaged
    if agrees and (error := other_format(found.path, attributes)):
        raise error
    required = [key for key in REQUIRED if key not in (found.copy or {})]
    for fault in attribute_faults(attributes, required):
        found.report(None, str(fault))
    listed: Any = attributes.get(SEGMENTS)
    if are_segments(listed) and not same(listed[-1]["config"], attributes.get("config")):
        found.report(None, f"the last configuration of {SEGMENTS} is not the attribute config")


def fixed_attributes(attributes: JsonObject) -> JsonObject:
    """Attributes that no commit changes."""
    return {key: value for key, value in attributes.items() if key not in CHANGING}


def copied_attributes(step: JsonObject | None) -> JsonObject:
    """The fixed attributes of the root from the metadata of `step`; empty if they are damaged."""
    attributes = (step or {}).get("attributes")
    text = attributes.get(COPY) if isinstance(attributes, dict) else None
    return parsed_copy(text) or {}


def parsed_copy(text: Any) -> JsonObject | None:
    """The fixed attributes from their copy in `step`; None if it is not a JSON object."""
    try:
        value = parse(text)
    except (TypeError, ValueError):
        return None
    return value if isinstance(value, dict) else None
