"""The commit: the documents by which the rows of written shards become part of a run.

Readers take the shapes of all arrays from the root. So the root is replaced last where a run grows,
and first where it is cut: never does a reader see a row that not every array holds.
"""

from __future__ import annotations

from pathlib import Path

from trajstore.store.atomic import put
from trajstore.store.object_keys import DOCUMENT
from trajstore.store.zarr_json import RunMetadata, Status

__all__ = ["Committer"]


class Committer:
    """Writes the documents of one run.

    Parameters
    ----------
    path : Path
    metadata : RunMetadata
    fsync : bool
        Have every document survive a loss of power.

    Attributes
    ----------
    rows : int
        Rows that readers see.
    """

    def __init__(self, path: Path, metadata: RunMetadata, *, fsync: bool) -> None:
        self.rows = 0
        self._path = path
        self._metadata = metadata
        self._fsync = fsync

    def commit(self, change: tuple[int, Status]) -> None:
        """Make so many rows visible, of which every shard is written, with that status."""
        rows, status = change
        if rows > self.rows:
            self._put_arrays(rows)
        self._put_root(rows, status)

    def cut(self, rows: int) -> None:
        """Take back all rows but the first so many, of a run that is recorded again."""
        self._put_root(rows, "recording")
        self._put_arrays(rows)

    def _put_arrays(self, rows: int) -> None:
        for name in self._metadata.series():
            document = self._metadata.array(name, rows)
            put(self._path / name / DOCUMENT, [document], fsync=self._fsync)

    def _put_root(self, rows: int, status: Status) -> None:
        put(self._path / DOCUMENT, [self._metadata.root(rows, status)], fsync=self._fsync)
        self.rows = rows
