"""Checked metadata of a run, which every other check and a repair use."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

from trajstore.integrity.problem import Problem
from trajstore.schema import STEP, belongs, variables_of
from trajstore.store.metadata.metadata_form import METADATA_KEY
from trajstore.store.metadata.zarr_json import ArrayFacts, facts_of, is_series
from trajstore.store.reading.array_reader import StoredArray
from trajstore.store.storage.remote_path import Location
from trajstore.strict_json import JsonObject


@dataclass(kw_only=True)
class CheckedMetadata:
    """Metadata of a run, and its problems.

    Attributes
    ----------
    path : Path or RemotePath
    objects : dict of str to int or None
        Bytes of each object by its key; None for a web server, which lists none.
    root : dict or None
        Stored metadata of the root; None if it cannot be read.
    own : dict
        Metadata in each array's folder; None if it cannot be read.
    whole : dict or None
        Root with all metadata of the run: the stored one, or the second copy of it in the folders
        of the arrays. None if neither is whole.
    rows : int
        Committed rows.
    arrays : dict
        Metadata of each array of the run, with the committed rows.
    problems : list of Problem
    notes : list of str
        Remarks that are no damage.
    refused : bool
        True if the system refused to read a metadata file, which may be sound.
    """

    path: Location
    objects: dict[str, int] | None = None
    root: JsonObject | None = None
    own: dict[str, JsonObject | None] = field(default_factory=dict)
    whole: JsonObject | None = None
    rows: int = 0
    arrays: dict[str, JsonObject] = field(default_factory=dict)
    problems: list[Problem] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    refused: bool = False

    @property
    def attributes(self) -> JsonObject:
        """Attributes of the whole root; empty without one."""
        return attributes_of(self.whole)

    def choose(self, root: JsonObject) -> None:
        """Use a root without faults."""
        self.whole = root
        self.rows = self.attributes["committed_rows"]
        held = variables_of(self.attributes)
        self.arrays = {
            name: array for name, array in listed_arrays(root).items() if belongs(name, held)
        }

    def stored(self, name: str) -> StoredArray:
        """Reader of an array that grows with the rows."""
        return array_reader(self.path, name, self.arrays[name])

    def report(
        self,
        array: str | None,
        message: str,
        path: Location | None = None,
        remedy: Literal["rewrite", "none"] = "rewrite",
    ) -> None:
        """Add a problem of a metadata file: by default of the array, otherwise of the root."""
        path = path or self.path / (array or "") / METADATA_KEY
        self.problems.append(Problem(array=array, path=path, message=message, remedy=remedy))


def attributes_of(root: JsonObject | None) -> JsonObject:
    """Attributes of a root, which may be damaged; empty if they cannot be read."""
    found = (root or {}).get("attributes")
    return found if isinstance(found, dict) else {}


def listed_arrays(root: JsonObject | None) -> dict[str, Any]:
    """Metadata of the arrays in a root, which may be damaged; empty if they are lost."""
    block = (root or {}).get("consolidated_metadata")
    found = block.get("metadata") if isinstance(block, dict) else None
    return found if isinstance(found, dict) else {}


def array_reader(path: Location, name: str, metadata: JsonObject) -> StoredArray:
    """Reader of an array that grows with the rows, of metadata without faults."""
    facts = facts_of(name, metadata)
    assert isinstance(facts, ArrayFacts)
    assert facts.form is not None
    return StoredArray(path=path, name=name, shape=facts.shape, form=facts.form)


def series_in(path: Location, root: JsonObject) -> dict[str, StoredArray]:
    """Readers of the arrays that grow with the rows, `step` first."""
    held = variables_of(attributes_of(root))
    names = [name for name in listed_arrays(root) if belongs(name, held) and is_series(name)]
    names.sort(key=lambda name: name != STEP.name)
    return {name: array_reader(path, name, listed_arrays(root)[name]) for name in names}
