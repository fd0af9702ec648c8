"""Faults of a root with the metadata of all its arrays, and its digests."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import Any

from trajstore.integrity.checked_metadata import attributes_of, listed_arrays, series_in
from trajstore.schema import STEP, TRAJECTORIES, belongs, variables_of
from trajstore.store.metadata.metadata_form import (
    COPY,
    REQUIRED,
    attribute_faults,
    root_faults,
    run_identity,
)
from trajstore.store.metadata.zarr_json import (
    ArrayFacts,
    RunMetadata,
    array_faults,
    contradicting_lengths,
    facts_of,
    fixed_attributes,
)
from trajstore.store.storage.remote_path import Location
from trajstore.store.writing.resumed_run import fingerprint_at
from trajstore.strict_json import MISSING, JsonObject, changes, parse

Found = tuple[str | None, str]
"""Array, or None for the root; and a sentence."""

NO_COPY = f"its attribute {COPY} is missing, or is not a JSON object"
LOST = (
    "the root has lost its consolidated metadata, which give readers the number of committed rows; "
    "zarr drops them when it sets an attribute"
)
FOREIGN = "another program stored it in its own way, so its values cannot be checked"


def faults_in(
    root: JsonObject, known: Collection[str], required: Collection[str] = REQUIRED
) -> list[Found]:
    """Faults of a root with the metadata of all its arrays; empty if it is whole.

    Parameters
    ----------
    root : dict
    known : collection of str
        Arrays with a metadata file, which can be those of another program.
    required : collection of str, optional
        Attributes that the root must have.
    """
    found: list[Found] = [(None, str(fault)) for fault in root_faults(root)]
    if root.get("consolidated_metadata") is None:
        found.append((None, LOST))
    found = found or [*_attribute_faults(root, required)]
    found = found or [*_array_faults(root, known)]
    return found or [*_contradictions(root)]


def _attribute_faults(root: JsonObject, required: Collection[str]) -> Iterator[Found]:
    attributes = attributes_of(root)
    copy = parsed_copy(listed_arrays(root).get(STEP.name))
    if copy is None:
        yield STEP.name, NO_COPY
    for key, _, other in () if copy is None else changes(fixed_attributes(attributes), copy):
        how = "is missing in" if other is MISSING else "differs from"
        yield None, f"the attribute {key} {how} its copy in {STEP.name}"
    for fault in attribute_faults(attributes, required):
        yield None, str(fault)


def _array_faults(root: JsonObject, known: Collection[str]) -> Iterator[Found]:
    held, runs = variables_of(attributes_of(root)), run_identity(attributes_of(root))
    for name, metadata in listed_arrays(root).items():
        if not belongs(name, held):
            if name not in known or not isinstance(metadata, dict):
                yield name, "this version has no variable or coordinate of this name"
            continue
        facts = facts_of(name, metadata)
        for fault in array_faults(facts, metadata, runs):
            yield name, str(fault)
        if isinstance(facts, ArrayFacts) and facts.foreign is not None:
            yield name, FOREIGN


def _contradictions(root: JsonObject) -> Iterator[Found]:
    """Arrays that are missing, and lengths that do not agree."""
    attributes, arrays = attributes_of(root), listed_arrays(root)
    for name in (STEP.name, "token"):
        if name not in arrays:
            yield name, "it is missing; every run needs it"
    if arrays.keys().isdisjoint(TRAJECTORIES):
        yield "W", "it is missing; every run needs W, or delta, or cells"
    held = variables_of(attributes)
    shapes = {name: array["shape"] for name, array in arrays.items() if belongs(name, held)}
    for name, dim, length, other in contradicting_lengths(shapes):
        yield name, f"has {length} along {dim}, others have {other}"
    committed, (rows,) = attributes["committed_rows"], shapes.get(STEP.name, [0])
    if committed != rows:
        yield None, f"committed_rows is {committed}, the arrays have {rows} rows"


def digests_of(path: Location, root: JsonObject, rows: int) -> dict[str, str]:
    """Digests of the first rows of a run, from a root without faults and the stored blocks.

    Raises
    ------
    FormatError, OSError
        If the label of a block, or a coordinate, cannot be read.
    """
    metadata = RunMetadata(listed_arrays(root), fixed_attributes(attributes_of(root)))
    return fingerprint_at(path, metadata, series_in(path, root), rows).attributes()


def parsed_copy(step: Any) -> JsonObject | None:
    """The fixed attributes of the root from their copy in `step`; None if it is damaged."""
    attributes = step.get("attributes") if isinstance(step, dict) else None
    try:
        value: Any = parse(attributes[COPY]) if isinstance(attributes, dict) else None
    except (KeyError, TypeError, ValueError):
        return None
    return value if isinstance(value, dict) else None
