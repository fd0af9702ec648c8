"""From blocks to files, behind the training.

A block is encoded chunk by chunk in a pool of threads; one more thread writes the shards in order
and commits them, while the pool goes on with the next block, if it is full. numpy's loops, Blosc
and the file system let go of the interpreter's lock, so the training runs on meanwhile. What is in
flight is bounded: a few encoded chunks, and the blocks that the writer has buffers for.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any

import numpy.typing as npt

from trajstore.store.atomic import put
from trajstore.store.block_plan import CHUNKS_AHEAD, Layout
from trajstore.store.object_keys import chunk_key
from trajstore.store.shard import chunk_windows, shard_parts
from trajstore.threads import submit

__all__ = ["BlockWriter"]

Block = Mapping[str, npt.NDArray[Any]]
Task = tuple[Callable[..., bytes], npt.NDArray[Any], tuple[int, ...]]


class BlockWriter:
    """Encodes and writes the blocks of one run, in order.

    Parameters
    ----------
    path : Path
    layout : Layout
        Also how many threads encode.
    commit : callable
        Makes everything written so far visible; called in the writing thread with what `submit`
        was given.
    fsync : bool
        Have every shard survive a loss of power before it is committed.

    Attributes
    ----------
    bytes_written : int
        Of all shards so far, of a block that was written more than once those that are there.
    failure : BaseException or None
        What stopped it. Nothing is written or committed afterwards.
    """

    def __init__(
        self, path: Path, layout: Layout, commit: Callable[[Any], None], *, fsync: bool = False
    ) -> None:
        self.bytes_written = 0
        self.failure: BaseException | None = None
        self._path = path
        self._layout = layout
        self._commit = commit
        self._fsync = fsync
        self._blocks: deque[Iterator[Task]] = deque()  # what is left to encode, in order
        self._ahead: deque[Future[bytes]] = deque()
        self._last: Future[None] | None = None
        self._number, self._block_bytes = -1, 0  # of the block that was written last
        self._encoders = ThreadPoolExecutor(layout.threads, "trajstore-encoder")
        self._writer = ThreadPoolExecutor(1, "trajstore-writer")

    @property
    def idle(self) -> bool:
        """Whether everything that was submitted is done."""
        return self._last is None or self._last.done()

    def submit(self, number: int, block: Block | None, change: Any) -> Future[None]:
        """Write a block, and commit.

        Parameters
        ----------
        number : int
            Of the block. One that has grown since it was written takes its own place.
        block : mapping of str to ndarray or None
            Native bits of every array, of all its rows or the first ones, which must stay as they
            are until the future is done; without it there is only a commit.
        change : Any
            Argument of `commit`.

        Returns
        -------
        Future
            Its exception is the failure.
        """
        if block is not None:
            self._blocks.append(self._tasks(block))
        has_block = block is not None
        self._last = submit(self._writer, self._run, self._last, number, has_block, change)
        return self._last

    def close(self) -> None:
        """Wait for everything submitted, and end the threads."""
        self._writer.shutdown()
        self._encoders.shutdown()
        self._forget()

    def _run(self, before: Future[None] | None, number: int, has_block: bool, change: Any) -> None:
        if before is not None:
            # Done already, but when the interpreter is ending: then this is the caller's thread,
            # and the writing thread may still be at the block before.
            wait([before])
        if self.failure is not None:
            raise self.failure
        try:
            if has_block:
                self._write(number)
            self._commit(change)
        except BaseException as error:
            self.failure = error
            self._forget()
            raise

    def _forget(self) -> None:
        """Let go of what nobody will write."""
        self._blocks.clear()
        for future in self._ahead:
            future.cancel()
        self._ahead.clear()

    def _write(self, number: int) -> None:
        size = 0
        for name, array in self._layout.arrays.items():
            parts = shard_parts(self._encoded() for _ in range(array.chunks))
            key = chunk_key(name, number, len(array.shard))
            size += put(self._path / key, parts, fsync=self._fsync)
        self.bytes_written += size - (self._block_bytes if number == self._number else 0)
        self._number, self._block_bytes = number, size

    def _encoded(self) -> bytes:
        """Next chunk; a few that come after it, also of the next block, are then being encoded."""
        while len(self._ahead) <= CHUNKS_AHEAD * self._layout.threads:
            task = self._next_task()
            if task is None:
                break
            self._ahead.append(submit(self._encoders, *task))
        return self._ahead.popleft().result()

    def _next_task(self) -> Task | None:
        while self._blocks:
            for task in self._blocks[0]:
                return task
            self._blocks.popleft()
        return None

    def _tasks(self, block: Block) -> Iterator[Task]:
        for name, array in self._layout.arrays.items():
            for window in chunk_windows(array):
                yield array.chain.encode, block[name][window], array.chunk
