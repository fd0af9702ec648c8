"""A state that is carried from each block of rows to the next: sums over any number of rows."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import dask.array as da
import numpy as np
import numpy.typing as npt
from dask.base import tokenize
from dask.highlevelgraph import HighLevelGraph

__all__ = ["fold_rows", "fold_tokens"]

Array = npt.NDArray[Any]


def _step(kernel: Callable[..., Any], state: Any, options: dict[str, Any], *blocks: Any) -> Any:
    return kernel(state, *blocks, **options)


def _end(finish: Callable[[Any], Array], state: Any) -> Array:
    return finish(state)


def fold_rows(
    blocks: da.Array,
    kernel: Callable[..., Any],
    finish: Callable[[Any], Array],
    shape: tuple[int, ...],
    **options: Any,
) -> da.Array:
    """One result from all rows, whole ones, in their order.

    Parameters
    ----------
    blocks : dask Array, (step, token, hidden), hidden whole, with at least one block
    kernel : callable
        From the state so far (None at first) and the chunks of a block of rows, a list along token,
        to the next state.
    finish : callable
        From the last state to the result, float64.
    shape : tuple of int
        Of the result.
    **options
        Passed to `kernel`.

    Returns
    -------
    dask Array, float64, of one chunk
    """
    name = f"fold-{tokenize(blocks.name, kernel, finish, options)}"
    state = f"state-{name}"
    shared = f"options-{name}"  # once, and not with each task
    tasks: dict[Any, Any] = {shared: options}
    last: Any = None
    for number in range(blocks.numblocks[0]):
        chunks = [(blocks.name, number, at, 0) for at in range(blocks.numblocks[1])]
        tasks[state, number] = (_step, kernel, last, shared, chunks)
        last = (state, number)
    result = (name, *(0 for _ in shape))
    tasks[result] = (_end, finish, last)
    graph = HighLevelGraph.from_collections(name, tasks, [blocks])
    return da.Array(graph, name, tuple((size,) for size in shape), dtype=np.float64)


def fold_tokens(
    sources: list[da.Array],
    kernel: Callable[..., Any],
    finish: Callable[[Any], Array],
    facts: tuple[int, ...],
    **options: Any,
) -> da.Array:
    """Facts about each token from all rows, in their order.

    Parameters
    ----------
    sources : list of dask Array, (step, token, …)
        Of the same chunks along step and token, whole along the rest; at least one block.
    kernel : callable
        From the state so far (None at first) and a block of each source to the next state.
    finish : callable
        From the last state to the result, float64 (*facts, token).
    facts : tuple of int
        Sizes of the dimensions of the result before that of the tokens.
    **options
        Passed to `kernel`.

    Returns
    -------
    dask Array, float64 (*facts, token), chunked along token as the sources
    """
    name = f"fold-{tokenize([source.name for source in sources], kernel, finish, options)}"
    state = f"state-{name}"
    shared = f"options-{name}"  # once, and not with each task
    tasks: dict[Any, Any] = {shared: options}
    rows, pieces = sources[0].numblocks[:2]
    for at in range(pieces):
        last: Any = None
        for number in range(rows):
            blocks = [(s.name, number, at, *(0 for _ in s.shape[2:])) for s in sources]
            tasks[state, number, at] = (_step, kernel, last, shared, *blocks)
            last = (state, number, at)
        tasks[(name, *(0 for _ in facts), at)] = (_end, finish, last)
    graph = HighLevelGraph.from_collections(name, tasks, sources)
    chunks = (*((size,) for size in facts), sources[0].chunks[1])
    return da.Array(graph, name, chunks, dtype=np.float64)
