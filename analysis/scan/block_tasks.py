"""Tasks about the blocks of an array: of whole vectors, of last rows, and in what order."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import dask
import dask.array as da
import numpy as np
import numpy.typing as npt
from dask._task_spec import DataNode, Task, TaskRef, convert_legacy_graph
from dask.base import clone_key
from dask.core import flatten
from dask.highlevelgraph import HighLevelGraph
from dask.tokenize import tokenize

__all__ = [
    "field",
    "in_halves",
    "in_turn",
    "last_row",
    "last_rows",
    "of_only_blocks",
    "only_block",
    "over_hidden",
    "per_row",
    "read_again",
    "rows_before",
    "shared",
    "waiting",
    "whole_rows",
]

Array = npt.NDArray[Any]

# Pairs of vectors that make a task worth its place in dask's list: rows of few tokens go together.
_PAIRS_OF_A_TASK = 1 << 24


def over_hidden(
    kernel: Callable[..., Array], *arrays: da.Array, dtype: npt.DTypeLike, **options: Any
) -> da.Array:
    """Function of whole vectors, block by block, whose result has no hidden dimension.

    What `dask.array.map_blocks` with ``drop_axis`` does, but that copies every block, to join the
    only one along the axis that is dropped.

    Parameters
    ----------
    kernel : callable
        Of a block of every array.
    *arrays : dask Array, (…, hidden)
        One chunk along hidden. The first has all dimensions, the others the last ones of them;
        along each they have as many chunks as it has, of any length, or a single one.
    dtype : dtype
        Of its result.
    **options
        Passed to `kernel`.
    """
    ndim = arrays[0].ndim
    indexed = [item for array in arrays for item in (array, tuple(range(ndim))[-array.ndim :])]
    return da.blockwise(
        of_only_blocks,
        tuple(range(ndim - 1)),
        *indexed,
        kernel=kernel,
        dtype=dtype,
        meta=np.empty((0,) * (ndim - 1), dtype),
        align_arrays=False,
        **options,
    )


def of_only_blocks(*blocks: Any, kernel: Callable[..., Array], **options: Any) -> Array:
    """The kernel of each array's only block: `dask.array.blockwise` gives it in nested lists."""
    return kernel(*map(only_block, blocks), **options)


def only_block(nested: Any) -> Any:
    """The block in nested lists of one; a block as it is."""
    while isinstance(nested, list):
        (nested,) = nested
    return nested


def field(measured: da.Array, name: str) -> da.Array:
    """One field of structured blocks, contiguous; a field with a shape adds its dimensions.

    Parameters
    ----------
    measured : dask Array of a structured dtype
    name : str
    """
    kind = measured.dtype[name]
    ndim = measured.ndim + len(kind.shape)
    return measured.map_blocks(
        _field,
        name,
        dtype=kind.base,
        new_axis=list(range(measured.ndim, ndim)) or None,
        chunks=(*measured.chunks, *((length,) for length in kind.shape)),
        meta=np.empty((0,) * ndim, kind.base),
        token=f"field-{name}",
    )


def _field(measured: npt.NDArray[np.void], name: str) -> Array:
    return np.ascontiguousarray(measured[name])


def shared(values: Array) -> Any:
    """An array that many tasks need: a task of its own, and not a copy within each of them.

    For a keyword of `dask.array.map_blocks` or `dask.array.blockwise`.
    """
    return dask.delayed(values, name=f"shared-{tokenize(values)}", traverse=False)


