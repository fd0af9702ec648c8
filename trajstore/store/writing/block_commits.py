"""Buffers, writes and commits of the blocks of an open run, both full and unfinished.

The blocks in memory form a ring. The caller fills one, while the ones before it are written. A
buffer is reused only after its block was committed, so no row is copied or lost, and the caller
waits if the disk is slow.

One thread takes the writes in order. For each, the `BlockWriter` encodes and writes the shards of
the block. Then the `Committer` updates the metadata of each array and replaces the root, which is
the commit. If a block takes long to fill, `CommitTimer` commits its rows at intervals in the same
way. Later commits replace the shards of this block.
"""

from __future__ import annotations

import contextlib
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Any

import numpy as np
import numpy.typing as npt

from trajstore.schema import STEP
from trajstore.store.metadata.metadata_form import Status
from trajstore.store.storage.lock import RunLock
from trajstore.store.storage.remote_lock import RemoteLock
from trajstore.store.writing.block_writer import BlockWriter
from trajstore.store.writing.commit import Committer, Written
from trajstore.store.writing.commit_timer import CommitTimer
from trajstore.store.writing.ready_memory import ReadyMemory
from trajstore.store.writing.resumed_run import ResumedRun, remove_past_end
from trajstore.threads import submit

OnCommit = Callable[[dict[str, npt.NDArray[Any]], int, int], None]
"""Takes native bits of the rows of a block, the number of its first row, and bytes on disk."""


