"""The `zarr.json` metadata of a run.

They are made once (`new_run`). Afterwards only the length of the step axis and the attributes of
the root change. The root contains the metadata of all arrays (Zarr's inline
consolidated metadata), and thereby their shapes. The commit is the replacement of this one object.

The attributes of the root that no commit changes are also an attribute of the array ``step``, as
one JSON text: with the arrays' own metadata, a second copy of all that the root holds. `verify`
compares the two, and `repair` takes the whole one.
If a resumed run gets other attributes, the writer replaces the root first. If it dies then, the
fingerprint in the root shows that the copy is the older one.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Mapping
from typing import Any, Self

import numpy as np
import numpy.typing as npt

from trajstore.schema import STEP, belongs, coordinate, variables_of
from trajstore.store.metadata.array_metadata import with_rows
from trajstore.store.metadata.fingerprint import CHANGING, COPY, NOTES, Fingerprint
from trajstore.store.metadata.metadata_form import UNPROVEN, Status, root_of
from trajstore.strict_json import utc_now

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
        held = variables_of(attributes)
        self._arrays = {
            name: array for name, array in arrays.items() if not is_outgrown(name, array, held)
        }
        copy = json.dumps(dict(attributes), allow_nan=False)
        self.attributes: dict[str, Any] = json.loads(copy)  # makes all keys strings
        step = self._arrays[STEP.name]
        self._arrays[STEP.name] = step | {"attributes": step["attributes"] | {COPY: copy}}
        # Other arrays in the group do not belong to the run and do not change.
        self._series = tuple(
            name for name in self._arrays if belongs(name, held) and coordinate(name) is None
        )

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
        found = cls(root["consolidated_metadata"]["metadata"], fixed_attributes(present))
        found.notes = notes_of(present)
        return found

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
    return [dict(one) for one in attributes.get(NOTES, [])]


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
