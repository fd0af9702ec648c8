"""Blocks of an open run: the buffers that a caller fills, and how they are encoded and written.

`BlockCommits` holds the blocks in memory as a ring. The caller fills one, while the ones before it
are written. A buffer is reused only after its block was committed, so no row is copied or lost, and
the caller waits if the disk is slow. One thread takes the writes in order: it has `BlockWriter`
write the shards of a block, then `Committer` replace the metadata. If a block takes long to fill,
`CommitTimer` commits its rows at intervals in the same way. Later commits replace its shards.

`BlockWriter` encodes a block chunk by chunk in a pool of threads, and writes its shards in order,
while the pool encodes the next block, if it is full. NumPy's loops, Blosc and the file system
release the interpreter's lock, so the training continues meanwhile. The memory is bounded: a few
encoded chunks, and the buffered blocks.

A system gives a page of memory to a process at the first write to it, which takes ten times as long
as the write. The thread of `ReadyMemory` asks for the pages of the next rows ahead.
"""

from __future__ import annotations

import contextlib
import ctypes
import math
import mmap
import sys
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import KW_ONLY, dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from trajstore.codec.block import Chunk, UnitChunks, encode_chunk, shard_parts
from trajstore.codec.computed_rows import changing_settings, unit_of
from trajstore.schema import STEP, WITH_SETTINGS
from trajstore.store.metadata.block_plan import CHUNKS_AHEAD, Layout
from trajstore.store.metadata.metadata_form import Status
from trajstore.store.reading.open_group import open_group, whole
from trajstore.store.storage.atomic import WRITES, put_all
from trajstore.store.storage.lock import RemoteLock, RunLock, taken_over
from trajstore.store.storage.remote_path import Location, RemotePath
from trajstore.store.writing.commit import Committer, CommitTimer, Written
from trajstore.store.writing.resumed_run import ResumedRun, in_all_processes, remove_past_end
from trajstore.threads import in_parallel, submit
from trajstore.values.native_types import widen

_UPLOADS = 4  # simultaneous uploads to an object store, each with a whole shard in memory

Block = Mapping[str, npt.NDArray[Any]]
Task = Callable[[], Chunk]
Place = TypeVar("Place", Path, RemotePath)


