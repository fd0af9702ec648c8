"""Buffers and commits of the blocks of an open run, both full and unfinished.

The `BlockWriter` encodes and writes the shards of a full block in the background, while the caller
fills the next block, if there is a buffer for it. Then the `Committer` updates the metadata of each
array and replaces the root, which is the commit. If a block takes long to fill, `CommitTimer`
commits its rows at intervals in the same way. Later commits replace the shards of this block.
"""

from __future__ import annotations

import contextlib
import threading
import time
import weakref
from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future
from typing import Any

import numpy as np
import numpy.typing as npt

from trajstore.schema import STEP
from trajstore.store.metadata.block_plan import Layout
from trajstore.store.metadata.fingerprint import block_digest
from trajstore.store.metadata.zarr_json import Status
from trajstore.store.storage.lock import RunLock
from trajstore.store.storage.remote_lock import RemoteLock
from trajstore.store.storage.remote_path import Location
from trajstore.store.writing.block_writer import BlockWriter
from trajstore.store.writing.commit import Committer
from trajstore.store.writing.commit_timer import CommitTimer
from trajstore.store.writing.resumed_run import ResumedRun
from trajstore.store.writing.shared_run import SharedCommits, Written
from trajstore.store.writing.token_share import TokenShare

__all__ = ["BlockCommits"]


class BlockCommits:
    """Fills, writes and commits the blocks of one run in order.

    Parameters
    ----------
    path : Path or RemotePath
    layout : Layout
        Layout of the part of the run that this process holds.
    committer : Committer or None
        None if another process commits.
    commit_every : float or None
        After `start`, seconds from a commit to that of the unfinished block; None to commit full
        blocks only.
    fsync : bool
        Flush every commit to disk.
    share : TokenShare, optional
        Share of this process, if several write the run. Then only full blocks are committed.
    lock : RunLock or RemoteLock, optional
        Lock of the run. It is kept until all writes are done, even if the writer was dropped.

    Attributes
    ----------
    rows : int
        Number of rows added so far.
    """

    def __init__(
        self,
        path: Location,
        layout: Layout,
        committer: Committer | None,
        *,
        commit_every: float | None,
        fsync: bool,
        share: TokenShare | None = None,
        lock: RunLock | RemoteLock | None = None,
    ) -> None:
        self.rows = 0
        self._lock = lock
        self._layout = layout
        self._rows_lock = threading.Lock()  # the timer's thread reads the number of rows
        self._committer = committer
        self._shared = None if share is None else SharedCommits(share, committer)
        # No timer with several processes, as all would have to stop at the same row.
        self._timer = self._new_timer(commit_every if share is None else None)
        self._block_writer = BlockWriter(
            path,
            layout,
            self._commit,
            fsync=fsync,
            lock=lock,
            on_failure=None if self._shared is None else self._shared.fail,
        )
        self._buffers = _Buffers(layout, self._block_writer)

    @property
    def committed_rows(self) -> int:
        """Rows that readers see."""
        commits = self._committer or self._shared
        assert commits is not None
        return commits.rows

    @property
    def commits(self) -> bool:
        """True if this process commits."""
        return self._committer is not None

    @property
    def notes(self) -> list[dict[str, Any]]:
        """Notes about the run, which each commit writes; none in a process that does not commit."""
        return [] if self._committer is None else self._committer.notes

    @notes.setter
    def notes(self, notes: list[dict[str, Any]]) -> None:
        if self._committer is not None:
            self._committer.notes = notes

    @property
    def bytes_written(self) -> int:
        """Bytes of the shards on disk."""
        return self._block_writer.bytes_written

    @property
    def seconds_waited(self) -> float:
        """Time that `places` waited for the disk because all buffers were full."""
        return self._buffers.seconds_waited

    def load_rows(self, kept: ResumedRun) -> None:
        """Load the kept rows of the unfinished block. The stored run does not change."""
        self.rows = kept.rows
        self._block_writer.bytes_written += kept.load(self._block())
        self._block_writer.skips = kept.skips()

    def cut(self, kept: ResumedRun) -> None:
        """Cut the run to the kept rows."""
        if self._shared is not None:
            self._shared.rows = kept.rows
        if self._committer is None:
            return
        unfinished = kept.rows % self._layout.block_rows
        last = None
        if unfinished:
            last = (unfinished, kept.digest_of_unfinished())
        self._committer.cut(kept.rows, last)

    def start(self) -> None:
        """Start the commits of unfinished blocks at intervals."""
        if self._timer is not None:
            self._timer.start()

    def check(self) -> None:
        """Raise the error of an earlier write, if any, without waiting."""
        self._buffers.check()

    def places(self, most: int) -> dict[str, npt.NDArray[Any]]:
        """Places of the next rows in the current block: native bits, (row, …).

        Parameters
        ----------
        most : int
            Largest number of rows, at least 1. At the end of a block there are fewer.
        """
        if self.rows % self._layout.block_rows == 0:
            self._buffers.make_room()
        return {name: self._next(array)[:most] for name, array in self._block().items()}

    def add(self, steps: Sequence[int] | npt.NDArray[np.integer[Any]]) -> None:
        """Add rows of these steps, whose places are filled. Submit the block if it is full."""
        if STEP.name in self._block():  # otherwise another process writes it
            self._next(self._block()[STEP.name])[: len(steps)] = steps
        with self._rows_lock:
            self.rows += len(steps)
            if len(steps) and self.rows % self._layout.block_rows == 0:
                self._buffers.submit(self.rows)

    def stop(self) -> None:
        """Stop the commits at intervals."""
        if self._timer is not None:
            self._timer.stop()

    def finish(self, status: Status) -> None:
        """Write and commit all rows with a status, and wait."""
        self._buffers.finish(self.rows, status)

    def give_up(self) -> None:
        """Commit the status ``interrupted``, if a block could not be written."""
        if self._block_writer.failure is not None and self._committer is not None:
            # If this fails, too, the first failure is more important.
            with contextlib.suppress(OSError):
                self._committer.commit((self.committed_rows, "interrupted"))

    def close(self) -> None:
        """Wait for all submitted blocks, and release memory and threads."""
        self._buffers.close()

    def _block(self) -> dict[str, npt.NDArray[Any]]:
        """The current block, which is being filled."""
        return self._buffers.block(self.rows)

    def _next(self, array: npt.NDArray[Any]) -> npt.NDArray[Any]:
        """Unfilled rows of an array of that block."""
        return array[self.rows % self._layout.block_rows :]

    def _new_timer(self, every: float | None) -> CommitTimer | None:
        if every is None:
            return None
        method = weakref.WeakMethod(self._commit_unfinished)

        def commit() -> bool | None:
            bound = method()  # weak, so that a dropped writer can be collected
            return None if bound is None else bound()

        return CommitTimer(every, commit)

    def _commit_unfinished(self) -> bool:
        """Start a commit of the unfinished block; return False if another write is running.

        The timer calls it in its thread. The next `check` raises its errors.
        """
        try:
            with self._rows_lock:
                # First, as rows that are being written may or may not be committed.
                if not self._block_writer.idle:
                    return False
                if self._block_writer.failure is None and self.rows > self.committed_rows:
                    self._buffers.commit_unfinished(self.rows)
        except BaseException as error:
            self._block_writer.failure = error
        return True

    def _commit(self, change: tuple[int, Status], written: Written | None) -> None:
        """Make written rows visible to readers. Runs in the writing thread."""
        if self._shared is not None:
            self._shared.commit(change, written)
            return
        assert self._committer is not None
        self._committer.commit(change, written and (written[0], block_digest(written[1])))
        if self._timer is not None:
            rows, status = change
            unfinished = rows % self._layout.block_rows != 0 and status == "recording"
            self._timer.committed(by_time=unfinished)


