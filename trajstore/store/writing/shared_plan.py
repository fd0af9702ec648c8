"""The planner where several processes write a run: no shard has tokens of two of them."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from trajstore.byte_sizes import DEFAULT_MEMORY
from trajstore.store.metadata.block_plan import FEWEST_ROWS, Layout, plan, within
from trajstore.store.writing.token_share import TokenShare, has_tokens

__all__ = ["plan_shared"]


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
