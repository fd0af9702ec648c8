"""Kernels applied to blocks of rows, last rows, and the order of tasks."""

from __future__ import annotations

import itertools
import string
from collections.abc import Callable, Mapping
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
    "chunks_of",
    "field",
    "in_halves",
    "in_parts",
    "in_turn",
    "last_row",
    "last_rows",
    "measure",
    "over_hidden",
    "per_row",
    "read_again",
    "rows_before",
    "shared",
    "waiting",
    "whole_rows",
]

Array = npt.NDArray[Any]

# Pairs of vectors per task: rows with few tokens are combined to limit dask's overhead.
_PAIRS_OF_A_TASK = 1 << 24


def measure(
    kernel: Callable[..., Array],
    dims: str,
    *sources: da.Array | Array | tuple[da.Array, str],
    dtype: npt.DTypeLike,
    sizes: Mapping[str, int] | None = None,
    **options: Any,
) -> da.Array:
    """Apply a function block by block.

    Parameters
    ----------
    kernel : callable
        Function of a block of every source. Along a dimension that the result lacks, a source has
        one chunk, or the kernel gets nested lists of chunks. `dask.array.map_blocks` with
        ``drop_axis`` would copy every such block to concatenate them.
    dims : str
        One letter per dimension of the result: s for step, t for token, h for hidden, or any other.
    *sources : dask Array, ndarray, or tuple of dask Array and str
        The first is a dask Array with all its chunks. Along each dimension, others have as many
        chunks, of any length, or one. The string holds their dimensions; default: the first letters
        of "sth". An ndarray has one value per row, and its blocks are (row, 1, 1).
    dtype : dtype
        Type of the result.
    sizes : mapping of str to int, optional
        Length of each dimension that only the result has, or of each block of the result.
    **options
        Passed to `kernel`. Arrays become one task each, not a copy in each task.
    """
    arrays: list[da.Array] = []
    letters: list[str] = []
    for source in sources:
        array, own = source if isinstance(source, tuple) else (source, "sth")
        if isinstance(array, np.ndarray):
            array, own = per_row(arrays[0], array), "sTH"
        arrays.append(array)
        letters.append(own[: array.ndim])
    known = set("".join(letters))
    changed = dict(sizes or {})
    return da.blockwise(
        _of_only_blocks,
        dims,
        *itertools.chain(*zip(arrays, letters, strict=True)),
        kernel=kernel,
        dtype=dtype,
        meta=np.empty((0,) * len(dims), dtype),
        align_arrays=False,
        new_axes={letter: size for letter, size in changed.items() if letter not in known},
        adjust_chunks={letter: size for letter, size in changed.items() if letter in known},
        **{
            name: shared(value) if isinstance(value, np.ndarray) else value
            for name, value in options.items()
        },
    )


def over_hidden(
    kernel: Callable[..., Array],
    first: da.Array,
    *others: da.Array | Array,
    dtype: npt.DTypeLike,
    **options: Any,
) -> da.Array:
    """Apply a function of whole vectors. The result has no hidden dimension.

    Parameters
    ----------
    kernel : callable
        Function of a block of every array.
    first : dask Array, (…, hidden)
        With one chunk along hidden.
    *others : dask Array or ndarray
        With the last dimensions of `first`, or values per row, as for `measure`.
    dtype : dtype
        Type of the result.
    **options
        Passed to `kernel`.
    """
    dims = "sthabcdef"[: first.ndim]
    sources = [
        each if isinstance(each, np.ndarray) else (each, dims[-each.ndim :])
        for each in (first, *others)
    ]
    return measure(kernel, dims[:-1], *sources, dtype=dtype, **options)


def _of_only_blocks(*blocks: Any, kernel: Callable[..., Array], **options: Any) -> Array:
    """Call the kernel with the only blocks: `dask.array.blockwise` passes nested lists."""
    return kernel(*map(_only_block, blocks), **options)


def _only_block(nested: Any) -> Any:
    """The block within nested lists of length one; a block or several are returned unchanged."""
    while isinstance(nested, list) and len(nested) == 1:
        (nested,) = nested
    return nested


