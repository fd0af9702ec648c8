"""Encoding of blocks in background threads, and writing of their shards.

A pool of threads encodes a block chunk by chunk. `BlockWriter.write` writes the shards in order,
while the pool encodes the next block, if it is full. NumPy's loops, Blosc and the file system
release the interpreter's lock, so the training continues meanwhile. The memory is bounded: a few
encoded chunks, and the buffered blocks.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import KW_ONLY, dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from trajstore.codec.block import Chunk, UnitChunks, encode_chunk, shard_parts
from trajstore.codec.computed_rows import unit_of
from trajstore.store.metadata.block_plan import CHUNKS_AHEAD, Layout
from trajstore.store.storage.atomic import WRITES, put_all
from trajstore.store.storage.lock import RunLock
from trajstore.store.storage.remote_lock import RemoteLock, taken_over
from trajstore.store.storage.remote_path import Location, RemotePath
from trajstore.store.writing.commit import Written
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
        self.bytes_written = 0
        self._forms = self.layout.forms
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
        self._blocks.append(self._tasks(block, self.skips))

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
            if (found := path.stat()) is None or not self._has_lock():
                raise taken_over(self.path) from error
            # A previous writer was suspended during its upload, until this one had its lock.
            self._tags[path] = path.write_bytes(data, instead_of=str(found["e_tag"]))
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

    def _tasks(self, block: Block, skips: int) -> Iterator[Task]:
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
                        first = part * array.shard[1]
                        units[key] = UnitChunks(unit, whole, rates, skips, window, first)
                    yield partial(units[key].take, name)
