"""The commit: it writes the documents that make the rows of written shards part of a run.

Readers use the shapes of the arrays in the root. So a commit replaces the root after the documents
of the arrays, and a cut replaces it before them. Readers see a row only if every array holds it.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from trajstore.store.metadata.fingerprint import Fingerprint, ShardDigest, block_digest
from trajstore.store.metadata.object_keys import DOCUMENT
from trajstore.store.metadata.zarr_json import RunMetadata, Status
from trajstore.store.storage.atomic import put, put_all
from trajstore.store.storage.remote_lock import taken_over
from trajstore.store.storage.remote_path import REMOTE_REQUESTS, Location, RemotePath
from trajstore.threads import in_parallel

__all__ = ["Committer", "Written"]

Written = tuple[int, Sequence[ShardDigest]]
"""Rows of a block, and its written shards."""


class Committer:
    """Writes the documents of one run.

    Parameters
    ----------
    path : Path or RemotePath
    metadata : RunMetadata
    fingerprint : Fingerprint
        Fingerprint of the present rows.
    fsync : bool
        Flush every document to disk.

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

    def commit(self, change: tuple[int, Status], written: Written | None = None) -> None:
        """Make rows visible to readers, and set the status. All their shards must be written.

        Parameters
        ----------
        change : (int, str)
            Total number of rows, and status.
        written : Written, optional
            The last block, if it is new.
        """
        rows, status = change
        block = None if written is None else (written[0], block_digest(written[1]))
        if rows > self.rows:
            self._put_arrays(rows)
        self._put_root(rows, status, block)

    def cut(self, rows: int, block: tuple[int, bytes] | None = None) -> None:
        """Cut the run to its first `rows` rows, before it is resumed from there.

        Parameters
        ----------
        rows : int
        block : (int, bytes), optional
            Rows and digest of the last block, if it is not full.
        """
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
        # Only after success: another commit of fewer rows may follow a failed one.
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
    """Tag of the present root of a remote run, whose lock another writer may take over."""
    found = root.stat() if isinstance(root, RemotePath) else None
    return None if found is None else str(found["e_tag"])
