"""Checked metadata of a run, which every other check and a repair use."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

from trajstore.integrity.problem import Problem
from trajstore.store.metadata.array_metadata import ArrayFacts, facts_of
from trajstore.store.metadata.object_keys import METADATA_KEY
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
    variables : tuple of str
        Variables that the run can hold, by the attributes of its root and their copy.
    attributes : dict
        Attributes of the root; empty if it cannot be read.
    copy : dict or None
        Copy of the root's fixed attributes in `step`.
    replaced : bool
        True if the metadata file of `step` holds attributes that a resume replaced in the root.
    rows : int
        Committed rows.
    arrays : dict
        The better metadata of each array, with the committed rows.
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
    variables: tuple[str, ...] = ()
    attributes: JsonObject = field(default_factory=dict)
    copy: JsonObject | None = None
    replaced: bool = False
    rows: int = 0
    arrays: dict[str, JsonObject] = field(default_factory=dict)
    problems: list[Problem] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    refused: bool = False

    def stored(self, name: str) -> StoredArray:
        """Reader of an array that grows with the rows."""
        facts = facts_of(name, self.arrays[name])
        assert isinstance(facts, ArrayFacts)  # otherwise its metadata file has a fault
        return self.reader(facts)

    def reader(self, facts: ArrayFacts) -> StoredArray:
        """Reader of an array with these facts, which grows with the rows."""
        assert facts.form is not None
        return StoredArray(path=self.path, name=facts.name, shape=facts.shape, form=facts.form)

    def consolidated(self) -> dict[str, Any] | None:
        """Metadata files of the arrays in the root; None if they are lost."""
        block = (self.root or {}).get("consolidated_metadata")
        entries = block.get("metadata") if isinstance(block, dict) else None
        return entries if isinstance(entries, dict) else None

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