class BlockCommits:
    """Fills, writes and commits the blocks of one run in order.

    Parameters
    ----------
    run : ResumedRun
    lock : RunLock or RemoteLock or None
        Lock of the run; None if another process commits. It is kept until all writes are done, even
        if the writer was dropped.
    commit_every : float or None
        After `start`, seconds from a commit to that of the unfinished block; None to commit full
        blocks only, as several processes do.
    fsync : bool
        Flush every commit to disk.

    Attributes
    ----------
    layout : Layout
        Layout of the part of the run that this process holds.
    rows : int
        Number of rows added so far.
    seconds_waited : float
        Time that `places` waited for the disk because all buffers were full.
    on_commit : callable or None
        Called in the writing thread after a commit of rows, before their buffer is filled again.
    """

    def __init__(
        self,
        run: ResumedRun,
        lock: RunLock | RemoteLock | None,
        *,
        commit_every: float | None,
        fsync: bool,
    ) -> None:
        self.layout = layout = run.share.of_layout(run.layout)
        self.rows = run.rows
        self.seconds_waited = 0.0
        self.on_commit: OnCommit | None = None
        self._run = run
        self._lock = lock
        self._rows_lock = threading.Lock()  # the timer's thread reads the number of rows
        self._committer = Committer(run, fsync=fsync)
        # No timer with several processes, as all would have to stop at the same row.
        self._timer = self._new_timer(commit_every if run.share.count == 1 else None)
        self._shards = BlockWriter(run.path, layout, fsync=fsync, lock=lock)
        self._failure: BaseException | None = None  # nothing is written or committed after it
        self._thread = ThreadPoolExecutor(1, "trajstore-writer")
        self._last: Future[None] | None = None
        self._full: deque[Future[None]] = deque(maxlen=layout.buffers)  # writes of full blocks
        self._buffers = [
            {
                name: np.empty((layout.block_rows, *array.row), array.native.bits)
                for name, array in layout.arrays.items()
            }
            for _ in range(layout.buffers)
        ]
        self._memory = ReadyMemory(self._buffers, run.rows)
        if run.rows:
            self._shards.bytes_written += run.load(self._block())
            self._shards.skips = run.skips()

    @property
    def committed_rows(self) -> int:
        """Rows that readers see."""
        return self._committer.rows

    @property
    def bytes_written(self) -> int:
        """Bytes of the shards on disk."""
        return self._shards.bytes_written

    def cut(self) -> None:
        """Cut the stored run to the kept rows."""
        self._committer.cut()

    def start(self) -> None:
        """Start the commits of unfinished blocks at intervals."""
        if self._timer is not None:
            self._timer.start()

    def check(self) -> None:
        """Raise the error of an earlier write, if any, without waiting."""
        if self._failure is not None:
            raise self._failure

    def places(self, most: int) -> dict[str, npt.NDArray[Any]]:
        """Places of the next rows in the current block: native bits, (row, …).

        Parameters
        ----------
        most : int
            Largest number of rows, at least 1. At the end of a block there are fewer.
        """
        begins = self.rows % self.layout.block_rows == 0
        if begins and len(self._full) == self._full.maxlen and not self._full[0].done():
            started = time.perf_counter()
            self._full[0].result()
            self.seconds_waited += time.perf_counter() - started
        return {name: self._next(array)[:most] for name, array in self._block().items()}

    def add(self, steps: Sequence[int] | npt.NDArray[np.integer[Any]]) -> None:
        """Add rows of these steps, whose places are filled. Submit the block if it is full."""
        if STEP.name in self._block():  # otherwise another process writes it
            self._next(self._block()[STEP.name])[: len(steps)] = steps
        with self._rows_lock:
            self.rows += len(steps)
            self._memory.reach(self.rows)
            if len(steps) and self.rows % self.layout.block_rows == 0:
                self._full.append(self._submit("recording"))

    def commit(self) -> None:
        """Write and commit all rows, and wait."""
        with self._rows_lock:
            if self.rows % self.layout.block_rows and self.rows > self.committed_rows:
                self._submit("recording")
            last = self._last
        if last is not None:
            last.result()

    def finish(self, status: Status) -> None:
        """Write and commit all rows with a status, and wait. Remove what a cut left past them.

        If a block cannot be written, the status becomes ``interrupted``.
        """
        if self._timer is not None:
            self._timer.stop()
        try:
            self._submit(status, block=self.rows % self.layout.block_rows != 0).result()
            if self._run.share.is_first:
                remove_past_end(self._run.path, self.layout, self.rows)
        except BaseException:
            if self._failure is not None and self._run.share.is_first:
                # If this fails, too, the first failure is more important.
                with contextlib.suppress(OSError):
                    self._committer.put_metadata((self.committed_rows, "interrupted"))
            raise

    def close(self) -> None:
        """Wait for all submitted blocks, and release memory and threads."""
        self._thread.shutdown()
        self._shards.close()
        self._memory.close()
        self._buffers.clear()

    def _block(self, row: int | None = None) -> dict[str, npt.NDArray[Any]]:
        """The block of a row (default: the next one): native bits of every array, (row, …)."""
        number = (self.rows if row is None else row) // self.layout.block_rows
        return self._buffers[number % self.layout.buffers]

    def _next(self, array: npt.NDArray[Any]) -> npt.NDArray[Any]:
        """Unfilled rows of an array of that block."""
        return array[self.rows % self.layout.block_rows :]

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
                if self._last is not None and not self._last.done():
                    return False
                if self._failure is None and self.rows > self.committed_rows:
                    # No buffer waits for it, as the write of the full block comes later.
                    self._submit("recording", by_time=True)
        except BaseException as error:
            self._failure = error
        return True

    def _submit(self, status: Status, *, block: bool = True, by_time: bool = False) -> Future[None]:
        """Start to write the current block, unless `block` is False, and to commit all rows.

        `by_time` is True if the timer starts it.
        """
        number, last = divmod(self.rows - 1, self.layout.block_rows)
        if block:
            filled = {name: array[: last + 1] for name, array in self._block(self.rows - 1).items()}
            self._shards.encode(number, filled)
        place = (number, last + 1) if block else None
        change = self.rows, status
        self._last = submit(self._thread, self._write, self._last, place, change, by_time)
        return self._last

    def _write(
        self,
        before: Future[None] | None,
        place: tuple[int, int] | None,
        change: tuple[int, Status],
        by_time: bool,
    ) -> None:
        """Write a block, and make it visible to readers. Runs in the writing thread."""
        if before is not None:
            # It is already done, except while the interpreter exits: then this is the caller's
            # thread, and the writing thread may still be writing the previous block.
            wait([before])
        self.check()
        try:
            try:
                self._committer.commit(change, None if place is None else self._written(*place))
            except FileNotFoundError:
                self._committer.check_place()  # its error is clearer if the run is gone
                raise
            if self._timer is not None:
                self._timer.committed(by_time=by_time)
            if place is not None and self.on_commit is not None:
                first, rows = place[0] * self.layout.block_rows, place[1]
                block = {name: array[:rows] for name, array in self._block(first).items()}
                self.on_commit(block, first, self.bytes_written)
        except BaseException as error:
            self._failure = error
            self._shards.forget()
            raise

    def _written(self, number: int, rows: int) -> Written:
        try:
            self._committer.check_place()
            return self._shards.write(number, rows)
        except BaseException as error:
            self._committer.fail(error)
            raise