def whole_rows(blocks: da.Array, rows: npt.NDArray[np.int64]) -> da.Array:
    """These rows, all tokens together, as few of a block at a time as make work for a task."""
    every = np.array_equal(rows, np.arange(len(blocks)))
    chosen = blocks if every else blocks[rows]
    most = max(1, _PAIRS_OF_A_TASK // max(1, chosen.shape[1]) ** 2)
    parts = [
        min(most, size - start)
        for size in chosen.chunks[0]
        for start in range(0, max(size, 1), most)
    ]
    return chosen.rechunk({0: tuple(parts), 1: -1})


def in_halves(blocks: da.Array) -> da.Array:
    """The same, with each block of rows in two, so that two threads are busy with it.

    While one alone was, others would read ahead.
    """
    if not len(blocks):
        return blocks
    halves = ((size - size // 2, size // 2) for size in blocks.chunks[0])
    return blocks.rechunk({0: tuple(part for pair in halves for part in pair if part)})


def rows_before(blocks: da.Array, first: da.Array | None = None) -> da.Array:
    """Row before each block, (1 per block, …); of the first, `first`, or its own first row."""
    first = blocks[:1] if first is None else first
    return da.concatenate([first, last_rows(blocks)[:-1]])


def last_rows(blocks: da.Array) -> da.Array:
    """Last row of each block of rows, (1 per block, token, hidden)."""
    steps, *others = blocks.chunks
    return blocks.map_blocks(
        last_row,
        chunks=((1,) * len(steps), *others),
        dtype=blocks.dtype,
        meta=np.empty((0,) * blocks.ndim, blocks.dtype),
    )


def last_row(block: Array) -> Array:
    """Last row of a block, (1, …): a copy, as a view would keep the whole block alive."""
    return block[-1:].copy()


def per_row(blocks: da.Array, values: Array) -> da.Array:
    """Numbers per row as a dask array, (step, 1, 1), that broadcasts against these blocks."""
    return da.from_array(values[:, None, None], chunks=(blocks.chunks[0], (1,), (1,)))


def waiting(row: da.Array, *others: da.Array) -> da.Array:
    """The same row, (1, token, hidden), that waits until the whole of others is known.

    Otherwise all steps of some tokens would be followed first, and of each block that is read for
    them the other tokens held until it is their turn.
    """
    numbers = itertools.count(row.ndim)
    indexed = (
        item for other in others for item in (other, tuple(next(numbers) for _ in other.shape))
    )
    return da.blockwise(
        _first_of,
        tuple(range(row.ndim)),
        row,
        tuple(range(row.ndim)),
        *indexed,
        dtype=row.dtype,
        align_arrays=False,
        meta=np.empty((0, 0, 0)),
    )


def _first_of(row: Array, *others: Any) -> Array:
    return row


def read_again(blocks: da.Array, after: da.Array) -> da.Array:
    """The same array from tasks of its own, which wait until another one is known.

    `dask.graph_manipulation.bind` would do, but it leaves what an array was sliced from as it is,
    so that all of it is held until then (dask 2025.9 to 2026.8). What a task is, dask tells in a
    module that it calls private.

    Parameters
    ----------
    blocks : dask Array
    after : dask Array
        Of a single chunk.
    """
    nodes = convert_legacy_graph(dict(blocks.dask))
    made = {key for key, node in nodes.items() if not isinstance(node, DataNode)}
    renamed = {key: clone_key(key, after.name) for key in nodes}
    (known,) = flatten(after.__dask_keys__())
    tasks: dict[Any, Any] = {}
    for key, own in renamed.items():
        node = nodes[key].substitute(renamed, key=own)
        if isinstance(node, Task) and not nodes[key].dependencies & made:
            waited = TaskRef(known)
            node = Task(own, _call_after, waited, node.func, *node.args, **node.kwargs)
        tasks[own] = node
    name = clone_key(blocks.name, after.name)
    graph = HighLevelGraph.from_collections(name, tasks, [after])
    return da.Array(graph, name, blocks.chunks, meta=blocks._meta)


def _call_after(_: Any, function: Callable[..., Any], *args: Any, **options: Any) -> Any:
    return function(*args, **options)


def in_turn(measure: Callable[[int, da.Array], da.Array], boundaries: da.Array) -> da.Array:
    """Measure block after block of rows: each one's boundary waits for the one before it.

    Otherwise dask may read a block for the sake of its last row long before what else is needed to
    measure it, and hold all of it until then.

    Parameters
    ----------
    measure : callable
        From the number of a block and the row before it, (1, token, hidden), to one block.
    boundaries : dask Array, (1 per block, token, hidden)
    """
    measured: list[da.Array] = []
    for number in range(boundaries.numblocks[0]):
        row = boundaries.blocks[number]
        measured.append(measure(number, waiting(row, *measured[-1:])))
    return da.concatenate(measured)
