"""Choice between an array's own document and its copy in the root."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from trajstore.integrity.array_json_checks import (
    faults,
    is_canonical,
    is_series,
    with_rows,
)
from trajstore.integrity.checked_metadata import CheckedMetadata
from trajstore.integrity.root_attribute_checks import fixed_attributes, parsed_copy
from trajstore.schema import STEP, VARIABLES, Coordinate, coordinate, entry_of
from trajstore.store.metadata.document_form import is_length, open_document
from trajstore.store.metadata.object_keys import DOCUMENT
from trajstore.store.metadata.zarr_json import COPY
from trajstore.store.reading.array_reader import stored_array
from trajstore.strict_json import Document, differences, same

__all__ = ["agreed_lengths", "choose_documents"]

_OF_ROWS = sorted({dim for entry in VARIABLES.values() for dim in entry.dims[1:]})


def choose_documents(found: CheckedMetadata) -> None:
    """Compare each array's two documents, report problems, and choose the better."""
    consolidated = found.consolidated()
    copies = consolidated or {}
    whole = [item for item in (*found.own.values(), *copies.values()) if isinstance(item, dict)]
    lengths = agreed_lengths(whole)
    # Writers keep the order of the root, if it has one.
    for name in dict.fromkeys([*copies, *found.own]):
        own, copy = found.own.get(name), copies.get(name)
        if entry_of(name) is None and isinstance(own, dict):
            found.notes.append(f"{name} is an array that is not part of the run")
            continue
        if copy is None and consolidated is not None and own is not None:
            found.report(name, "the root's metadata do not have it", found.path / DOCUMENT)
        if name not in found.own:
            found.own[name] = None
            found.report(name, "its folder is missing")
        sound: list[Document] = []
        for document, path in (
            (copy, found.path / DOCUMENT),
            (own, found.path / name / DOCUMENT),
        ):
            if document is None:
                continue
            wrong = faults(name, document)
            for fault in wrong:
                found.report(name, fault, path)
            if not wrong:
                sound.append(document)
        if len(sound) == 2:
            found.arrays[name] = _better(found, name, sound[0], sound[1], lengths)
        elif sound:
            found.arrays[name] = sound[0]


def _better(
    found: CheckedMetadata, name: str, copy: Document, own: Document, lengths: dict[str, int]
) -> Document:
    """The better of an array's two documents; report differences."""
    if is_series(name):
        rows, copied = own["shape"][0], copy["shape"][0]
        if rows > copied:
            found.notes.append(
                f"{name} is {rows - copied} rows ahead of the root; a writer is in a "
                "commit, or died in one"
            )
        elif rows < copied:
            found.report(name, f"has {rows} rows in its own document, {copied} in the root's")
        own = with_rows(name, own, copied)
    differing = differences(own, copy)
    if not differing:
        return copy
    chosen = min(copy, own, key=lambda document: _rank(found, name, document, lengths))
    found.report(
        name,
        f"its own document and its copy in the root differ in {', '.join(differing)}",
        found.path / (name if chosen is copy else "") / DOCUMENT,
    )
    return chosen


def _rank(
    found: CheckedMetadata, name: str, document: Document, lengths: dict[str, int]
) -> tuple[int, int]:
    """Rank of a document that differs from its copy; lower is better."""
    entry = entry_of(name)
    assert entry is not None  # or it had a fault
    pairs = zip(entry.dims, document["shape"], strict=True)
    odd = sum(dim in lengths and length != lengths[dim] for dim, length in pairs)
    attributes = document["attributes"]
    if isinstance(entry, Coordinate):
        known, fill = entry.attributes, entry.fill_value
    else:
        known = {"long_name": entry.long_name, "units": entry.units}
        fill = -1 if name == STEP.name else "NaN"
    odd += sum(attributes.get(key) != value for key, value in known.items())
    odd += not same(document["fill_value"], fill)
    odd += not is_canonical(document)
    named = attributes.get("coordinates", "")
    odd += not (isinstance(named, str) and _are_there(named.split(), found))
    if name == STEP.name and COPY in attributes:
        odd += not same(parsed_copy(attributes[COPY]), fixed_attributes(found.attributes))
    unreadable = 0
    if is_series(name):
        stored = stored_array(found.path, name, open_document(document))
        assert stored is not None  # or it had a fault
        if document["shape"][0]:
            try:
                stored.values((slice(0, 1),))
            except Exception:  # whatever sizes that nobody wrote lead to
                unreadable = 1
    return unreadable, odd


def _are_there(names: Iterable[str], found: CheckedMetadata) -> bool:
    """True if these are coordinates of the run."""
    return all(coordinate(name) is not None and name in found.own for name in names)


def agreed_lengths(documents: Iterable[Document]) -> dict[str, int]:
    """Most common length of each dimension of a row."""
    seen: dict[str, Counter[int]] = {dim: Counter() for dim in _OF_ROWS}
    for document in documents:  # which may say anything
        dims, shape = document.get("dimension_names"), document.get("shape")
        if isinstance(dims, list) and isinstance(shape, list) and len(dims) == len(shape):
            for dim, length in zip(dims, shape, strict=True):
                if isinstance(dim, str) and dim in seen and is_length(length):
                    seen[dim][length] += 1
    return {dim: counts.most_common(1)[0][0] for dim, counts in seen.items() if counts}
