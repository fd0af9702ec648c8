"""`RunWriter`: rows in, whole blocks out, one atomic commit a block.

The flow of one row: its arrays are copied once, into their place in the block buffer (by `append`,
or by a caller that fills the places itself). A full block goes to the `Pipeline`, which encodes and
writes every array's shard behind the caller's back, while the next block is filled, if there is a
buffer for it; then each array's metadata grows; then the root is replaced, which is the commit.
Whatever happens in between, a reader sees the rows of the last commit and nothing else.

A run that is there is opened for more rows with `resume`. What it holds past its last commit, or
past the row it is cut to, is not read by anyone; it is written over, and removed at the end.
"""

from __future__ import annotations

import contextlib
import json
import os
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, Self

import numpy as np
import numpy.typing as npt
import zarr

from trajstore.bits import as_bits
from trajstore.errors import FormatError, InvalidArgument, WriterClosed
from trajstore.group import open_group
from trajstore.layout import BLOCKS, DEFAULT_MEMORY, Layout, parse_bytes, plan, within
from trajstore.lock import RunLock
from trajstore.metadata import DOCUMENT, Documents, Status, block_of, chunk_key, new_arrays, utc_now
from trajstore.objects import put, sweep
from trajstore.pipeline import Pipeline
from trajstore.schema import FORMAT, STEP
from trajstore.stored import stored_array, stored_layout
from trajstore.target import check_target, create_folder
from trajstore.version import __version__

__all__ = ["RunWriter"]


