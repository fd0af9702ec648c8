"""`RunWriter`: rows in, blocks out, each with an atomic commit.

The flow of one row: its arrays are copied once, into their place in the block buffer (by `append`,
or by a caller that fills the places itself). `block_commits` writes and commits the
blocks. Whatever happens in between, a reader sees the rows of the last commit and nothing else.

A run that is there is opened for more rows with `resume`. What it holds past its last commit, or
past the row it is cut to, is not read by anyone; it is written over, and removed at the end.
"""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, Self

import numpy as np
import numpy.typing as npt

from trajstore.byte_sizes import DEFAULT_MEMORY, parse_bytes
from trajstore.codec.block_label import new_identity
from trajstore.errors import InvalidArgument, WriterClosed
from trajstore.schema import STEP, Encoding
from trajstore.store.metadata.block_plan import BLOCKS, Layout, plan
from trajstore.store.metadata.zarr_json import Status
from trajstore.store.storage.atomic import flush, flush_tree, make_folder, sweep
from trajstore.store.storage.lock import RunLock
from trajstore.store.storage.remote_lock import RemoteLock
from trajstore.store.storage.remote_path import Location, RunPath
from trajstore.store.writing.block_commits import BlockCommits
from trajstore.store.writing.commit import Committer
from trajstore.store.writing.commit_timer import COMMIT_EVERY, check_commit_every
from trajstore.store.writing.create import check_target, create_folder, remove_folder
from trajstore.store.writing.new_run import (
    check_variables,
    new_run,
    parameter_coordinate,
    token_coordinates,
)
from trajstore.store.writing.replay_encoding import check_encoding, replay_rule
from trajstore.store.writing.resumed_run import check_run, remove_past_end, resumed_run
from trajstore.store.writing.shared_run import announce_run, joined_run, plan_shared
from trajstore.store.writing.token_share import TokenShare, in_all_processes
from trajstore.values.native_types import as_bits

__all__ = ["RunWriter"]