def field(measured: da.Array, name: str) -> da.Array:
    """One field of structured blocks, contiguous. A field with a shape adds dimensions.

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
    """Wrap an array that many tasks need as one task, to avoid a copy in each.

    Use it for a keyword of `dask.array.map_blocks` or `dask.array.blockwise`.
    """
    return dask.delayed(values, name=f"shared-{tokenize(values)}", traverse=False)


def whole_rows(blocks: da.Array, rows: npt.NDArray[np.int64]) -> da.Array:
    """The given rows with all tokens in one chunk, split into tasks of sufficient size."""
    every = np.array_equal(rows, np.arange(len(blocks)))
    chosen = blocks if every else blocks[rows]
    most = max(1, _PAIRS_OF_A_TASK // max(1, chosen.shape[1]) ** 2)
    return in_parts(chosen, most).rechunk({1: -1})


def in_parts(blocks: da.Array, most: int, axis: int = 0) -> da.Array:
    """Split chunks along a dimension into parts of at most the given length."""
    parts = (
        min(most, size - start)
        for size in blocks.chunks[axis]
        for start in range(0, max(size, 1), most)
    )
    return blocks.rechunk({axis: tuple(parts)})


def in_halves(blocks: da.Array) -> da.Array:
    """Split each block of rows in two, so that two threads work on it.

    Otherwise idle threads would read further blocks.
    """
    if not len(blocks):
        return blocks
    halves = ((size - size // 2, size // 2) for size in blocks.chunks[0])
    return blocks.rechunk({0: tuple(part for pair in halves for part in pair if part)})


def rows_before(blocks: da.Array, first: da.Array | None = None) -> da.Array:
    """Row before each block, (1 per block, …). For the first: `first`, or its own first row."""
    first = blocks[:1] if first is None else first
    return da.concatenate([first, last_rows(blocks)[:-1]])


def last_rows(blocks: da.Array) -> da.Array:
    """Last row of each block of rows, (1 per block, token, hidden)."""
    return measure(last_row, "sth"[: blocks.ndim], blocks, dtype=blocks.dtype, sizes={"s": 1})


def last_row(block: Array) -> Array:
    """Last row of a block, (1, …), copied: a view would keep the whole block in memory."""
    return block[-1:].copy()


def per_row(blocks: da.Array, values: Array) -> da.Array:
    """Values per row as a dask array, (step, 1, 1), that broadcasts against `blocks`."""
    return da.from_array(values[:, None, None], chunks=(blocks.chunks[0], (1,), (1,)))


def waiting(row: da.Array, *others: da.Array) -> da.Array:
    """The row, (1, token, hidden), computed after all of `others`.

    Otherwise dask would first compute all steps of some tokens, and hold the other tokens of each
    block in memory.
    """
    letters = iter(string.ascii_uppercase)
    awaited = ((other, "".join(next(letters) for _ in other.shape)) for other in others)
    return measure(_first_of, "sth", row, *awaited, dtype=row.dtype)


def _first_of(row: Array, *others: Any) -> Array:
    return row


def read_again(blocks: da.Array, after: da.Array) -> da.Array:
    """The array from separate tasks that run after another array is computed.

    `dask.graph_manipulation.bind` does not clone the source of a slice, so the source would stay in
    memory (dask 2025.9 to 2026.8). The task classes of dask are in a private module.

    Parameters
    ----------
    blocks : dask Array
    after : dask Array
        An array of a single chunk.
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


def in_turn(
    measure: Callable[..., da.Array],
    boundaries: da.Array,
    first: da.Array,
    *others: da.Array | Array,
) -> da.Array:
    """Measure blocks of rows in sequence: the boundary of each waits for the previous result.

    Otherwise dask may read a block early for its last row, and hold all of it in memory.

    Parameters
    ----------
    measure : callable
        From the row before a block, (1, token, hidden), and a block of each array, to one block of
        the result.
    boundaries : dask Array, (1 per block, token, hidden)
    first : dask Array
    *others : dask Array or ndarray
        An ndarray has one value per row, and is split as the first.
    """
    ends = np.cumsum(first.chunks[0])[:-1]
    parts = [
        np.split(each, ends) if isinstance(each, np.ndarray) else each for each in (first, *others)
    ]
    measured: list[da.Array] = []
    for number in range(boundaries.numblocks[0]):
        row = waiting(boundaries.blocks[number], *measured[-1:])
        own = (each[number] if isinstance(each, list) else each.blocks[number] for each in parts)
        measured.append(measure(row, *own))
    return da.concatenate(measured)


def chunks_of(nested: Any) -> list[Array]:
    """The chunks of a block, as a kernel gets them: one array, or nested lists."""
    return list(flatten([nested]))
