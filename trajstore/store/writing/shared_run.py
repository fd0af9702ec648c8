"""A run that one or several processes write. The first one plans and creates it.

No shard contains tokens of two processes. Each process writes the shards of its own tokens in a
background thread, block after block, and commits them with the others (`commit`).
"""

from __future__ import annotations

import contextlib
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from trajstore.arguments import DEFAULT_MEMORY
from trajstore.codec.block import Runs
from trajstore.errors import InvalidArgument
from trajstore.store.metadata.block_plan import FEWEST_ROWS, Layout, plan, within
from trajstore.store.metadata.object_keys import METADATA_KEY
from trajstore.store.storage.remote_path import Location, RunPath, location
from trajstore.store.writing.resumed_run import ResumedRun
from trajstore.store.writing.token_share import (
    TokenShare,
    has_tokens,
    in_all_processes,
)


def plan_shared(
    share: TokenShare,
    variables: Mapping[str, str],
    *,
    memory: int = DEFAULT_MEMORY,
    block_rows: int | None = None,
    threads: int | None = None,
    **others: Any,
) -> Layout:
    """Plan a run that one or several processes write.

    Parameters
    ----------
    share : TokenShare
        Share of one process. The returned layout is that of the whole run, equal in all processes.
    variables : mapping of str to str
        Native type of each variable.
    memory : int, default 1 GiB
        Memory budget of the writer of one process, in bytes.
    block_rows, threads, **others
        See `trajstore.store.metadata.block_plan.plan`.

    Raises
    ------
    InvalidArgument
        See `trajstore.store.metadata.block_plan.plan`.
    """

    def planned(rows: int | None) -> Layout:
        # This plans a whole block. Each process holds its share of it.
        layout = plan(
            variables,
            memory=memory * share.count,
            block_rows=rows,
            threads=threads,
            **others,
        )
        return _in_shares(layout, share.count)

    # The first process has the most tokens, so its layout makes all plans equal.
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
    """A layout in which no shard contains tokens of two processes.

    A process has a whole number of shards, and a shard a whole number of chunks. Their lengths are
    as near as possible to those of the given layout. The fit is best if the number of tokens of a
    process has many divisors.

    Parameters
    ----------
    layout : Layout
        Layout for one process.
    count : int
        Number of processes.
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
        shard = length  # for one number per token: all tokens of a process
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


def announce_run(share: TokenShare, run: ResumedRun) -> None:
    """In the first process, after it created the run: wait until the others have joined.

    Raises
    ------
    RecordingError
        If one of them cannot join.
    """
    share.exchange({**vars(run), "share": None})  # processes cannot exchange a share
    with in_all_processes(share):
        pass


@contextlib.contextmanager
def joined_run(path: RunPath, share: TokenShare) -> Iterator[ResumedRun]:
    """In another process: join the run of the first one.

    If the ``with`` block fails, it fails in all processes.

    Raises
    ------
    RecordingError
        If the first process cannot create the run.
    InvalidArgument
        If this process does not see the run.
    """
    with in_all_processes(share):
        pass
    facts = share.exchange(None)[0]
    with in_all_processes(share):
        place = location(path).absolute()
        if not holds_run(place, facts["layout"].runs):
            raise InvalidArgument(
                f"{place} is not the run that the first process created there; processes that "
                "record one run together need a shared folder or an object store"
            )
        yield ResumedRun(**(facts | {"path": place, "share": share}))


def holds_run(path: Location, runs: Runs) -> bool:
    """True if the run at a path has these identities of its blocks."""
    with contextlib.suppress(
        FileNotFoundError, NotADirectoryError, ValueError, KeyError, TypeError
    ):
        found = json.loads((path / METADATA_KEY).read_bytes())["attributes"]["runs"]
        return bool(found == [list(entry) for entry in runs])
    return False
