"""The blocks of a run that are in memory: one is filled, those before it are on their way to disk.

There are as many buffers as the layout says, and each is filled again only when the block that it
held has been written and committed. So nothing is copied and nothing is lost; if the disk is slow,
the caller waits.
"""

from __future__ import annotations

import time
from collections import deque
from concurrent.futures import Future
from typing import Any

import numpy as np
import numpy.typing as npt

from trajstore.store.metadata.block_plan import Layout
from trajstore.store.metadata.zarr_json import Status
from trajstore.store.writing.block_writer import BlockWriter

__all__ = ["BlockBuffers"]


class BlockBuffers:
    """Buffers of one run, whose blocks are filled one after the other.

    Parameters
    ----------
    layout : Layout
    block_writer : BlockWriter
        Whose commits take a number of rows and a status.

    Attributes
    ----------
    seconds_waited : float
        How long `make_room` has waited.
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
