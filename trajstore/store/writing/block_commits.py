"""The rows of an open run on their way to readers: blocks that are full, and the unfinished one.

A full block goes to the `BlockWriter`, which encodes and writes every array's shard behind the
caller's back, while the next block is filled, if there is a buffer for it; then the `Committer`
has each array's metadata grow, and replaces the root, which is the commit. When a block takes long
to fill, the rows that it has are written and committed from time to time in the same way
(`CommitTimer`), and what was written of it is replaced when it has grown.
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
    """Blocks of one run, filled, written and committed one after the other.

    Parameters
    ----------
    path : Path or RemotePath
    layout : Layout
        Of what this process holds of the run.
    committer : Committer or None
        None where another process commits.
    commit_every : float or None
        Seconds after a commit at which the rows of the unfinished block are committed, once
        `start` was called; None for whole blocks only.
    fsync : bool
        Have every commit survive a loss of power.
    share : TokenShare, optional
        Of this process, where several write the run; then only whole blocks are committed.
    lock : RunLock or RemoteLock, optional
        Of the run. It is kept as long as anything is written, also for a writer that was dropped.

    Attributes
    ----------
    rows : int
        Rows that were taken so far.
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
        self._rows_lock = threading.Lock()  # the timer's thread asks how many there are
        self._committer = committer
        self._shared = None if share is None else SharedCommits(share, committer)
        # Not by time where others write, too: they would have to stop at the same row.
        self._timer = self._made_timer(commit_every if share is None else None)
        self._block_writer = BlockWriter(
            path,
            layout,
            self._commit,
            fsync=fsync,
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
        """Whether this process is the one that commits."""
        return self._committer is not None

    @property
    def bytes_written(self) -> int:
        """Bytes of the shards on disk."""
        return self._block_writer.bytes_written

    @property
    def seconds_waited(self) -> float:
        """How long `places` has waited for the disk, because all buffers were full."""
        return self._buffers.seconds_waited

    def load_rows(self, kept: ResumedRun) -> None:
        """Have the rows that are kept behind those to come; the run is as it was."""
        self.rows = kept.rows
        self._block_writer.bytes_written += kept.load(self._block())

    def cut(self, kept: ResumedRun) -> None:
        """Cut the run to the rows that are kept."""
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
        """Begin to commit unfinished blocks from time to time."""
        if self._timer is not None:
            self._timer.start()

    def check(self) -> None:
        """Raise what went wrong so far, without waiting."""
        self._buffers.check()

    def places(self, most: int) -> dict[str, npt.NDArray[Any]]:
        """Places of the next rows in the block that is being filled: native bits, (row, …).

        Parameters
        ----------
        most : int
            At least 1; there are fewer at the end of a block.
        """
        if self.rows % self._layout.block_rows == 0:
            self._buffers.make_room()
        return {name: self._next(array)[:most] for name, array in self._block().items()}

    def add(self, steps: Sequence[int] | npt.NDArray[np.integer[Any]]) -> None:
        """Add the rows of these steps, whose places are filled, and hand over a full block."""
        if STEP.name in self._block():  # or another process writes it
            self._next(self._block()[STEP.name])[: len(steps)] = steps
        with self._rows_lock:
            self.rows += len(steps)
            if len(steps) and self.rows % self._layout.block_rows == 0:
                self._buffers.hand_over(self.rows)

    def stop(self) -> None:
        """Commit no more by time."""
        if self._timer is not None:
            self._timer.stop()

    def finish(self, status: Status) -> None:
        """Have every row written and committed with a status, and wait for that."""
        self._buffers.finish(self.rows, status)

    def give_up(self) -> None:
        """Commit the status ``interrupted``, if a block could not be written."""
        if self._block_writer.failure is not None and self._committer is not None:
            # The status is worth a try; the failure that is being raised matters more.
            with contextlib.suppress(OSError):
                self._committer.commit((self.committed_rows, "interrupted"))

    def close(self) -> None:
        """Wait for everything handed over, and let go of memory and threads."""
        self._buffers.close()

    def _block(self) -> dict[str, npt.NDArray[Any]]:
        """The block that is being filled."""
        return self._buffers.block(self.rows)

    def _next(self, array: npt.NDArray[Any]) -> npt.NDArray[Any]:
        """What is left of an array of that block."""
        return array[self.rows % self._layout.block_rows :]

    def _made_timer(self, every: float | None) -> CommitTimer | None:
        if every is None:
            return None
        method = weakref.WeakMethod(self._commit_unfinished)

        def commit() -> bool | None:
            bound = method()  # weak: a writer that was dropped without being closed may go
            return None if bound is None else bound()

        return CommitTimer(every, commit)

    def _commit_unfinished(self) -> bool:
        """Begin to commit the rows of the unfinished block; False if something is being written.

        Called by the timer, in its thread. What goes wrong is raised by the next `check`.
        """
        try:
            with self._rows_lock:
                # First of all: of what is being written, nobody knows yet whether it is committed.
                if not self._block_writer.idle:
                    return False
                if self._block_writer.failure is None and self.rows > self.committed_rows:
                    self._buffers.commit_unfinished(self.rows)
        except BaseException as error:
            self._block_writer.failure = error
        return True

    def _commit(self, change: tuple[int, Status], written: Written | None) -> None:
        """Have readers see so many rows, which are written; in the writing thread."""
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
    """The blocks that are in memory: one is filled, those before it are on their way to disk.

    There are as many buffers as the layout says, and each is filled again only when the block that
    it held has been written and committed. So nothing is copied and nothing is lost; if the disk is
    slow, the caller waits.

    Parameters
    ----------
    layout : Layout
    block_writer : BlockWriter
        Whose commits take a number of rows and a status.

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
        """Buffer of the block that a row lies in: native bits of every array, (row, …)."""
        return self._blocks[row // self._layout.block_rows % self._layout.buffers]

    def make_room(self) -> None:
        """Wait until the buffer of the next block has been written; raise what went wrong."""
        if len(self._pending) < self._layout.buffers:
            return
        started = time.perf_counter()
        self._settle(self._layout.buffers - 1)
        self.seconds_waited += time.perf_counter() - started

    def check(self) -> None:
        """Raise what went wrong so far, without waiting."""
        while self._pending and self._pending[0].done():
            self._pending.popleft().result()
        if self._block_writer.failure is not None:
            raise self._block_writer.failure

    def hand_over(self, rows: int, status: Status = "recording") -> None:
        """Have the block that ends with the last of so many rows written and committed."""
        self._pending.append(self._submit(rows, status))

    def commit_unfinished(self, rows: int) -> None:
        """Have so many rows written and committed, though more of their block will follow.

        `make_room` need not know of it: blocks are written in order, so this is done before the
        whole block is, and its buffer is another block's only after that.
        """
        self._submit(rows, "recording")

    def finish(self, rows: int, status: Status) -> None:
        """Have the last of so many rows written and all committed, and wait for that."""
        if rows % self._layout.block_rows:
            self.hand_over(rows, status)
        else:
            self._pending.append(self._block_writer.submit(0, None, (rows, status)))
        self._settle(0)

    def close(self) -> None:
        """Wait for everything handed over, and let go of the memory."""
        self._block_writer.close()
        self._blocks.clear()

    def _submit(self, rows: int, status: Status) -> Future[None]:
        number, last = divmod(rows - 1, self._layout.block_rows)
        block = {name: array[: last + 1] for name, array in self.block(rows - 1).items()}
        return self._block_writer.submit(number, block, (rows, status))

    def _settle(self, most: int) -> None:
        """Wait until at most so many blocks are on their way; raise what went wrong."""
        while len(self._pending) > most:
            self._pending.popleft().result()