class _Buffers:
    """The blocks in memory: one is filled, and the ones before it are written.

    The layout defines the number of buffers. A buffer is reused only after its block was written
    and committed. So no row is copied or lost, and the caller waits if the disk is slow.

    Parameters
    ----------
    layout : Layout
    block_writer : BlockWriter
        Its commits take a number of rows and a status.
    """

    def __init__(self, layout: Layout, block_writer: BlockWriter) -> None:
        self.seconds_waited = 0.0
        self._layout = layout
        self._block_writer = block_writer
        self._pending: deque[Future[None]] = deque()
        self._blocks = [
            {
                name: np.empty((layout.block_rows, *array.row), array.native.bits)
                for name, array in layout.arrays.items()
            }
            for _ in range(layout.buffers)
        ]

    def block(self, row: int) -> dict[str, npt.NDArray[Any]]:
        """Buffer of the block of a row: native bits of every array, (row, …)."""
        return self._blocks[row // self._layout.block_rows % self._layout.buffers]

    def make_room(self) -> None:
        """Wait until the buffer of the next block is free. Raise the error of an earlier write."""
        if len(self._pending) < self._layout.buffers:
            return
        started = time.perf_counter()
        self._settle(self._layout.buffers - 1)
        self.seconds_waited += time.perf_counter() - started

    def check(self) -> None:
        """Raise the error of an earlier write, if any, without waiting."""
        while self._pending and self._pending[0].done():
            self._pending.popleft().result()
        if self._block_writer.failure is not None:
            raise self._block_writer.failure

    def submit(self, rows: int, status: Status = "recording") -> None:
        """Start to write and commit the block that ends with row number `rows`."""
        self._pending.append(self._submit(rows, status))

    def commit_unfinished(self, rows: int) -> None:
        """Start to write and commit all rows, including those of an unfinished block.

        `make_room` does not wait for it: blocks are written in order, so this write ends before
        that of the full block, and the buffer is reused only after that.
        """
        self._submit(rows, "recording")

    def finish(self, rows: int, status: Status) -> None:
        """Write and commit all rows with a status, and wait."""
        if rows % self._layout.block_rows:
            self.submit(rows, status)
        else:
            self._pending.append(self._block_writer.submit(0, None, (rows, status)))
        self._settle(0)

    def close(self) -> None:
        """Wait for all submitted blocks, and release the memory."""
        self._block_writer.close()
        self._blocks.clear()

    def _submit(self, rows: int, status: Status) -> Future[None]:
        number, last = divmod(rows - 1, self._layout.block_rows)
        block = {name: array[: last + 1] for name, array in self.block(rows - 1).items()}
        return self._block_writer.submit(number, block, (rows, status))

    def _settle(self, most: int) -> None:
        """Wait until at most `most` blocks are being written. Raise their errors."""
        while len(self._pending) > most:
            self._pending.popleft().result()
