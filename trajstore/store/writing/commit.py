"""The commit: it writes the metadata that make the rows of written shards part of a run.

Readers use the shapes of the arrays in the root. So a commit replaces the root after the metadata
files of the arrays, and a cut replaces it before them. Readers see a row only if every array holds
it.

The thread of `CommitTimer` asks for a commit of an unfinished block some seconds after the last
commit, so that rows are committed even while the next step takes long.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from trajstore.codec.open_block import check_not_replaced
from trajstore.errors import RecordingError
from trajstore.store.metadata.metadata_form import ShardDigest, Status, block_digest
from trajstore.store.reading.array_reader import present_root
from trajstore.store.storage.atomic import put, put_all
from trajstore.store.storage.lock import taken_over
from trajstore.store.storage.remote_path import METADATA_KEY, REMOTE_REQUESTS, Location, RemotePath
from trajstore.store.writing.resumed_run import (
    ResumedRun,
    in_all_processes,
    raise_failure,
    sentence,
)
from trajstore.threads import in_parallel

Written = tuple[int, Sequence[ShardDigest]]
"""Rows of a block, and its written shards."""


@dataclass(frozen=True, kw_only=True)
class _Report:
    """Report of a process on a block: the commit it is ready for, or its failure."""

    change: tuple[int, Status] | None = None
    written: Written | None = None
    failure: str | None = None


class Committer:
    """Writes the metadata of one run, jointly in all processes that write it.

    After each block all processes report the rows they wrote and the digests of their shards. If
    all succeeded, the first process commits, and reports that. So readers never see a row with a
    missing shard. If one process fails, all fail, in the same block.

    Parameters
    ----------
    run : ResumedRun
        The present rows, and the share of this process.
    fsync : bool
        Flush every metadata file to disk.

    Attributes
    ----------
    rows : int
        Rows that readers see; before `cut` those that it keeps.
    """

    def __init__(self, run: ResumedRun, *, fsync: bool) -> None:
        self.rows = run.rows
        self._run = run
        self._path = run.path
        self._metadata = run.metadata
        self._fingerprint = run.fingerprint
        self._share = run.share
        self._fsync = fsync
        self._root_tag = _tag_of(run.path / METADATA_KEY) if run.share.is_first else None
        self._root_file: tuple[int, ...] | None = None  # the root of the last check or commit

    def check_place(self) -> None:
        """Check that the folder still holds this run, before anything is written into it.

        The path may lead to another run: its folder, or one above it, can be renamed or removed,
        and created again, while this writer works. Commits to an object store are conditional.

        Raises
        ------
        RunNotFound
            If the run is gone.
        """
        if not isinstance(self._path, Path) or not self._share.is_first:
            return
        present = None
        with contextlib.suppress(FileNotFoundError, NotADirectoryError):
            present = _file_of(self._path / METADATA_KEY)
        if present is None or present != self._root_file:
            self._check_run()
            self._root_file = present

    def _check_run(self) -> None:
        since = f"while it was written; its first {self.rows} rows were committed before"
        runs, root = self._run.layout.runs, present_root(self._path)
        check_not_replaced(self._path, runs, root, since, is_written=True)

    def commit(self, change: tuple[int, Status], written: Written | None) -> None:
        """Make rows visible after all processes have written their tokens, and set the status.

        Parameters
        ----------
        change : (int, str)
            Total number of rows, and status.
        written : Written or None
            The last block, with the shards of this process, if it is new.

        Raises
        ------
        RecordingError
            If another process failed or has another number of rows. Then nothing is committed.
        """
        reports = self._share.exchange(_Report(change=change, written=written))
        raise_failure([report.failure for report in reports])
        _check_alike(reports)
        with in_all_processes(self._share):
            if self._share.is_first:
                self.put_metadata(change, _whole_block(reports))
        self.rows = change[0]

    def fail(self, error: BaseException) -> None:
        """Report to the other processes that this block cannot be written."""
        with contextlib.suppress(RecordingError):  # they have ended; the caller raises `error`
            self._share.exchange(_Report(failure=sentence(error)))

    def put_metadata(self, change: tuple[int, Status], written: Written | None = None) -> None:
        """Commit in the first process. All shards must be written. For the parameters see `commit`.

        `written` is the last block, with the shards of all processes, if it is new.
        """
        if change[0] > self.rows:
            self._put_arrays(change[0])
        self._put_root(*change, written)

    def cut(self) -> None:
        """Cut the stored run to the kept rows, before it is resumed from there."""
        rows = self._run.rows
        if self._share.is_first:
            self._put_root(rows, "recording")
            self._put_arrays(rows)

    def require(self, number: int) -> None:
        """Raise the number of the format, if it is lower, before blocks that need it are written.

        The root comes first, as in a resume with other attributes.
        """
        if self._metadata.attributes["trajstore_format"] < number:
            self._metadata.raise_format(number)
            self._fingerprint = self._fingerprint.of_attributes(self._metadata.attributes)
            self._put_root(self.rows, "recording")
            self._put_arrays(self.rows)

    def _put_arrays(self, rows: int) -> None:
        path = self._path
        changed = {name: self._metadata.array(name, rows) for name in self._metadata.series()}
        if isinstance(path, RemotePath):
            jobs = [partial(put, path / name / METADATA_KEY, [changed[name]]) for name in changed]
            list(in_parallel(jobs, REMOTE_REQUESTS))
        else:
            objects = [(path / name / METADATA_KEY, [changed[name]]) for name in changed]
            put_all(objects, fsync=self._fsync)

    def _put_root(self, rows: int, status: Status, written: Written | None = None) -> None:
        fingerprint = self._fingerprint
        if written is not None:
            fingerprint = fingerprint.added(written[0], block_digest(written[1]))
        metadata = self._metadata.root(rows, status, fingerprint.attributes())
        root = self._path / METADATA_KEY
        if isinstance(root, RemotePath):
            try:
                self._root_tag = root.write_bytes(metadata, instead_of=self._root_tag)
            except FileExistsError as error:
                self._check_run()
                raise taken_over(self._path) from error
        else:
            self.check_place()
            put(root, [metadata], fsync=self._fsync)
            self._root_file = _file_of(root)
        # Only after success: another commit of fewer rows may follow a failed one.
        self.rows, self._fingerprint = rows, fingerprint


def _tag_of(root: Location) -> str | None:
    """Tag of the present root of a remote run, whose lock another writer may take over."""
    facts = root.stat() if isinstance(root, RemotePath) else None
    return None if facts is None else str(facts["e_tag"])


def _file_of(root: Location) -> tuple[int, ...]:
    """Return what tells a metadata file from the one that replaces it."""
    status = os.stat(str(root))
    return status.st_dev, status.st_ino, status.st_mtime_ns, status.st_size


def _check_alike(reports: Sequence[_Report]) -> None:
    if len({(report.change, report.written is None) for report in reports}) > 1:
        places = ", ".join(
            f"process {number} with {report.change[0]} rows, {report.change[1]}"
            for number, report in enumerate(reports)
            if report.change is not None
        )
        raise RecordingError(
            f"the processes that record a run have different numbers of rows: {places}; the rows "
            "committed before are complete; resume the run from them"
        )


def _whole_block(reports: Sequence[_Report]) -> Written | None:
    """The block that all processes wrote; None if there is none."""
    if not (written := [report.written for report in reports if report.written is not None]):
        return None
    return written[0][0], [shard for _, shards in written for shard in shards]


_PAUSE = 5  # pause per duration of the last such commit: they use at most a sixth of the time
_ATTEMPTS = 10  # attempts in the time of one pause, while another write is running


class CommitTimer:
    """Commits the rows of a writer at intervals.

    Parameters
    ----------
    every : float
        Seconds after the last commit, but at least five times the duration of the last timed
        commit.
    commit : callable
        Starts a commit of uncommitted rows, if there are any, and returns at once. Returns False if
        another write is running, and None if the writer no longer exists.
    clock : callable
        Returns seconds.

    Examples
    --------
    >>> now = 0.0
    >>> timer = CommitTimer(10.0, lambda: True, clock=lambda: now)
    >>> now = 4.0
    >>> timer.commit_if_due()
    6.0
    """

    def __init__(
        self,
        every: float,
        commit: Callable[[], bool | None],
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._every = every
        self._commit = commit
        self._clock = clock
        self._last = self._begun = clock()
        self._took = 0.0
        self._stopped = threading.Event()
        # A daemon, so that a recording that is never closed does not keep the process alive.
        self._thread = threading.Thread(target=self._run, name="trajstore-timer", daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def stop(self) -> None:
        """Stop the thread. A commit that has started continues."""
        self._stopped.set()
        if self._thread.is_alive() and self._thread is not threading.current_thread():
            self._thread.join()

    def committed(self, *, by_time: bool) -> None:
        """Record the end of a commit. `by_time` is True if this timer started it."""
        self._last = self._clock()
        if by_time:
            self._took = self._last - self._begun

    def commit_if_due(self) -> float | None:
        """Start a commit if it is due.

        Returns
        -------
        float or None
            Seconds until the next call; None if the writer no longer exists.
        """
        now = self._clock()
        if now < (due := self._last + max(self._every, _PAUSE * self._took)):
            return due - now
        before, self._begun = self._begun, now
        begun = self._commit()
        if begun is False:  # the previous commit may still be running
            self._begun = before
        if begun is None:
            return None
        return self._every if begun else self._every / _ATTEMPTS

    def _run(self) -> None:
        seconds: float | None = self._every
        while seconds is not None:
            if self._stopped.wait(min(seconds, threading.TIMEOUT_MAX)):
                return
            seconds = self.commit_if_due()
