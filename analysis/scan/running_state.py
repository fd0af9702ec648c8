"""Folds over blocks of rows, with a state that is passed from block to block."""

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
    measure: Callable[..., Any],
    kernel: Callable[[Any, Any], Any],
    finish: Callable[[Any], Array],
    shape: tuple[int, ...],
    most: int,
    **options: Any,
) -> da.Array:
    """Fold complete rows, in order, to one result.

    `measure` does most of the work and needs only its own rows, so that all workers are busy. Idle
    workers would read blocks ahead of the state and hold them in memory.

    Parameters
    ----------
    blocks : dask Array, (step, token, hidden)
        With one chunk along hidden, and at least one block.
    measure : callable
        From the chunks of some rows (a list along token) to the input of `kernel`.
    kernel : callable
        From the state (None at first) and the result of `measure` to the next state.
    finish : callable
        From the last state to the result, float64.
    shape : tuple of int
        Shape of the result.
    most : int
        Maximum rows per call of `measure`.
    **options
        Passed to `measure`.

    Returns
    -------
    dask Array, float64, of one chunk
    """
    name = f"fold-{tokenize(blocks.name, measure, kernel, finish, shape, most, options)}"
    shared = f"options-{name}"  # one task, not a copy in each task
    tasks: dict[Any, Any] = {shared: options}
    last: Any = None
    for number, rows in enumerate(blocks.chunks[0]):
        chunks = [(blocks.name, number, at, 0) for at in range(blocks.numblocks[1])]
        for start in range(0, max(rows, 1), most):
            part = (number, start)
            tasks["measured-" + name, *part] = (_measure, measure, shared, chunks, start, most)
            tasks["state-" + name, *part] = (kernel, last, ("measured-" + name, *part))
            last = ("state-" + name, *part)
    result = (name, *(0 for _ in shape))
    tasks[result] = (_end, finish, last)
    graph = HighLevelGraph.from_collections(name, tasks, [blocks])
    return da.Array(graph, name, tuple((size,) for size in shape), dtype=np.float64)


def _measure(
    measure: Callable[..., Any], options: dict[str, Any], chunks: list[Array], start: int, most: int
) -> Any:
    return measure([chunk[start : start + most] for chunk in chunks], **options)


def fold_tokens(
    sources: list[da.Array],
    kernel: Callable[..., Any],
    finish: Callable[[Any], Array],
    facts: tuple[int, ...],
    measure: Callable[..., Any] | None = None,
    **options: Any,
) -> da.Array:
    """Fold all rows, in order, to facts per token.

    Parameters
    ----------
    sources : list of dask Array, (step, token, …)
        With the same number of chunks along step, the same chunks along token, one chunk along
        other dimensions, and at least one block.
    kernel : callable
        From the state (None at first) and a block of each source, or the result of `measure`, to
        the next state.
    finish : callable
        From the last state to the result, float64 (*facts, token).
    facts : tuple of int
        Sizes of the dimensions of the result before token.
    measure : callable, optional
        From the number of the first row of a block, and a block of each source, to the input of
        `kernel`. It does the work that needs no state, as in `fold_rows`.
    **options
        Passed to `kernel` and `measure`.

    Returns
    -------
    dask Array, float64 (*facts, token), chunked along token as the sources
    """
    names = [source.name for source in sources]
    name = f"fold-{tokenize(names, kernel, finish, measure, options)}"
    state = f"state-{name}"
    shared = f"options-{name}"  # one task, not a copy in each task
    tasks: dict[Any, Any] = {shared: options}
    rows, pieces = sources[0].numblocks[:2]
    firsts = np.cumsum((0, *sources[0].chunks[0])).tolist()
    for at in range(pieces):
        last: Any = None
        for number in range(rows):
            blocks = [(s.name, number, at, *(0 for _ in s.shape[2:])) for s in sources]
            if measure is not None:
                measured = ("measured-" + name, number, at)
                tasks[measured] = (_step, measure, firsts[number], shared, *blocks)
                blocks = [measured]
            tasks[state, number, at] = (_step, kernel, last, shared, *blocks)
            last = (state, number, at)
        tasks[(name, *(0 for _ in facts), at)] = (_end, finish, last)
    graph = HighLevelGraph.from_collections(name, tasks, sources)
    chunks = (*((size,) for size in facts), sources[0].chunks[1])
    return da.Array(graph, name, chunks, dtype=np.float64)