class RunWriter:
    """Appends rows to a run, which nobody else can write to meanwhile.

    Made by `create` or `resume`; a context manager that closes the run as ``complete``, or as
    ``interrupted`` when it is left by an exception. A new one without a row is removed then.

    Attributes
    ----------
    path : Path or RemotePath
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
        path: Location,
        layout: Layout,
        blocks: BlockCommits,
        lock: RunLock | RemoteLock | None,
        *,
        is_new: bool,
    ) -> None:
        self.path = path
        self.layout = layout
        self.bytes_recorded = 0
        self._blocks = blocks
        self._lock = lock
        self._last_step = -1
        self._given = 0  # rows whose places are with the caller
        self._is_new = is_new
        self._status: Status = "recording"
        self._row_bytes = sum(
            array.row_bytes for name, array in layout.arrays.items() if name != STEP.name
        )

    @property
    def rows(self) -> int:
        """Rows appended so far."""
        return self._blocks.rows

    @property
    def committed_rows(self) -> int:
        """Rows that readers see."""
        return self._blocks.committed_rows

    @property
    def bytes_written(self) -> int:
        """Bytes of the shards on disk."""
        return self._blocks.bytes_written

    @property
    def seconds_waited(self) -> float:
        """How long `append` has waited for the disk, because all buffers were full."""
        return self._blocks.seconds_waited

    @classmethod
    def create(
        cls,
        path: RunPath,
        *,
        token: npt.ArrayLike,
        hidden: int,
        variables: Mapping[str, str],
        examples: int | None = None,
        positions: int | None = None,
        is_dead: npt.ArrayLike | None = None,
        token_count: npt.ArrayLike | None = None,
        token_text: npt.ArrayLike | None = None,
        parameter: Sequence[str] | None = None,
        populations: Mapping[str, npt.ArrayLike] | None = None,
        config: Mapping[str, Any] | None = None,
        attributes: Mapping[str, Any] | None = None,
        memory: int | str = DEFAULT_MEMORY,
        block_rows: int | None = None,
        threads: int | None = None,
        buffers: int = BLOCKS,
        overwrite: bool = False,
        commit_every: float | None = COMMIT_EVERY,
        fsync: bool = True,
        share: TokenShare | None = None,
        encoding: Encoding = "delta",
        on_note: Callable[[str], None] | None = None,
    ) -> Self:
        """Make an empty run.

        It appears at `path` whole, with no rows, or not at all.

        Parameters
        ----------
        path : path-like or str
            A local folder, by custom ``NAME.zarr``, or an address such as ``s3://bucket/NAME.zarr``.
        token : array_like of int, (token,)
            Vocabulary ids of the recorded tokens.
        hidden : int
            Length of the hidden dimension.
        variables : mapping of str to str
            Native type (bfloat16, float16, float32, float64) of each variable to record.
        examples, positions : int, optional
            Lengths of ``example`` and ``position``, where a variable has them.
        is_dead, token_count, token_text : array_like, (token,), optional
            Coordinates.
        parameter : sequence of str, optional
            Names of the model's parameters, where there are variables of each of them.
        populations : mapping of str to array_like of bool, (token,), optional
            Further groups of tokens, by the names of their coordinates, ``is_NAME``.
        config : mapping, optional
            Configuration of the run, JSON values only.
        attributes : mapping, optional
            Further attributes of the root, such as ``optimizer`` and ``provenance``.
        memory : int or str, default 1 GiB
            Bytes for all buffers together.
        block_rows : int, optional
            Rows of a block; planned from `memory` without it.
        threads : int, optional
            That encode; without it as many as there are processors, at most 8.
        buffers : int, default 2
            Blocks held in memory. With 1, which takes half of it, a full block is written before
            the next one is begun.
        overwrite : bool
            Replace a run that is there.
        commit_every : float, optional
            Seconds after a commit at which rows are committed that are no whole block yet; None
            for whole blocks only. `append` does not wait for that. Where it takes more than
            a fifth of that time, it is done less often.
        fsync : bool
            Have every commit survive a loss of power, not only the death of the process.
        share : TokenShare, optional
            Of the tokens, where several processes write the run, all of which call this; rows then
            hold the tokens of this one. `memory` is that of each. Only whole blocks are committed.
        encoding : {'delta', 'replay'}
            Store each array by itself; or the gradient, and compute W and Adam's moments of it
            (docs/reference/format.md), which takes the attribute ``optimizer``.
        on_note : callable, optional
            Called with the reason if ``replay`` cannot compute them, and stores them as
            differences; logged without it.

        Raises
        ------
        RecordingError
            If another process that shares in the run cannot begin it.
        RunExists
            If something is at `path`.
        RunLocked
            If another process writes to it.
        InvalidArgument
            If an argument is impossible.
        """
        check_commit_every(commit_every)
        if share is not None and not share.is_first:
            return cls._joined(path, share, fsync=fsync)
        lock: RunLock | RemoteLock | None = None
        try:
            with in_all_processes(share):
                path = check_target(path, overwrite=overwrite)
                coordinates = token_coordinates(
                    token,
                    populations,
                    is_dead=is_dead,
                    token_count=token_count,
                    token_text=token_text,
                )
                check_variables(variables)
                coordinates |= parameter_coordinate(parameter, variables)
                check_encoding(encoding, shared=share is not None)
                rule = None
                if encoding == "replay":
                    rule = replay_rule(attributes, variables, on_note)
                planned = partial(plan, encoding=encoding, rule=rule)
                if share is not None:
                    planned = partial(plan_shared, share)
                layout = planned(
                    variables,
                    tokens=np.size(coordinates["token"]),
                    hidden=hidden,
                    examples=examples,
                    positions=positions,
                    parameters=np.size(coordinates.get("parameter", "")),
                    memory=parse_bytes(memory),
                    block_rows=block_rows,
                    threads=threads,
                    buffers=buffers,
                )
                layout = replace(layout, runs=((0, new_identity()),))
                own = layout if share is None else share.of_layout(layout)
                metadata, chunks = new_run(
                    layout, coordinates, config=config, attributes=attributes, encoding=encoding
                )
                if isinstance(path, Path):
                    make_folder(path.parent, fsync=fsync)
                lock = RunLock.acquire(path)
                sweep(path)
                digests = {key: hashlib.sha256(data).digest() for key, data in chunks.items()}
                fingerprint = metadata.fingerprint(digests, layout.block_rows)
                create_folder(
                    path,
                    metadata,
                    chunks,
                    fingerprint.attributes(),
                    overwrite=overwrite,
                    fsync=fsync,
                )
                blocks = BlockCommits(
                    path,
                    own,
                    Committer(path, metadata, fingerprint, fsync=fsync),
                    commit_every=commit_every,
                    fsync=fsync,
                    share=share,
                    lock=lock,
                )
                run = cls(path, own, blocks, lock, is_new=True)
                blocks.start()
        except BaseException:
            if lock is not None:
                lock.release()
            raise
        if share is not None:
            try:
                announce_run(share, layout)
            except BaseException:
                run._let_go(remove_empty=True)
                raise
        return run

    @classmethod
    def _joined(cls, path: RunPath, share: TokenShare, *, fsync: bool) -> Self:
        """In another process than the first: its part of the run that the first has made."""
        with joined_run(path, share) as (place, own):
            blocks = BlockCommits(place, own, None, commit_every=None, fsync=fsync, share=share)
            return cls(place, own, blocks, None, is_new=False)

    @classmethod
    def resume(
        cls,
        path: RunPath,
        *,
        rows: int | None = None,
        attributes: Mapping[str, Any] | None = None,
        memory: int | str = DEFAULT_MEMORY,
        threads: int | None = None,
        commit_every: float | None = COMMIT_EVERY,
        fsync: bool = True,
        share: TokenShare | None = None,
    ) -> Self:
        """Open a run for more rows, as they were of the same kind: after its last commit, or cut.

        What writers that died have left is swept. Its status is ``recording`` again.

        Parameters
        ----------
        path : path-like or str
            A run, local or in an object store.
        rows : int, optional
            Keep so many; all that are committed without it.
        attributes : mapping, optional
            Attributes of the root that take the place of those it has, such as ``config``.
        memory, threads, commit_every, fsync, share
            As for `create`. The blocks stay as large as they are, and `memory` holds two of them.

        Raises
        ------
        RunNotFound, FormatError
            If there is no run, or one that this version cannot add to.
        RunLocked
            If another process writes to it.
        InvalidArgument
            If `rows` are not there, `memory` does not hold its blocks, or they cannot be shared
            by so many processes.
        RecordingError
            If another process that shares in the run cannot go on with it.
        """
        check_commit_every(commit_every)
        commits = share is None or share.is_first
        lock = None
        try:
            with in_all_processes(share):
                path = check_run(path)
                if commits:
                    lock = RunLock.acquire(path)
                    sweep(path)
                    if fsync and isinstance(path, Path):
                        # What is kept is promised again, and may have been written without.
                        flush([path.parent])
                        flush_tree(path)
                kept = resumed_run(
                    path, rows, attributes=attributes, memory=memory, threads=threads, share=share
                )
                own = kept.layout if share is None else share.of_layout(kept.layout)
                committer = None
                if commits:
                    committer = Committer(path, kept.metadata, kept.fingerprint, fsync=fsync)
                blocks = BlockCommits(
                    path,
                    own,
                    committer,
                    commit_every=commit_every,
                    fsync=fsync,
                    share=share,
                    lock=lock,
                )
                blocks.load_rows(kept)
                last_step = kept.last_step()
            with in_all_processes(share):
                blocks.cut(kept)
            run = cls(path, own, blocks, lock, is_new=False)
            run.bytes_recorded = kept.rows * run._row_bytes
            run._last_step = last_step
            blocks.start()
        except BaseException:
            if lock is not None:
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
        places = self._blocks.places(most)
        self._given = len(next(iter(places.values())))
        places.pop(STEP.name, None)  # which not every process has that shares in a run
        return places

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
        self._blocks.add(steps)
        self._last_step = last
        self._given = 0
        self.bytes_recorded += self._row_bytes * len(steps)

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
        self._close(status)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        try:
            if kind is None:
                self._close("complete")
            else:
                self._close("interrupted", remove_empty=self._is_new)
        except BaseException as failure:
            if failure is not error:  # which is on its way already
                raise

    def _close(self, status: Status, *, remove_empty: bool = False) -> None:
        """As `close`; a run that has come to no row is removed, if so wanted.

        So a first row that was refused leaves no run that the next try would have to overwrite.
        """
        if self._status != "recording":
            return
        self._blocks.stop()
        self._status = status
        try:
            self._blocks.finish(status)
            if self._blocks.commits:
                remove_past_end(self.path, self.layout, self.rows)
        except BaseException:
            self._status = "interrupted"
            self._blocks.give_up()
            raise
        finally:
            self._let_go(remove_empty=remove_empty)

    def _let_go(self, *, remove_empty: bool) -> None:
        self._status = "interrupted" if self._status == "recording" else self._status
        try:
            self._blocks.close()
        finally:
            with self._lock or contextlib.nullcontext():  # lets go of it
                empty = remove_empty and not self.rows
                if empty and self._lock is not None and self._lock.is_held():
                    remove_folder(self.path)

    def _check_open(self) -> None:
        if self._status != "recording":
            raise WriterClosed(f"{self.path} is closed as {self._status}")
        self._blocks.check()