@dataclass(eq=False)
class BlockWriter:
    """Encodes and writes the blocks of one run, in order.

    Parameters
    ----------
    path : Path or RemotePath
    layout : Layout
        Layout, with the number of encoding threads.
    fsync : bool
        Flush every shard to disk.
    lock : RunLock or RemoteLock, optional
        Lock of the run. Before it uploads a block, the writer checks that it still has it.

    Attributes
    ----------
    skips : int
        Number of skipped steps before the last block.
    has_settings : bool
        True if a block was computed with other hyperparameters than those of the rule.
    bytes_written : int
        Bytes of all shards so far. Replaced shards of a growing block are not counted.
    """

    path: Location
    layout: Layout
    _: KW_ONLY
    fsync: bool = True
    lock: RunLock | RemoteLock | None = None

    def __post_init__(self) -> None:
        self.skips = 0
        self.has_settings = False
        self.bytes_written = 0
        self._forms = self.layout.forms
        self._names, arrays = list[str](), self.layout.arrays
        self._rule = arrays["W"].chain.rule if "W" in arrays else ""
        if self._rule and "hyperparameters" in arrays:
            self._names = whole(self.path, open_group(self.path), "hyperparameter").tolist()
        self._blocks: deque[Iterator[Task]] = deque()  # blocks to encode, in order
        self._ahead: deque[Future[Chunk]] = deque()
        self._written, self._block_bytes = -1, 0  # number of the last written block
        self._last, self._skips_inside = -1, 0  # number of the last block to encode
        self._encoders = ThreadPoolExecutor(self.layout.threads, "trajstore-encoder")
        # On few processors they would take turns with the encoders, and cost more than they save.
        pays = self.layout.threads > WRITES and isinstance(self.path, Path)
        self._writers = ThreadPoolExecutor(WRITES, "trajstore-disk") if pays else None
        # Tags of replaceable objects.
        self._tags = self.path.tags() if isinstance(self.path, RemotePath) else {}

    def encode(self, number: int, block: Block) -> None:
        """Add a block to those that are encoded in the background.

        Parameters
        ----------
        number : int
            Number of the block. A block that has grown replaces its earlier version.
        block : mapping of str to ndarray
            Native bits of every array, with all rows of the block or the first ones. They must not
            change until the block is written.
        """
        if number != self._last:
            self.skips += self._skips_inside
        # Steps of the block that the gradient scaler skipped.
        inside = np.count_nonzero(self._values(block, "skipped") == 1) if "skipped" in block else 0
        self._last, self._skips_inside = number, int(inside)
        values = self._values(block, "hyperparameters") if self._names else None
        changing = {} if values is None else changing_settings(self._rule, self._names, values)
        self.has_settings |= bool(changing)
        self._blocks.append(self._tasks(block, self.skips, changing))

    def write(self, number: int, rows: int) -> Written:
        """Write the shards of the next block of `encode`, as soon as its chunks are encoded.

        Parameters
        ----------
        number, rows : int
            Number of the block, and of its rows.
        """
        digests: dict[tuple[str, int, int], bytes] = {}
        if isinstance(self.path, Path):
            shards = self._shards(self.path, number, rows, digests)
            size = put_all(shards, fsync=self.fsync, writers=self._writers)
        else:
            size = self._upload_all(self._shards(self.path, number, rows, digests))
        self.bytes_written += size - (self._block_bytes if number == self._written else 0)
        self._written, self._block_bytes = number, size
        return rows, [(*shard, digest) for shard, digest in digests.items()]

    def forget(self) -> None:
        """Discard blocks and chunks that will not be written."""
        self._blocks.clear()
        for future in self._ahead:
            future.cancel()
        self._ahead.clear()

    def close(self) -> None:
        """End the threads."""
        self._encoders.shutdown()
        if self._writers is not None:
            self._writers.shutdown()
        self.forget()

    def _shards(
        self, run: Place, number: int, rows: int, digests: dict[tuple[str, int, int], bytes]
    ) -> Iterator[tuple[Place, Iterator[bytes]]]:
        """Yield the parts of the shards of a block, in order. They add the digest of each."""
        for name, array in self.layout.arrays.items():
            form = self._forms[name]
            for part in range(array.first_part, array.first_part + array.parts):
                add = partial(digests.__setitem__, (name, part, rows))
                chunks = (self._encoded() for _ in range(math.prod(form.grid)))
                yield (
                    run / form.key(number, part),
                    shard_parts(form, chunks, block=number, part=part, rows=rows, on_digest=add),
                )

    def _upload_all(self, shards: Iterator[tuple[RemotePath, Iterator[bytes]]]) -> int:
        if not self._has_lock():
            raise taken_over(self.path)
        jobs = (partial(self._upload, path, b"".join(parts)) for path, parts in shards)
        return sum(in_parallel(jobs, _UPLOADS))

    def _upload(self, path: RemotePath, data: bytes) -> int:
        """Upload a shard. It may replace only an object of this writer or of a previous one."""
        tag = self._tags.get(path)
        try:
            self._tags[path] = path.write_bytes(data, instead_of=tag, new=tag is None)
        except FileExistsError as error:
            if (facts := path.stat()) is None or not self._has_lock():
                raise taken_over(self.path) from error
            # A previous writer was suspended during its upload, until this one had its lock.
            self._tags[path] = path.write_bytes(data, instead_of=str(facts["e_tag"]))
        return len(data)

    def _has_lock(self) -> bool:
        return self.lock is None or self.lock.is_held()

    def _encoded(self) -> Chunk:
        """Next chunk. Some later ones, including those of the next block, are encoded meanwhile."""
        # Those that wait for a writing thread are in memory, too.
        most = CHUNKS_AHEAD * self.layout.threads - (WRITES if self._writers else 0)
        while self._blocks and len(self._ahead) <= most:
            if (task := next(self._blocks[0], None)) is None:
                self._blocks.popleft()
            else:
                self._ahead.append(submit(self._encoders, task))
        return self._ahead.popleft().result()

    def _values(self, block: Block, name: str) -> npt.NDArray[Any]:
        return widen(block[name], self.layout.arrays[name].native)

    def _tasks(self, block: Block, skips: int, changing: Block) -> Iterator[Task]:
        units: dict[tuple[str, int, int], UnitChunks] = {}
        for name, array in self.layout.arrays.items():
            for part in range(array.parts):
                bits = block[name][array.window(part)]
                for number, window in enumerate(self._forms[name].windows()):
                    if array.chain.kind != "computed":
                        yield partial(encode_chunk, array.chain, bits[window], array.chunk)
                        continue
                    key = (array.chain.rule, part, number)
                    if key not in units:
                        unit = unit_of(array.chain.rule)
                        whole = {name: block[name][array.window(part)] for name in unit.matrices}
                        rates = {name: self._values(block, name) for name in unit.rates}
                        rates |= changing
                        first = part * array.shard[1]
                        units[key] = UnitChunks(unit, whole, rates, skips, window, first)
                    yield partial(units[key].take, name)


