"""Checked documents of a run, which every other check and a repair use."""

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
    """Documents of a run, and their problems.

    Attributes
    ----------
    path : Path or RemotePath
    objects : dict of str to int or None
        Bytes of each object by its key, as an object store lists them; None for a folder or a web
        server.
    root : dict or None
        Stored document of the root; None if it cannot be read.
    own : dict
        Document in each array's folder, without announced attributes; None if it cannot be read.
    attributes : dict
        Attributes of the root; empty if it cannot be read.
    copy : dict or None
        Copy of the root's fixed attributes in `step`.
    announced : bool
        True if the document of `step` announces new attributes.
    rows : int
        Committed rows.
    arrays : dict
        The better document of each array, with the committed rows.
    problems : list of Problem
    notes : list of str
        Remarks that are no damage.
    refused : bool
        True if the system refused to read a document, which may be sound.
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
        assert stored is not None  # otherwise its document has a fault
        return stored

    def consolidated(self) -> dict[str, Any] | None:
        """Documents of the arrays in the root; None if they are lost."""
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
        """Add a problem of a document: by default of the array, otherwise of the root."""
        path = path or self.path / (array or "") / DOCUMENT
        self.problems.append(Problem(array=array, path=path, message=message, remedy=remedy))
