"""`RunWriter`: it takes rows and writes blocks, each with an atomic commit.

The arrays of a row are copied once, into their place in the block buffer, by `append` or by a
caller that fills the places itself. `BlockCommits` writes and commits the blocks. Readers see the
rows of the last commit only.

`resume` opens an existing run for more rows. Readers ignore data after its last commit, or after
the row it is cut to. The writer overwrites it, and removes the rest at the end.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, nullcontext
from pathlib import Path
from types import TracebackType
from typing import Annotated, Any, Literal, Self

import numpy as np
import numpy.typing as npt

from trajstore.arguments import Count, Example, checks_types, exact_step
from trajstore.defaults import COMMIT_EVERY, DEFAULT_MEMORY, check_commit_every
from trajstore.errors import InvalidArgument, WriterClosed, did_you_mean
from trajstore.schema import STEP, Encoding
from trajstore.store.metadata.block_plan import BLOCKS
from trajstore.store.metadata.metadata_form import Status
from trajstore.store.reading.run_info import information
from trajstore.store.storage.atomic import flush, flush_tree, make_folder, sweep
from trajstore.store.storage.lock import RemoteLock, RunLock
from trajstore.store.storage.remote_path import RunPath
from trajstore.store.writing.blocks import BlockCommits, OnCommit
from trajstore.store.writing.create import check_target, create_folder, remove_folder
from trajstore.store.writing.new_run import (
    announce_run,
    fallbacks,
    joined_run,
    name_coordinates,
    new_run,
    once,
    token_coordinates,
)
from trajstore.store.writing.resumed_run import (
    ALONE,
    ResumedRun,
    TokenShare,
    check_run,
    in_all_processes,
    resumed_run,
)
from trajstore.units import parse_bytes
from trajstore.values.native_types import as_bits


class RunWriter:
    """Appends rows to a run, and holds its lock.

    Created by `create` or `resume`. As a context manager it closes the run as ``complete``, or as
    ``interrupted`` after an exception. In that case a new run without rows is removed.

    Attributes
    ----------
    path : Path or RemotePath
    layout : Layout

    Examples
    --------
    >>> import numpy as np
    >>> from trajstore import RunWriter, open_run
    >>> variables = {"W": "float32"}
    >>> with RunWriter.create("run.zarr", token=[0, 1, 2], hidden=4, variables=variables) as run:
    ...     for step in range(3):
    ...         run.append(step=step, W=np.full((3, 4), step, "float32"))
    >>> with RunWriter.resume("run.zarr") as run:
    ...     run.append(step=3, W=np.full((3, 4), 3, "float32"))
    >>> open_run("run.zarr").W.shape
    (4, 3, 4)
    """

    def __init__(
        self,
        run: ResumedRun,
        lock: RunLock | RemoteLock | None,
        *,
        commit_every: float | None,
        fsync: bool,
        on_note: Callable[[str], None],
    ) -> None:
        self.path = run.path
        self._metadata = run.metadata
        self._blocks = BlockCommits(run, lock, commit_every=commit_every, fsync=fsync)
        self.layout = self._blocks.layout
        self._lock = lock
        self._last_step = run.last_step()
        self._given = 0  # rows whose places the caller has
        self._is_new = not run.arrays
        self._has_begun = self._is_new  # the run has changed
        self._remove_empty = False  # if it has no rows when it is closed
        self._status: Status = "recording"
        self._on_note = on_note

    @property
    def rows(self) -> int:
        """Rows appended so far."""
        return self._blocks.rows

    @property
    def bytes_recorded(self) -> int:
        """Bytes appended, in native types."""
        arrays = self.layout.arrays.items()
        return self.rows * sum(array.row_bytes for name, array in arrays if name != STEP.name)

    @property
    def committed_rows(self) -> int:
        """Rows that readers see."""
        return self._blocks.committed_rows

    @property
    def notes(self) -> list[dict[str, Any]]:
        """JSON objects that each commit writes to the attribute ``notes`` of the root."""
        return self._metadata.notes

    @notes.setter
    def notes(self, notes: list[dict[str, Any]]) -> None:
        self._metadata.notes = notes

    @property
    def on_commit(self) -> OnCommit | None:
        """Called after each commit, in the writing thread, with the rows of the last block.

        It takes the native bits of every array, (row, …), the number of the first row, and
        `bytes_written`. It must not raise an error.
        """
        return self._blocks.on_commit

    @on_commit.setter
    def on_commit(self, call: OnCommit | None) -> None:
        self._blocks.on_commit = call

    @property
    def bytes_written(self) -> int:
        """Bytes of the shards on disk."""
        return self._blocks.bytes_written

    @property
    def seconds_waited(self) -> float:
        """Time that `append` waited for the disk because all buffers were full."""
        return self._blocks.seconds_waited

    @classmethod
    @checks_types
    def create(
        cls,
        path: RunPath,
        *,
        token: npt.ArrayLike,
        hidden: Count,
        variables: Annotated[Mapping[str, str], Example({"W": "float32"})],
        examples: Count | None = None,
        positions: Count | None = None,
        is_dead: npt.ArrayLike | None = None,
        token_count: npt.ArrayLike | None = None,
        token_text: npt.ArrayLike | None = None,
        parameter: Sequence[str] | None = None,
        hyperparameter: Sequence[str] | None = None,
        lengths: Mapping[str, Count] | None = None,
        populations: Mapping[str, npt.ArrayLike] | None = None,
        config: Mapping[str, Any] | None = None,
        attributes: Mapping[str, Any] | None = None,
        memory: int | str = DEFAULT_MEMORY,
        block_rows: Count | None = None,
        threads: Count | None = None,
        buffers: Count = BLOCKS,
        overwrite: bool = False,
        commit_every: float | None = COMMIT_EVERY,
        fsync: bool = True,
        share: TokenShare | None = None,
        encoding: Encoding = "delta",
        on_note: Callable[[str], None] | None = None,
    ) -> Self:
        """Create a run without rows. It appears at `path` atomically.

        Parameters
        ----------
        path : path-like or str
            A local folder, usually ``NAME.zarr``, or an address such as ``s3://bucket/NAME.zarr``.
        token : array_like of int, (token,)
            Vocabulary ids of the recorded tokens.
        hidden : int
            Length of the hidden dimension.
        variables : mapping of str to str
            Native type (bfloat16, float16, float32, float64) of each variable to record.
        examples, positions : int, optional
            Lengths of ``example`` and ``position``, if a variable has them.
        is_dead, token_count, token_text : array_like, (token,), optional
            Coordinates. Without `is_dead`, tokens that occur 0 times are dead.
        parameter : sequence of str, optional
            Names of the model's parameters, if there are variables of them.
        hyperparameter : sequence of str, optional
            Names of the hyperparameters, for the variable ``hyperparameters``.
        lengths : mapping of str to int, optional
            The same for ``element``, ``group``, ``byte`` and ``buffer_element``.
        populations : mapping of str to array_like of bool, (token,), optional
            Masks of further groups of tokens, by the names of their coordinates, ``is_NAME``.
        config : mapping, optional
            Configuration of the run, JSON values only.
        attributes : mapping, optional
            Other attributes of the root, such as ``optimizer`` and ``provenance``.
        memory : int or str, default 1 GiB
            Memory budget in bytes for all buffers together.
        block_rows : int, optional
            Rows of a block (default: planned from `memory`).
        threads : int, optional
            Number of encoding threads (default: all processors but one, 2 to 8).
        buffers : int, default 2
            Blocks in memory. With 1, memory is halved, and `append` waits for each full block.
        overwrite : bool
            Replace an existing run.
        commit_every : float, optional
            Seconds from a commit to that of the unfinished block; None to commit full blocks only.
            `append` does not wait. If it takes more than a fifth of this time, the interval grows.
        fsync : bool
            Flush every commit to disk, so that it survives a loss of power.
        share : TokenShare, optional
            Tokens of this process, if several write the run. All call this method, and rows hold
            the tokens of one process. `memory` is per process. Only full blocks are committed.
        encoding : {'delta', 'compact'}
            ``delta`` stores each array independently. ``compact`` stores the gradient, and computes
            W and Adam's moments from it (docs/reference/format.md). It needs the attribute
            ``optimizer``.
        on_note : callable, optional
            Called with the reason if ``compact`` stores differences instead, now or when the run
            is closed, once for each sentence (default: log it).

        Raises
        ------
        RecordingError
            If another process of the run cannot start it.
        RunExists
            If `path` exists.
        RunLocked
            If another process writes to it.
        InvalidArgument
            If an argument is impossible.
        """
        check_commit_every(commit_every)
        share, on_note = share or ALONE, once(on_note)
        if not share.is_first:
            with joined_run(path, share) as joined:
                return cls(joined, None, commit_every=None, fsync=fsync, on_note=on_note)
        with ExitStack() as undo:
            with in_all_processes(share):
                place = check_target(path, overwrite=overwrite)
                named = {"is_dead": is_dead, "token_count": token_count, "token_text": token_text}
                coordinates = token_coordinates(token, populations, **named)
                names = name_coordinates(
                    variables, parameter=parameter, hyperparameter=hyperparameter
                )
                new, chunks = new_run(
                    place,
                    coordinates | names,
                    variables,
                    config=config,
                    attributes=attributes,
                    encoding=encoding,
                    share=share,
                    on_note=on_note,
                    hidden=hidden,
                    examples=examples,
                    positions=positions,
                    lengths=lengths,
                    memory=parse_bytes(memory),
                    block_rows=block_rows,
                    threads=threads,
                    buffers=buffers,
                )
                if isinstance(place, Path):
                    make_folder(place.parent, fsync=fsync)
                lock = RunLock.acquire(place)
                undo.callback(lock.release)
                sweep(place)
                digests = new.fingerprint.attributes()
                create_folder(
                    place, new.metadata, chunks, digests, overwrite=overwrite, fsync=fsync
                )
                run = cls(new, lock, commit_every=commit_every, fsync=fsync, on_note=on_note)
                run._blocks.start()
            undo.callback(run._release, remove_empty=True)
            announce_run(share, new)
            undo.pop_all()
        return run

    @classmethod
    @checks_types
    def resume(
        cls,
        path: RunPath,
        *,
        rows: int | None = None,
        attributes: Mapping[str, Any] | None = None,
        memory: int | str = DEFAULT_MEMORY,
        threads: Count | None = None,
        commit_every: float | None = COMMIT_EVERY,
        fsync: bool = True,
        share: TokenShare | None = None,
        lazy: bool = False,
        on_note: Callable[[str], None] | None = None,
    ) -> Self:
        """Open a run for more rows, after its last commit or after its first `rows` rows.

        Remains of dead writers are removed. The status becomes ``recording``.

        Parameters
        ----------
        path : path-like or str
            A run, local or in an object store.
        rows : int, optional
            Number of rows to keep (default: all committed rows).
        attributes : mapping, optional
            Attributes of the root that replace present ones, such as ``config``.
        memory, threads, commit_every, fsync, share
            See `create`. The size of the blocks does not change, and `memory` must hold two.
        lazy : bool
            Change the run with the next row. Without one, `close` leaves it as it was.
        on_note : callable, optional
            As for `create`, when the run is closed.

        Raises
        ------
        RunNotFound, FormatError
            If there is no run, or this version cannot add to it.
        RunLocked
            If another process writes to it.
        InvalidArgument
            If the run has fewer rows, `memory` is too small for its blocks, or the blocks cannot be
            divided over the number of processes.
        RecordingError
            If another process of the run cannot resume it.
        """
        check_commit_every(commit_every)
        share, on_note = share or ALONE, once(on_note)
        with ExitStack() as undo:
            lock: RunLock | RemoteLock | None = None
            with in_all_processes(share):
                place = check_run(path)
                if share.is_first:
                    lock = RunLock.acquire(place)
                    undo.callback(lock.release)
                    sweep(place)
                    if fsync and isinstance(place, Path):
                        # The kept rows may have been written without fsync.
                        flush([place.parent])
                        flush_tree(place)
                kept = resumed_run(
                    place, rows, attributes=attributes, memory=memory, threads=threads, share=share
                )
                run = cls(kept, lock, commit_every=commit_every, fsync=fsync, on_note=on_note)
            if not lazy:
                run.begin()
            undo.pop_all()
        return run

    def begin(self) -> None:
        """Cut a resumed run to the rows that it keeps, once; a later call has no effect."""
        if not self._has_begun:
            self._blocks.cut()
            self._has_begun = True
            self._blocks.start()

    def next_row(self) -> dict[str, npt.NDArray[Any]]:
        """Places of the next row's values, which the caller fills without another copy.

        Returns
        -------
        dict of str to ndarray
            Writable views of native bits, one per variable, uninitialized. After `commit_row` they
            must not be changed.
        """
        return {name: rows[0, ...] for name, rows in self.next_rows(1).items()}

    def next_rows(self, most: int) -> dict[str, npt.NDArray[Any]]:
        """Places of the next rows' values, up to the end of the block.

        Parameters
        ----------
        most : int
            Largest number of rows, at least 1.

        Returns
        -------
        dict of str to ndarray, (row, …)
            Views as of `next_row`, for one or several calls of `commit_rows`.
        """
        self._check_open()
        places = self._blocks.places(most)
        self._given = len(next(iter(places.values())))
        places.pop(STEP.name, None)  # only the first process of a shared run has it
        return places

    def commit_row(self, step: int) -> None:
        """Add the filled row of `next_row` as the state after `step`, as `commit_rows` does."""
        self.commit_rows([step])

    def commit_rows(self, steps: Sequence[int] | npt.NDArray[np.integer[Any]]) -> None:
        """Add the next rows of `next_rows`, or all of them, as the states after `steps`.

        Raises
        ------
        InvalidArgument
            If the steps are not whole numbers or do not increase, or there are more steps than
            places.
        """
        self._check_open()
        if len(steps) > self._given:
            raise InvalidArgument(f"got {len(steps)} steps, expected at most {self._given}")
        last = self._last_step
        if not (isinstance(steps, np.ndarray) and steps.dtype.kind == "i"):
            steps = [exact_step(step) for step in steps]
        for step in steps:
            if step <= last:
                raise InvalidArgument(f"got step {step} after step {last}; steps must increase")
            last = int(step)
        self.begin()
        self._blocks.add(steps)
        self._last_step = last
        self._given -= len(steps)

    def segments(
        self, steps: npt.NDArray[np.integer[Any]], most: int | None = None
    ) -> Iterator[tuple[slice, dict[str, npt.NDArray[Any]]]]:
        """Yield places for the rows of many steps, in parts that lie in one block each.

        Parameters
        ----------
        steps : ndarray of int
        most : int, optional
            Largest number of rows in a part.

        Yields
        ------
        at : slice
            Range of `steps`.
        places : dict of str to ndarray, (row, …)
            Views as of `next_rows`. They are committed when the next part is requested.
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
            Number of optimizer steps taken; strictly increasing.
        **values : array_like
            Every variable of the run: values of its native type (NumPy, ml_dtypes or torch),
            uint16 bits for a 16-bit type, or exactly representable float32.

        Raises
        ------
        InvalidArgument
            If a variable is missing or unknown, a shape is wrong, or a value would be rounded.
            The run does not change.
        """
        row = self.next_row()
        if values.keys() != row.keys():
            missing = [name for name in row if name not in values]
            unknown = [f"{name}{did_you_mean(name, row)}" for name in values if name not in row]
            parts = [("lacks", missing), ("got the unknown", unknown)]
            differences = " and ".join(
                f"{verb} {', '.join(names)}" for verb, names in parts if names
            )
            raise InvalidArgument(f"append() {differences}; a row of this run has {', '.join(row)}")
        for name, value in values.items():
            bits = as_bits(value, self.layout.arrays[name].native, name)
            if bits.shape != row[name].shape:
                raise InvalidArgument(f"{name}: got shape {bits.shape}, expected {row[name].shape}")
            row[name][...] = bits
        self.commit_row(step)

    def commit(self) -> None:
        """Commit all rows, also those of an unfinished block, and wait until they are stored.

        If several processes write the run, all call this method after the same row.

        Raises
        ------
        OSError
            If a block could not be written. Rows committed before are kept.
        """
        self._check_open()
        self._blocks.commit()

    def close(self, status: Literal["complete", "interrupted"] = "complete") -> None:
        """Commit all rows, including those of the unfinished block, and set the status.

        Report what the encoding ``compact`` of a local run could not compute.

        A second call has no effect.

        Raises
        ------
        OSError
            If a block could not be written. Rows committed before are kept.
        """
        if self._status != "recording":
            return
        self._status = "interrupted"
        try:
            if self._has_begun:
                self._blocks.finish(status)
            self._status = status
            is_compact = self._metadata.attributes["encoding"] == "compact"
            if self._has_begun and self.rows and is_compact and isinstance(self.path, Path):
                for sentence in fallbacks(information(self.path)):
                    self._on_note(sentence)
        finally:
            self._release(remove_empty=self._remove_empty)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        # After an invalid first row, the next attempt need not overwrite a run.
        self._remove_empty = self._is_new and kind is not None
        try:
            self.close("complete" if kind is None else "interrupted")
        except BaseException as failure:
            if failure is not error:  # `error` is already being raised
                raise

    def _release(self, *, remove_empty: bool) -> None:
        with self._lock or nullcontext():  # which releases the lock
            self._blocks.close()
            if remove_empty and not self.rows and self._lock and self._lock.is_held():
                remove_folder(self.path)

    def _check_open(self) -> None:
        if self._status != "recording":
            raise WriterClosed(
                f"the writer of {self.path} is closed, with the status {self._status}; open it "
                "again with RunWriter.resume"
            )
        self._blocks.check()