_POPULATE_WRITE = 23  # MADV_POPULATE_WRITE of Linux 5.14; it keeps what the pages hold
_AHEAD = 16 << 20  # bytes, and at least three rows

Buffer = Mapping[str, npt.NDArray[Any]]


class ReadyMemory:
    """Asks for the memory of rows shortly before they are filled, in each buffer once.

    Without Linux, the pages come with the first write.

    Parameters
    ----------
    buffers : sequence of mapping of str to ndarray, (row, …)
        Buffers of the blocks, in turn.
    first : int
        Number of the next row.
    """

    def __init__(self, buffers: Sequence[Buffer], first: int) -> None:
        self._buffers = buffers
        arrays = list(buffers[0].values())
        self._rows = len(arrays[0])
        row = sum(array.nbytes for array in arrays) // self._rows
        self._step = max(1, _AHEAD // 2 // max(row, 1))
        self._end = (first // self._rows + len(buffers)) * self._rows  # each buffer once
        self._next = first if sys.platform == "linux" else self._end
        self._thread: ThreadPoolExecutor | None = None
        self.reach(first)

    def reach(self, row: int) -> None:
        """Ask for the rows from `row` on, the number of rows so far, if they lack their memory."""
        end = min(row + 2 * self._step + 1, self._end)
        if row + self._step < self._next or self._next >= end:
            return
        first, self._next = max(self._next, row), end
        self._thread = self._thread or ThreadPoolExecutor(1, "trajstore-memory")
        submit(self._thread, self._ask, first, end)

    def close(self) -> None:
        """Wait for the thread."""
        if self._thread is not None:
            self._thread.shutdown(cancel_futures=True)

    def _ask(self, first: int, end: int) -> None:
        call = ctypes.CDLL(None).madvise
        call.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
        for number in range(first // self._rows, -(-end // self._rows)):
            begins = number * self._rows
            rows = slice(max(first - begins, 0), end - begins)
            for array in self._buffers[number % len(self._buffers)].values():
                part = array[rows]
                begin = part.ctypes.data // mmap.PAGESIZE * mmap.PAGESIZE
                size = part.ctypes.data + part.nbytes - begin
                if part.nbytes and call(begin, size, _POPULATE_WRITE):
                    return  # an older system


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
        """Cut the stored run to the kept rows, in all processes."""
        with in_all_processes(self._run.share):
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
            if self._shards.has_settings:
                self._committer.require(WITH_SETTINGS)
            return self._shards.write(number, rows)
        except BaseException as error:
            self._committer.fail(error)
            raise
