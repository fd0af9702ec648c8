"""The commit: the documents by which the rows of written shards become part of a run.

Readers take the shapes of all arrays from the root. So the root is replaced last where a run grows,
and before them where it is cut: never does a reader see a row that not every array holds.
"""

from __future__ import annotations

from functools import partial

from trajstore.schema import STEP
from trajstore.store.metadata.fingerprint import Fingerprint
from trajstore.store.metadata.object_keys import DOCUMENT
from trajstore.store.metadata.zarr_json import RunMetadata, Status
from trajstore.store.storage.atomic import put, put_all
from trajstore.store.storage.remote_lock import taken_over
from trajstore.store.storage.remote_path import REMOTE_REQUESTS, Location, RemotePath
from trajstore.threads import in_parallel

__all__ = ["Committer"]


class Committer:
    """Writes the documents of one run.

    Parameters
    ----------
    path : Path or RemotePath
    metadata : RunMetadata
    fingerprint : Fingerprint
        Of the rows that are there.
    fsync : bool
        Have every document survive a loss of power.

    Attributes
    ----------
    rows : int
        Rows that readers see.
    """

    def __init__(
        self,
        path: Location,
        metadata: RunMetadata,
        fingerprint: Fingerprint,
        *,
        fsync: bool,
    ) -> None:
        self.rows = 0
        self._path = path
        self._metadata = metadata
        self._fingerprint = fingerprint
        self._fsync = fsync
        self._root_tag = _tag_of(path / DOCUMENT)

    def commit(self, change: tuple[int, Status], block: tuple[int, bytes] | None = None) -> None:
        """Make so many rows visible, of which every shard is written, with that status.

        Parameters
        ----------
        change : (int, str)
            Rows and status.
        block : (int, bytes), optional
            Rows and digest of the block that they end with, if it is new.
        """
        rows, status = change
        if rows > self.rows:
            self._put_arrays(rows)
        self._put_root(rows, status, block)

    def cut(self, rows: int, block: tuple[int, bytes] | None = None) -> None:
        """Take back all rows but the first so many, of a run that is recorded again.

        Parameters
        ----------
        rows : int
        block : (int, bytes), optional
            Rows and digest of the block that they end with, if that is not whole.
        """
        coming = self._metadata.announcement()
        if coming is not None:
            put(self._path / STEP.name / DOCUMENT, [coming], fsync=self._fsync)
        self._put_root(rows, "recording", block)
        self._put_arrays(rows)

    def _put_arrays(self, rows: int) -> None:
        path = self._path
        documents = {name: self._metadata.array(name, rows) for name in self._metadata.series()}
        if isinstance(path, RemotePath):
            jobs = [partial(put, path / name / DOCUMENT, [documents[name]]) for name in documents]
            list(in_parallel(jobs, REMOTE_REQUESTS))
        else:
            objects = [(path / name / DOCUMENT, [documents[name]]) for name in documents]
            put_all(objects, fsync=self._fsync)

    def _put_root(self, rows: int, status: Status, block: tuple[int, bytes] | None) -> None:
        fingerprint = self._fingerprint
        if block is not None:
            fingerprint = fingerprint.added(*block)
        document = self._metadata.root(rows, status, fingerprint.attributes())
        self._replace_root(document)
        # Only now: a commit that failed may be followed by one of the rows before.
        self.rows, self._fingerprint = rows, fingerprint

    def _replace_root(self, document: bytes) -> None:
        root = self._path / DOCUMENT
        if not isinstance(root, RemotePath):
            put(root, [document], fsync=self._fsync)
            return
        try:
            self._root_tag = root.write_bytes(document, instead_of=self._root_tag)
        except FileExistsError as error:
            raise taken_over(self._path) from error


def _tag_of(root: Location) -> str | None:
    """Which version of the root a writer has begun with, where another may take its lock over."""
    found = root.stat() if isinstance(root, RemotePath) else None
    return None if found is None else str(found["e_tag"])
