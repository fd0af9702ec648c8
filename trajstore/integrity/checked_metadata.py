"""The documents of a run, once they are checked: what every other check and a repair go by."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

from trajstore.integrity.problem import Problem
from trajstore.store.metadata.document_form import open_document
from trajstore.store.metadata.object_keys import DOCUMENT
from trajstore.store.reading.array_reader import StoredArray, stored_array
from trajstore.store.storage.remote_path import Location
from trajstore.strict_json import Document

__all__ = ["CheckedMetadata"]


@dataclass(kw_only=True)
class CheckedMetadata:
    """What the documents of a run say, and what is wrong with them.

    Attributes
    ----------
    path : Path or RemotePath
    objects : dict of str to int or None
        Bytes of each object by its key, as an object store lists them; None of a folder, and of a
        web server, which lists nothing.
    root : dict or None
        Document of the root as it is on disk; None if it cannot be read.
    own : dict
        Document in each array's folder, without what it announces; None where it cannot be read.
    attributes : dict
        Of the root; empty if it cannot be read.
    copy : dict or None
        The root's fixed attributes as `step` has them.
    announced : bool
        Whether the document of `step` also says what they are about to be.
    rows : int
        Committed rows.
    arrays : dict
        The better document of each array; the growing ones with so many rows.
    problems : list of Problem
    notes : list of str
        What is not damage, and still worth knowing.
    refused : bool
        Whether the system did not let a document be read, which may be sound.
    """

    path: Location
    objects: dict[str, int] | None = None
    root: Document | None = None
    own: dict[str, Document | None] = field(default_factory=dict)
    attributes: Document = field(default_factory=dict)
    copy: Document | None = None
    announced: bool = False
    rows: int = 0
    arrays: dict[str, Document] = field(default_factory=dict)
    problems: list[Problem] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    refused: bool = False

    def stored(self, name: str) -> StoredArray:
        """Reader of an array that grows with the rows."""
        stored = stored_array(self.path, name, open_document(self.arrays[name]))
        assert stored is not None  # or its document had a fault
        return stored

    def consolidated(self) -> dict[str, Any] | None:
        """Documents of the arrays in the root; None where they are lost."""
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
        """Add a problem of a document: by default that of the array, or of the root."""
        path = path or self.path / (array or "") / DOCUMENT
        self.problems.append(Problem(array=array, path=path, message=message, remedy=remedy))