class RunWriter:
    """Appends rows to a run, which nobody else can write to meanwhile.

    Made by `create` or `resume`; a context manager that closes the run as ``complete``, or as
    ``interrupted`` when it is left by an exception.

    Attributes
    ----------
    path : Path
    layout : Layout
    rows : int
        Rows appended so far.
    committed_rows : int
        Rows that readers see.
    bytes_recorded : int
        Bytes appended, in native types.
    bytes_written : int
        Bytes of the shards on disk.
    seconds_waited : float
        How long `append` has waited for the disk, because all buffers were full.

    Examples
    --------
    >>> import numpy as np, tempfile
    >>> from trajstore import RunWriter, open_run
    >>> path = tempfile.mkdtemp() + "/run.zarr"
    >>> with RunWriter.create(path, token=[0, 1, 2], hidden=4, variables={"W": "float32"}) as run:
    ...     for step in range(3):
    ...         run.append(step=step, W=np.full((3, 4), step, "float32"))
    >>> open_run(path).W.shape
    (3, 3, 4)
    """

    def __init__(
        self, path: Path, layout: Layout, documents: Documents, lock: RunLock, *, fsync: bool
    ) -> None:
        self.path = path
        self.layout = layout
        self.rows = 0
        self.committed_rows = 0
        self.bytes_recorded = 0
        self.seconds_waited = 0.0
        self._documents = documents
        self._lock = lock
        self._fsync = fsync
        self._last_step = -1
        self._given = 0  # rows whose places are with the caller
        self._status: Status = "recording"
        self._pipeline = Pipeline(path, layout, self._commit, fsync=fsync)
        self._pending: deque[Future[None]] = deque()
        self._blocks = [_allocate(layout) for _ in range(layout.buffers)]
        self._row_bytes = sum(
            array.row_bytes for name, array in layout.arrays.items() if name != STEP.name
        )

    @property
    def bytes_written(self) -> int:
        """Bytes of the shards on disk."""
        return self._pipeline.bytes_written

    @classmethod
    def create(
        cls,
        path: str | os.PathLike[str],
        *,
        token: npt.ArrayLike,
        hidden: int,
        variables: Mapping[str, str],
        is_dead: npt.ArrayLike | None = None,
        token_count: npt.ArrayLike | None = None,
        token_text: npt.ArrayLike | None = None,
        config: Mapping[str, Any] | None = None,
        attributes: Mapping[str, Any] | None = None,
        memory: int | str = DEFAULT_MEMORY,
        block_rows: int | None = None,
        encoding: str = "delta",
        threads: int | None = None,
        buffers: int = BLOCKS,
        overwrite: bool = False,
        fsync: bool = False,
    ) -> Self:
        """Make an empty run.

        It appears at `path` whole, with no rows, or not at all.

        Parameters
        ----------
        path : path-like
            A local folder, by custom ``NAME.zarr``.
        token : array_like of int, (token,)
            Vocabulary ids of the recorded tokens.
        hidden : int
            Length of the hidden dimension.
        variables : mapping of str to str
            Native type (bfloat16, float16, float32, float64) of each variable to record.
        is_dead, token_count, token_text : array_like, (token,), optional
            Coordinates.
        config : mapping, optional
            Configuration of the run, JSON values only.
        attributes : mapping, optional
            Further attributes of the root, such as ``optimizer`` and ``provenance``.
        memory : int or str, default 1 GiB
            Bytes for all buffers together.
        block_rows : int, optional
            Rows of a block; planned from `memory` without it.
        encoding : {'delta', 'portable'}
            ``delta`` is smaller and faster, and read wherever trajstore is installed; ``portable``
            is read by any reader of Zarr v3.
        threads : int, optional
            That encode; without it as many as there are processors, at most 8.
        buffers : int, default 2
            Blocks held in memory. With 1, which takes half of it, a full block is written before
            the next one is begun.
        overwrite : bool
            Replace a run that is there.
        fsync : bool
            Have every commit survive a loss of power, not only the death of the process.

        Raises
        ------
        RunExists
            If something is at `path`.
        RunLocked
            If another process writes to it.
        InvalidArgument
            If an argument is impossible.
        """
        path = check_target(path, overwrite=overwrite)
        ids = np.asarray(token)
        if ids.ndim != 1 or ids.dtype.kind not in "iu" or len(np.unique(ids)) != ids.size:
            raise InvalidArgument(
                f"token: got {ids.dtype} of shape {ids.shape}, expected distinct vocabulary ids "
                "in one dimension"
            )
        coordinates: dict[str, npt.ArrayLike] = {"token": ids}
        given = {"is_dead": is_dead, "token_count": token_count, "token_text": token_text}
        for name, values in given.items():
            if values is None:
                continue
            if np.shape(values) != ids.shape:
                raise InvalidArgument(
                    f"{name}: got shape {np.shape(values)}, expected {ids.shape} as token has"
                )
            coordinates[name] = values
        if "W" not in variables and "delta" not in variables:
            raise InvalidArgument(
                f"a run always holds W, or its changes as delta, got only "
                f"{', '.join(variables) or '—'}"
            )
        layout = plan(
            variables,
            tokens=ids.size,
            hidden=hidden,
            memory=parse_bytes(memory),
            block_rows=block_rows,
            encoding=encoding,
            threads=threads,
            buffers=buffers,
        )
        now = utc_now()
        fixed = {
            "trajstore_format": FORMAT,
            "trajstore_version": __version__,
            "created": now,
            "timeline": "post-step",
            "encoding": encoding,
            "block_rows": layout.block_rows,
            "config": dict(config or {}),
            **(attributes or {}),
        }
        arrays, chunks = new_arrays(layout, coordinates)
        documents = Documents(arrays, fixed)
        path.parent.mkdir(parents=True, exist_ok=True)
        lock = RunLock.acquire(path)
        try:
            sweep(path)
            create_folder(path, documents, chunks, overwrite=overwrite, fsync=fsync)
            return cls(path, layout, documents, lock, fsync=fsync)
        except BaseException:
            lock.release()
            raise

    @classmethod
    def resume(
        cls,
        path: str | os.PathLike[str],
        *,
        rows: int | None = None,
        attributes: Mapping[str, Any] | None = None,
        memory: int | str = DEFAULT_MEMORY,
        threads: int | None = None,
        fsync: bool = False,
    ) -> Self:
        """Open a run for more rows, as they were of the same kind: after its last commit, or cut.

        What writers that died have left is swept. Its status is ``recording`` again.

        Parameters
        ----------
        path : path-like
            A local run.
        rows : int, optional
            Keep so many; all that are committed without it.
        attributes : mapping, optional
            Attributes of the root that take the place of those it has, such as ``config``.
        memory, threads, fsync
            As for `create`. The blocks stay as large as they are, and `memory` holds two of them.

        Raises
        ------
        RunNotFound, FormatError
            If there is no run, or one that this version cannot add to.
        RunLocked
            If another process writes to it.
        InvalidArgument
            If `rows` are not there, or `memory` does not hold its blocks.
        """
        text = os.fspath(path)
        if "://" in text:
            raise InvalidArgument(f"cannot add to {text}: a run is recorded in a local folder")
        open_group(text)
        path = Path(text).absolute()
        lock = RunLock.acquire(path)
        try:
            sweep(path)
            group = open_group(path)
            layout = stored_layout(path, group, threads)
            layout = within(layout, parse_bytes(memory), threads=threads)
            root = json.loads((path / DOCUMENT).read_bytes())
            committed = root["attributes"].get("committed_rows")
            if committed is None or not root.get("consolidated_metadata"):
                raise FormatError(
                    f"the root of {path} has been changed by another program and says no longer "
                    f"which rows are whole; bring that back with: trajstore repair {path}"
                )
            keep = committed if rows is None else rows
            if not 0 <= keep <= committed:
                raise InvalidArgument(
                    f"{path} has {committed} committed rows, so it cannot go on after {keep}"
                )
            documents = Documents.stored(root, attributes)
            run = cls(path, layout, documents, lock, fsync=fsync)
            run._continue(group, keep)
        except BaseException:
            lock.release()
            raise
        return run

    def next_row(self) -> dict[str, npt.NDArray[Any]]:
        """Places of the next row's values, to be filled without another copy.

        Returns
        -------
        dict of str to ndarray
            Writable views of native bits, one per variable; they hold garbage until filled, and
            are the writer's own after `commit_row`.
        """
        return {name: rows[0, ...] for name, rows in self.next_rows(1).items()}

    def next_rows(self, most: int) -> dict[str, npt.NDArray[Any]]:
        """Places of the next rows' values: so many, or as many as are left of the block.

        Parameters
        ----------
        most : int
            At least 1.

        Returns
        -------
        dict of str to ndarray, (row, …)
            As `next_row`, for `commit_rows`.
        """
        self._check_open()
        at = self.rows % self.layout.block_rows
        if at == 0:
            self._make_room()
        self._given = min(most, self.layout.block_rows - at)
        block = self._block()
        return {name: block[name][at : at + self._given] for name in block if name != STEP.name}

    def commit_row(self, step: int) -> None:
        """Take the row that `next_row` gave out, every variable filled, as the state after `step`.

        Raises
        ------
        InvalidArgument
            If `step` does not come after the last one.
        """
        self.commit_rows([step])

    def commit_rows(self, steps: Sequence[int] | npt.NDArray[np.integer[Any]]) -> None:
        """Take rows that `next_rows` gave out, the first of them or all, as those after `steps`.

        Raises
        ------
        InvalidArgument
            If a step does not come after the one before, or there are more than were given out.
        """
        self._check_open()
        if len(steps) > self._given:
            raise InvalidArgument(f"got {len(steps)} rows where {self._given} were given out")
        last = self._last_step
        for step in steps:
            if step <= last:
                raise InvalidArgument(f"got step {step} after step {last}; steps must increase")
            last = int(step)
        at = self.rows % self.layout.block_rows
        self._block()[STEP.name][at : at + len(steps)] = steps
        self._last_step = last
        self._given = 0
        self.rows += len(steps)
        self.bytes_recorded += self._row_bytes * len(steps)
        if len(steps) and self.rows % self.layout.block_rows == 0:
            self._hand_over(self.layout.block_rows)

    def stretches(
        self, steps: npt.NDArray[np.integer[Any]], most: int | None = None
    ) -> Iterator[tuple[slice, dict[str, npt.NDArray[Any]]]]:
        """Places for the rows of many steps, as many at a time as lie in one block.

        Parameters
        ----------
        steps : ndarray of int
        most : int, optional
            Rows at a time.

        Yields
        ------
        at : slice
            Of `steps`.
        places : dict of str to ndarray, (row, …)
            As from `next_rows`; they are committed when the next ones are asked for.
        """
        start = 0
        while start < len(steps):
            places = self.next_rows(min(most or len(steps), len(steps) - start))
            at = slice(start, start + self._given)
            yield at, places
            self.commit_rows(steps[at])
            start = at.stop

    def append(self, step: int, **values: Any) -> None:
        """Append one row.

        Parameters
        ----------
        step : int
            Optimizer steps taken; strictly increasing.
        **values : array_like
            Every variable of the run: values of its native type (NumPy, ml_dtypes or torch),
            uint16 bits for a 16-bit type, or float32 that is exactly representable.

        Raises
        ------
        InvalidArgument
            If a variable is missing or unknown, a shape is wrong, or a value would be rounded.
            The run is as before.
        """
        row = self.next_row()
        if values.keys() != row.keys():
            missing = ", ".join(row.keys() - values.keys()) or "none"
            unknown = ", ".join(values.keys() - row.keys()) or "none"
            raise InvalidArgument(
                f"a row of this run holds {', '.join(row)}; missing: {missing}; unknown: {unknown}"
            )
        for name, value in values.items():
            bits = as_bits(value, self.layout.arrays[name].native, name)
            if bits.shape != row[name].shape:
                raise InvalidArgument(f"{name}: got shape {bits.shape}, expected {row[name].shape}")
            row[name][...] = bits
        self.commit_row(step)

    def close(self, status: Literal["complete", "interrupted"] = "complete") -> None:
        """Commit every row, also of the last, partial block, and set the status.

        Twice does no harm.

        Raises
        ------
        OSError
            If a block could not be written; what was committed before stays.
        """
        if self._status != "recording":
            return
        self._status = status
        try:
            partial = self.rows % self.layout.block_rows
            if partial:
                self._hand_over(partial, status)
            else:
                change = self.rows, status
                self._pending.append(self._pipeline.submit(0, None, change))
            self._settle(0)
            self._remove_past_end()
        except BaseException:
            self._status = "interrupted"
            if self._pipeline.failure is not None:
                # The status is worth a try; the failure that is being raised matters more.
                with contextlib.suppress(OSError):
                    self._commit((self.committed_rows, "interrupted"))
            raise
        finally:
            try:
                self._pipeline.close()
                self._blocks.clear()
            finally:
                self._lock.release()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        try:
            self.close("complete" if kind is None else "interrupted")
        except BaseException as failure:
            if failure is not error:  # which is on its way already
                raise

    def _check_open(self) -> None:
        if self._status != "recording":
            raise WriterClosed(f"{self.path} is closed as {self._status}")
        while self._pending and self._pending[0].done():
            self._pending.popleft().result()
        if self._pipeline.failure is not None:
            raise self._pipeline.failure

    def _block(self) -> dict[str, npt.NDArray[Any]]:
        """Buffer of the block that is being filled."""
        return self._blocks[self.rows // self.layout.block_rows % self.layout.buffers]

    def _make_room(self) -> None:
        """Wait until the buffer of the next block has been written."""
        if len(self._pending) < self.layout.buffers:
            return
        started = time.perf_counter()
        self._settle(self.layout.buffers - 1)
        self.seconds_waited += time.perf_counter() - started

    def _settle(self, most: int) -> None:
        """Wait until at most so many blocks are on their way; raise what went wrong."""
        while len(self._pending) > most:
            self._pending.popleft().result()

    def _hand_over(self, filled: int, status: Status = "recording") -> None:
        """Have the block that ends with the last row written and committed."""
        number = (self.rows - 1) // self.layout.block_rows
        buffer = self._blocks[number % self.layout.buffers]
        block = {name: array[:filled] for name, array in buffer.items()}
        self._pending.append(self._pipeline.submit(number, block, (self.rows, status)))

    def _commit(self, change: tuple[int, Status]) -> None:
        """Make so many rows visible, with that status."""
        rows, status = change
        if rows > self.committed_rows:
            self._put_arrays(rows)
        self._put_root(rows, status)

    def _put_arrays(self, rows: int) -> None:
        for name in self._documents.series():
            self._put(self.path / name / DOCUMENT, self._documents.array(name, rows))

    def _put_root(self, rows: int, status: Status) -> None:
        self._put(self.path / DOCUMENT, self._documents.root(rows, status))
        self.committed_rows = rows

    def _put(self, path: Path, data: bytes) -> None:
        put(path, [data], fsync=self._fsync)

    def _continue(self, group: zarr.Group, rows: int) -> None:
        """Cut the run to so many rows, and have the last block's in the buffer."""
        first = rows - rows % self.layout.block_rows
        self.rows = rows
        self.bytes_recorded = rows * self._row_bytes
        for name, array in self.layout.arrays.items():
            stored = stored_array(self.path, name, group[name])  # type: ignore[arg-type]
            assert stored is not None  # or there would be no layout
            if first < rows:
                kept = as_bits(stored[first:rows], array.native, name)
                self._block()[name][: rows - first] = kept
            if name == STEP.name and rows:
                self._last_step = int(stored[rows - 1])
            for number in range(first // self.layout.block_rows):
                shard = self.path / chunk_key(name, number, len(array.shard))
                if not shard.exists():
                    raise FormatError(
                        f"{name}, block {number}: the shard {shard} is missing; bring the run back "
                        f"to what is whole with: trajstore repair {self.path}"
                    )
                self._pipeline.bytes_written += shard.stat().st_size
        # Shrinking, the root goes first: a reader never sees more rows than every array says.
        self._put_root(rows, "recording")
        self._put_arrays(rows)

    def _remove_past_end(self) -> None:
        """Remove the shards of blocks that the run was cut before and has not grown to again."""
        blocks = -(-self.rows // self.layout.block_rows)
        for name, array in self.layout.arrays.items():
            for shard in (self.path / name).iterdir():
                number = block_of(shard.name, len(array.shard))
                if number is not None and number >= blocks:
                    shard.unlink()


def _allocate(layout: Layout) -> dict[str, npt.NDArray[Any]]:
    return {
        name: np.empty((layout.block_rows, *array.row), array.native.bits)
        for name, array in layout.arrays.items()
    }
