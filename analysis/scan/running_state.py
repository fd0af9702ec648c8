"""Folds over blocks of rows, with a state that is passed from block to block."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import dask.array as da
import numpy as np
import numpy.typing as npt
from dask.base import tokenize
from dask.highlevelgraph import HighLevelGraph

from trajstore.analysis.scan.array_types import Array
from trajstore.analysis.scan.block_tasks import per_row


def _call(kernel: Callable[..., Any], options: dict[str, Any], *blocks: Any) -> Any:
    with np.errstate(all="ignore"):  # NaN and infinity are valid results
        return kernel(*blocks, **options)


def fold(
    kernel: Callable[..., Any],
    first: da.Array,
    *others: da.Array | Array,
    finish: Callable[[Any], Array],
    sizes: tuple[int, ...],
    dtype: npt.DTypeLike = np.float64,
    prepare: Callable[..., Any] | None = None,
    whole_rows: bool = False,
    **options: Any,
) -> da.Array:
    """Fold all rows, in order, to facts per token, or to one result of whole rows.

    Parameters
    ----------
    kernel : callable
        From the state (None at first) and a block of each array, or the result of `prepare`, to
        the next state. It must not change the state, because dask may run a task twice.
    first : dask Array, (step, token, …)
        With one chunk along other dimensions, and at least one block.
    *others : dask Array or ndarray
        With as many chunks along step, and as many or one along token. An ndarray has one value per
        row, as for `measure`.
    finish : callable
        From the last state to the result.
    sizes : tuple of int
        Sizes of the dimensions of the result, before token.
    dtype : dtype
        Type of the result.
    prepare : callable, optional
        From a block of each array to the input of `kernel`. It does the work that needs no state,
        so that all workers are busy. Idle workers would read blocks ahead of the state and hold
        them in memory.
    whole_rows : bool
        True for a single state and a result without tokens. A block is then a list of its chunks
        along token.
    **options
        Passed to `prepare`; without it, to `kernel`. One task, not a copy in each task.
    """
    arrays = [
        first,
        *(per_row(first, each) if isinstance(each, np.ndarray) else each for each in others),
    ]
    names = [array.name for array in arrays]
    name = f"fold-{tokenize(names, kernel, finish, sizes, prepare, whole_rows, options)}"
    rows, pieces = first.numblocks[:2]
    shared: Any = f"options-{name}"
    tasks: dict[Any, Any] = {shared: options}
    for at in range(1 if whole_rows else pieces):
        last: Any = None
        for number in range(rows):
            blocks: list[Any] = [
                [(array.name, number, part, 0) for part in range(pieces)]
                if whole_rows
                else _key(array, number, at)
                for array in arrays
            ]
            own = shared
            if prepare is not None:
                prepared = (f"prepared-{name}", number, at)
                tasks[prepared] = (_call, prepare, shared, *blocks)
                blocks, own = [prepared], {}
            tasks[f"state-{name}", number, at] = (_call, kernel, own, last, *blocks)
            last = (f"state-{name}", number, at)
        tasks[(name, *(0 for _ in sizes), *(() if whole_rows else (at,)))] = (
            _call,
            finish,
            {},
            last,
        )
    graph = HighLevelGraph.from_collections(name, tasks, arrays)
    chunks = (*((size,) for size in sizes), *(() if whole_rows else (first.chunks[1],)))
    return da.Array(graph, name, chunks, dtype=dtype)


def _key(array: da.Array, number: int, at: int) -> tuple[Any, ...]:
    """Key of a block of rows, and of one of its chunks along token, or the only one."""
    return (array.name, number, min(at, array.numblocks[1] - 1), *(0 for _ in array.shape[2:]))
