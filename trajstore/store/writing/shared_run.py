"""A run that several processes write: planned, begun and committed by the first of them.

No shard has tokens of two processes. Each process writes the shards of its own tokens, in a thread
of its own, block after block. Behind each block they meet: all report which rows they have written,
and the digests of their shards. If all have, the first one commits, and reports that. So a reader
never sees a row of which a shard is missing, and where one process fails, all do, in the same
block.
"""

from __future__ import annotations

import contextlib
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from trajstore.byte_sizes import DEFAULT_MEMORY
from trajstore.errors import InvalidArgument, RecordingError
from trajstore.store.metadata.block_plan import FEWEST_ROWS, Layout, plan, within
from trajstore.store.metadata.fingerprint import block_digest
from trajstore.store.metadata.object_keys import DOCUMENT
from trajstore.store.metadata.zarr_json import Status
from trajstore.store.storage.remote_path import Location, RunPath, location
from trajstore.store.writing.commit import Committer
from trajstore.store.writing.token_share import (
    TokenShare,
    has_tokens,
    in_all_processes,
    raise_failure,
    sentence,
)

__all__ = ["ShardDigest", "SharedCommits", "Written", "announce_run", "joined_run", "plan_shared"]

ShardDigest = tuple[str, int, int, bytes]
"""Array, part, rows and digest of a shard."""

Written = tuple[int, Sequence[ShardDigest]]
"""Rows of a block, and its shards that were written."""


def plan_shared(
    share: TokenShare,
    variables: Mapping[str, str],
    *,
    memory: int = DEFAULT_MEMORY,
    block_rows: int | None = None,
    threads: int | None = None,
    **others: Any,
) -> Layout:
    """Plan a run that several processes write.

    Parameters
    ----------
    share : TokenShare
        Of one of them; the layout is that of the whole run, and the same in all.
    variables : mapping of str to str
        Native type of each variable.
    memory : int, default 1 GiB
        Bytes that the writer of one process may take.
    block_rows, threads, **others
        As `trajstore.store.metadata.block_plan.plan` takes them.

    Raises
    ------
    InvalidArgument
        As `trajstore.store.metadata.block_plan.plan`.
    """

    def planned(rows: int | None) -> Layout:
        # What is held of a block is divided by their number, and here still whole.
        layout = plan(
            variables,
            memory=memory * share.count,
            block_rows=rows,
            threads=threads,
            **others,
        )
        return _in_shares(layout, share.count)

    # That of the first process, as it has most, so that all processes plan alike.
    first = replace(share, number=0)
    layout = planned(block_rows)
    while (
        block_rows is None
        and layout.block_rows > FEWEST_ROWS
        and first.of_layout(layout).memory > memory
    ):
        layout = planned(layout.block_rows // 2)
    fitting = within(first.of_layout(layout), memory, threads=threads)
    return replace(layout, threads=fitting.threads)


def _in_shares(layout: Layout, count: int) -> Layout:
    """A layout with shards none of which holds tokens of two processes.

    Its shards and chunks are as long as those of the given layout, as nearly as is possible: a
    process has a whole number of shards, and a shard a whole number of chunks. So they are best
    where the number of tokens of a process has many divisors.

    Parameters
    ----------
    layout : Layout
        Of one process.
    count : int
        Processes.
    """
    with_tokens = {name: array for name, array in layout.arrays.items() if has_tokens(array)}
    if count == 1 or not with_tokens:
        return layout
    tokens = next(iter(with_tokens.values())).row[0]
    length = math.ceil(tokens / count)
    divisors = [part for part in range(1, length + 1) if length % part == 0]
    chunks = {name: _nearest(divisors, array.chunk[1]) for name, array in with_tokens.items()}
    matrices = [name for name, array in with_tokens.items() if len(array.row) > 1]
    common = math.lcm(*(chunks[name] for name in matrices))
    whole = [part for part in divisors if part % common == 0]
    arrays = dict(layout.arrays)
    for name, array in with_tokens.items():
        shard = length  # of numbers, one a token: all of a process in one
        if name in matrices:
            shard = _nearest(whole, array.shard[1])
        arrays[name] = replace(
            array,
            chunk=(array.chunk[0], chunks[name], *array.chunk[2:]),
            shard=(array.shard[0], shard, *array.shard[2:]),
        )
    return replace(layout, arrays=arrays)


def _nearest(lengths: Sequence[int], wanted: int) -> int:
    return min(lengths, key=lambda length: abs(math.log(length / wanted)))


def announce_run(share: TokenShare, layout: Layout) -> None:
    """In the first process, which has made the run: let the others join, and wait until they have.

    Raises
    ------
    RecordingError
        If one of them cannot.
    """
    share.exchange(layout)
    with in_all_processes(share):
        pass


@contextlib.contextmanager
def joined_run(path: RunPath, share: TokenShare) -> Iterator[tuple[Location, Layout]]:
    """In another process: the run that the first one makes, and the layout of this one's part.

    What fails in the block fails in all processes.

    Raises
    ------
    RecordingError
        If the first process cannot make it.
    InvalidArgument
        If this process does not see it.
    """
    with in_all_processes(share):
        pass
    layout: Layout = share.exchange(None)[0]
    with in_all_processes(share):
        place = location(path).absolute()
        _check_seen(place, layout)
        yield place, share.of_layout(layout)


def _check_seen(path: Location, layout: Layout) -> None:
    """Insist that this process sees the run that the first one has made.

    Raises
    ------
    InvalidArgument
        If it does not.
    """
    found = None
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
        found = json.loads((path / DOCUMENT).read_bytes())["attributes"]["runs"]
    if found != [list(entry) for entry in layout.runs]:
        raise InvalidArgument(
            f"{path} is not what the first process has made there; processes that record one run "
            "together need a folder that all of them see, or an object store"
        )


@dataclass(frozen=True, kw_only=True)
class _Report:
    """What a process has done of a block: what is to be visible with it, or why it could not."""

    change: tuple[int, Status] | None = None
    written: Written | None = None
    failure: str | None = None


class SharedCommits:
    """Commits of all processes, seen from one of them.

    Parameters
    ----------
    share : TokenShare
    committer : Committer or None
        Of the first process; the others have none.

    Attributes
    ----------
    rows : int
        Rows that readers see.
    """

    def __init__(self, share: TokenShare, committer: Committer | None) -> None:
        self.rows = 0
        self._share = share
        self._committer = committer

    def commit(self, change: tuple[int, Status], written: Written | None) -> None:
        """Make rows visible, when all processes have written their tokens of them.

        Parameters
        ----------
        change : (int, str)
            Rows and status.
        written : (int, sequence of ShardDigest) or None
            Rows of the block that they end with, and the shards of this process, if it is new.

        Raises
        ------
        RecordingError
            If another process has failed, or is at another row; nothing is committed then.
        """
        reports = self._share.exchange(_Report(change=change, written=written))
        raise_failure([one.failure for one in reports])
        _check_alike(reports)
        failure: BaseException | None = None
        if self._committer is not None:
            try:
                self._committer.commit(change, _whole_block(reports))
            except BaseException as error:
                failure = error
        try:
            outcomes = self._share.exchange(None if failure is None else sentence(failure))
        except RecordingError:
            if failure is not None:
                raise failure from None
            raise
        if failure is not None:
            raise failure
        raise_failure(outcomes)
        self.rows = change[0]

    def fail(self, error: BaseException) -> None:
        """Tell the others, who wait for this block, that it cannot be written."""
        with contextlib.suppress(RecordingError):  # they have ended, and the error is on its way
            self._share.exchange(_Report(failure=sentence(error)))


def _check_alike(reports: Sequence[_Report]) -> None:
    if len({(one.change, one.written is None) for one in reports}) > 1:
        places = ", ".join(
            f"process {number} with {one.change[0]} rows, {one.change[1]}"
            for number, one in enumerate(reports)
            if one.change is not None
        )
        raise RecordingError(
            f"the processes that record a run have not come to the same row: {places}; what was "
            "committed before is whole"
        )


def _whole_block(reports: Sequence[_Report]) -> tuple[int, bytes] | None:
    """Rows and digest of the block that all have written; None if there is none."""
    written = [one.written for one in reports if one.written is not None]
    if not written:
        return None
    return written[0][0], block_digest(shard for _, shards in written for shard in shards)
