"""Kernels applied to blocks of rows or to single rows, folds over blocks, and the order of tasks.

`measure` applies a kernel; `fold` passes a state from block to block; `compute_all` computes
several results in one pass. dask starts tasks whose inputs are ready in an order of its own. The
functions that split, combine or delay tasks keep only few blocks in memory at once.

All that the analysis needs of dask outside its documented interface is here, each with its reason.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import itertools
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, TypeAlias, cast

import dask
import dask.array as da
import numpy as np
import numpy.typing as npt
from dask._task_spec import DataNode, Task, TaskRef, convert_legacy_graph
from dask.base import clone_key, get_scheduler, tokenize, unpack_collections
from dask.callbacks import Callback
from dask.core import flatten
from dask.highlevelgraph import HighLevelGraph

from trajstore.analysis.scan.result_variables import ResultVariables, record_of


def chunks_of(block: Any) -> list[npt.NDArray[Any]]:
    """The chunks of a block, as a kernel gets them: one array, or nested lists.

    `dask.array.blockwise` nests lists by the dimensions that the result lacks. Only
    `dask.core.flatten`, which is not documented, joins lists of any depth.
    """
    return list(flatten([block]))


def read_again(blocks: da.Array, after: da.Array) -> da.Array:
    """The array from separate tasks that run after another array is computed.

    `dask.graph_manipulation.bind` does not clone the source of a slice, so the source would stay in
    memory (dask 2025.9 to 2026.8). Cloned tasks need the task classes, `clone_key`, and the meta
    array of the original.

    Parameters
    ----------
    blocks : dask Array
    after : dask Array
        An array of a single chunk.
    """
    nodes = convert_legacy_graph(dict(blocks.dask))
    task_keys = {key for key, node in nodes.items() if not isinstance(node, DataNode)}
    clones = {key: clone_key(key, after.name) for key in nodes}
    (awaited,) = flatten(after.__dask_keys__())
    tasks: dict[Any, Any] = {}
    for key, clone in clones.items():
        node = nodes[key].substitute(clones, key=clone)
        if isinstance(node, Task) and not nodes[key].dependencies & task_keys:
            node = Task(clone, _call_after, TaskRef(awaited), node.func, *node.args, **node.kwargs)
        tasks[clone] = node
    name = clone_key(blocks.name, after.name)
    graph = HighLevelGraph.from_collections(name, tasks, [after])
    return da.Array(graph, name, blocks.chunks, meta=blocks._meta)


def _call_after(_: Any, function: Callable[..., Any], *args: Any, **options: Any) -> Any:
    return function(*args, **options)


def current_client() -> Any | None:
    """Client of the current dask cluster; None for a local scheduler.

    `dask.base.get_scheduler` also sees a cluster that is set in dask's configuration, without an
    import of distributed, which may not be installed.
    """
    owner = getattr(get_scheduler(), "__self__", None)
    return owner if hasattr(owner, "scheduler_info") else None


def compute_on_cluster(
    client: Any, collections: Sequence[Any], report: Callable[[int, int], None]
) -> tuple[Any, ...]:
    """Compute dask collections on a cluster, with progress reports.

    `distributed.progress` only draws to a terminal or a notebook, so its bar is subclassed.
    `unpack_collections` finds the collections within dicts and lists, as `dask.compute` does.
    """
    from distributed.diagnostics.progressbar import ProgressBar

    class Bar(ProgressBar):  # type: ignore[misc]
        def _draw_bar(self, remaining: int, all: int, **_: Any) -> None:
            report(all - remaining, all)

    lazy, repack = unpack_collections(*collections)
    futures = client.compute(lazy)
    try:
        if futures:
            client.sync(Bar(futures, client.scheduler.address).listen)
        return tuple(repack(client.gather(futures)))
    except BaseException:
        client.cancel(futures)
        raise


Array = npt.NDArray[Any]
Wide = npt.NDArray[np.float64]
Numbers = npt.NDArray[np.int64]
Groups = npt.NDArray[np.bool_]
"""Members of each population, (population, token), or other flags."""

DIMS = ("step", "token", "hidden")
"""Dimensions of a matrix."""

# Pairs of vectors per task: rows with few tokens are combined to limit dask's overhead.
_PAIRS_OF_A_TASK = 1 << 24


class Along(NamedTuple):
    """An array whose dimensions are not the first of `DIMS`, with their names; see `along`."""

    array: da.Array
    dims: tuple[str, ...]


def along(array: da.Array, *dims: str) -> Along:
    """Name the dimensions of a source of `measure`."""
    return Along(array, dims)


@dataclass(frozen=True, kw_only=True, eq=False)
class ConsecutiveRows:
    """A matrix whose rows are positions, or displacements between them, and the row before each.

    Attributes
    ----------
    blocks : dask Array, (step, token, hidden) or (step, token)
    variable : str
        Source of the values, such as ``W``, ``cells`` or ``delta``.
    type : str
        Type that defines the lattice of the values.
    are_changes : bool
        True if a row is the displacement from the previous row, not a position.
    first : dask Array, (1, token, hidden), optional
        Row before the first block. Default: its own first row.
    """

    blocks: da.Array
    variable: str = ""
    type: str = ""
    are_changes: bool = False
    first: da.Array | None = None

    @functools.cached_property
    def boundaries(self) -> da.Array:
        """Row before each block, (1 per block, token, hidden)."""
        first = self.blocks[:1] if self.first is None else self.first
        return da.concatenate([first, last_rows(self.blocks)[:-1]])


Source: TypeAlias = ConsecutiveRows | da.Array | Array | Along
"""What `measure` passes to a kernel, block by block."""


class _Argument(NamedTuple):
    """An array that a kernel gets; `kind` says which part of it belongs to a row."""

    array: da.Array
    dims: tuple[str, ...]
    kind: str


def measure(
    kernel: Callable[..., Any],
    /,
    *sources: Source,
    dims: Sequence[str],
    dtype: npt.DTypeLike | ResultVariables,
    sizes: Mapping[str, int] | None = None,
    by_row: bool = False,
    **options: Any,
) -> da.Array:
    """Apply a function block by block, or row by row, without floating-point warnings.

    Parameters
    ----------
    kernel : callable
        Function of a block of every source that returns an array, or a mapping with an array for
        each of the variables. Along a dimension that the result lacks, a source has one chunk, or
        the kernel gets nested lists of chunks. `dask.array.map_blocks` with ``drop_axis`` would
        copy every such block to concatenate them.
    *sources : dask Array, Along, ndarray or ConsecutiveRows
        A dask Array has the first of the dimensions (step, token, hidden), or the dimensions that
        `along` names. An ndarray holds one value per row; its blocks are (row, 1, 1).
        `ConsecutiveRows` are two arguments: a block, and the row before it. The first source has
        all its chunks. Along each dimension, others have as many chunks, of any length, or one.
    dims : sequence of str
        Names of the dimensions of the result.
    dtype : dtype, or mapping of str to ResultVariable
        Type of the result, or the variables that it holds.
    sizes : mapping of str to int, optional
        Length of each dimension that only the result has, or of each block of the result.
    by_row : bool
        True for a kernel of one row of each source; with all tokens, if the result has none. A
        source without steps is passed whole, an ndarray as one number. For `ConsecutiveRows` the
        kernel gets the row and the row before it, which is zero for changes.
    **options
        Passed to `kernel`. Arrays become one task each, not a copy in each task.
    """
    arguments: list[_Argument] = []
    for source in sources:
        arguments += _arguments_of(source, arguments[0].array if arguments else None, by_row)
    record = (
        record_of(cast(ResultVariables, dtype)) if isinstance(dtype, Mapping) else np.dtype(dtype)
    )
    run: Callable[..., Array] = functools.partial(_of_blocks, kernel, record, len(dims))
    sizes = sizes or {}
    if by_row:
        lengths = [sizes[dim] if dim in sizes else _place(dim, arguments) for dim in dims[1:]]
        kinds = [argument.kind for argument in arguments]
        run = functools.partial(_row_by_row, kernel, record, lengths, kinds)
    known = {dim for argument in arguments for dim in argument.dims}
    return da.blockwise(
        run,
        dims,
        *itertools.chain.from_iterable((array, names) for array, names, _ in arguments),
        dtype=record,
        meta=np.empty((0,) * len(dims), record),
        align_arrays=False,
        new_axes={dim: size for dim, size in sizes.items() if dim not in known},
        adjust_chunks={dim: size for dim, size in sizes.items() if dim in known},
        **{
            name: shared(value) if isinstance(value, np.ndarray) else value
            for name, value in options.items()
        },
    )


def _arguments_of(source: Source, first: da.Array | None, by_row: bool) -> list[_Argument]:
    """Arguments that a kernel gets for a source; `first` is the array of the first source."""
    if isinstance(source, ConsecutiveRows):
        dims = DIMS[: source.blocks.ndim]
        if by_row and source.are_changes:
            return [_Argument(source.blocks, dims, "change")]
        return [
            _Argument(source.blocks, dims, "row"),
            _Argument(source.boundaries, dims, "row_before"),
        ]
    if isinstance(source, np.ndarray):
        array = per_row(first, source)
        return [_Argument(array, ("step", "single_token", "single_element"), "number")]
    array, dims = source if isinstance(source, Along) else along(source, *DIMS[: source.ndim])
    return [_Argument(array, dims, "row" if dims[0] == "step" else "whole")]


def _place(dim: str, arguments: Sequence[_Argument]) -> tuple[int, int]:
    """Number of the first argument that has a dimension, and the place of the dimension in it."""
    return next(
        (number, argument.dims.index(dim))
        for number, argument in enumerate(arguments)
        if dim in argument.dims
    )


def _of_blocks(
    kernel: Callable[..., Any], record: np.dtype[Any], ndim: int, /, *blocks: Any, **options: Any
) -> Array:
    """Result of a kernel of the only blocks: `dask.array.blockwise` passes nested lists."""
    with np.errstate(all="ignore"):  # NaN and infinity are valid results
        measured = kernel(*map(_only_block, blocks), **options)
    if not isinstance(measured, Mapping):
        return np.asarray(measured)
    result = np.empty(measured[next(iter(measured))].shape[:ndim], record)
    for name, values in measured.items():
        result[name] = values
    return result


def _only_block(nested: Any) -> Any:
    """The block within nested lists of length one; a block or several are returned unchanged."""
    while isinstance(nested, list) and len(nested) == 1:
        (nested,) = nested
    return nested


@np.errstate(all="ignore")
def _row_by_row(
    kernel: Callable[..., Any],
    record: np.dtype[Any],
    lengths: Sequence[int | tuple[int, int]],
    kinds: Sequence[str],
    /,
    *blocks: Any,
    **options: Any,
) -> Array:
    """Results of a kernel of single rows."""
    values: list[Iterable[Any]] = []
    for number, (block, kind) in enumerate(zip(blocks, kinds, strict=True)):
        if kind == "whole":
            values.append(itertools.repeat(_only_block(block)))
        elif kind == "number":
            values.append(_only_block(block)[:, 0, 0])
        elif kind == "row_before":
            values.append(itertools.chain(_rows(block), _rows(blocks[number - 1])))
        else:
            values.append(_rows(block))
        if kind == "change":
            values.append(map(np.zeros_like, _rows(block)))
    shape = (
        size if isinstance(size, int) else chunks_of(blocks[size[0]])[0].shape[size[1]]
        for size in lengths
    )
    result = np.empty((len(chunks_of(blocks[0])[0]), *shape), record)
    # The first array ends first: the row before the next block is not the last one.
    for row, arguments in enumerate(zip(*values, strict=False)):
        measured = kernel(*arguments, **options)
        if isinstance(measured, Mapping):
            for name, each in measured.items():
                result[name][row] = each
        else:
            result[row] = measured
    return result


def _rows(nested: Any) -> Iterable[Array]:
    """Rows of a block with all tokens, contiguous."""
    first, *others = chunks_of(nested)
    return (
        map(np.concatenate, zip(first, *others, strict=True))
        if others
        else map(np.ascontiguousarray, first)
    )


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


def last_rows(blocks: da.Array) -> da.Array:
    """Last row of each block of rows, (1 per block, token, hidden)."""
    dims = DIMS[: blocks.ndim]
    return measure(last_row, blocks, dims=dims, dtype=blocks.dtype, sizes={"step": 1})


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
    # Dimensions of their own, so that every task waits for all blocks.
    awaited = (
        along(other, *(f"{axis} of {number}" for axis in range(other.ndim)))
        for number, other in enumerate(others)
    )
    return measure(_first_of, row, *awaited, dims=DIMS, dtype=row.dtype)


def _first_of(row: Array, *others: Any) -> Array:
    return row


def in_turn(
    measure_block: Callable[..., da.Array], rows: ConsecutiveRows, *others: Source
) -> da.Array:
    """Measure blocks of rows in sequence: the row before each waits for the previous result.

    Otherwise dask may read a block early for its last row, and hold all of it in memory.

    Parameters
    ----------
    measure_block : callable
        From a block of each source to one block of the result.
    rows : ConsecutiveRows
        Its boundaries wait.
    *others : ConsecutiveRows, dask Array or ndarray
        An ndarray has one value per row, and is split as `rows`.
    """
    ends = np.cumsum(rows.blocks.chunks[0])[:-1]
    measured: list[da.Array] = []
    for number in range(rows.blocks.numblocks[0]):
        block = _block_of(rows, number, ends)
        first = waiting(block.first, *measured[-1:])
        others_of_block = (_block_of(other, number, ends) for other in others)
        measured.append(measure_block(replace(block, first=first), *others_of_block))
    return da.concatenate(measured)


def _block_of(source: Any, number: int, ends: Numbers) -> Any:
    """A block of a source of `in_turn`."""
    if isinstance(source, np.ndarray):
        return np.split(source, ends)[number]
    if not isinstance(source, ConsecutiveRows):
        return source.blocks[number]
    first = source.boundaries.blocks[number]
    return replace(source, blocks=source.blocks.blocks[number], first=first)


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
    """Fold all rows, in order, to a result per token, or to one result of whole rows.

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
    for piece in range(1 if whole_rows else pieces):
        last: Any = None
        for number in range(rows):
            blocks: list[Any] = [
                [(array.name, number, part, 0) for part in range(pieces)]
                if whole_rows
                else _key(array, number, piece)
                for array in arrays
            ]
            task_options = shared
            if prepare is not None:
                prepared = (f"prepared-{name}", number, piece)
                tasks[prepared] = (_call, prepare, shared, *blocks)
                blocks, task_options = [prepared], {}
            tasks[f"state-{name}", number, piece] = (_call, kernel, task_options, last, *blocks)
            last = (f"state-{name}", number, piece)
        tasks[(name, *(0 for _ in sizes), *(() if whole_rows else (piece,)))] = (
            _call,
            finish,
            {},
            last,
        )
    graph = HighLevelGraph.from_collections(name, tasks, arrays)
    chunks = (*((size,) for size in sizes), *(() if whole_rows else (first.chunks[1],)))
    return da.Array(graph, name, chunks, dtype=dtype)


def _key(array: da.Array, number: int, piece: int) -> tuple[Any, ...]:
    """Key of a block of rows, and of one of its chunks along token, or the only one."""
    return (array.name, number, min(piece, array.numblocks[1] - 1), *(0 for _ in array.shape[2:]))


Report = Callable[[int, int], None]
"""Called with the numbers of finished and of all tasks."""


@contextlib.contextmanager
def progress_of_tasks(report: Report | None) -> Iterator[None]:
    """Report the tasks of dask's local schedulers while they run."""
    if report is None:
        yield
        return

    def forward(key: Any, result: Any, graph: Any, state: Any, worker: Any) -> None:
        done = len(state["finished"])
        report(done, done + len(state["ready"]) + len(state["waiting"]) + len(state["running"]))

    with Callback(posttask=forward):
        yield


def compute_all(lazy: Sequence[Any], report: Report | None = None) -> tuple[Any, ...]:
    """Compute dask collections together in one pass, with the current scheduler.

    Parameters
    ----------
    lazy : sequence
        Dask collections, or dicts and lists that hold them. Other objects are returned unchanged.
    report : callable, optional
        Called with the numbers of finished and of all tasks.
    """
    client = current_client()
    if client is not None and report is not None:
        return compute_on_cluster(client, lazy, report)
    with progress_of_tasks(report):
        return tuple(dask.compute(*lazy))


def return_memory() -> None:
    """Return free memory to the operating system, if the C library supports it.

    Call it between two computations of large blocks. glibc keeps freed memory between blocks in
    use, and the next computation, with other block sizes, would allocate more.
    """
    if sys.platform == "linux":
        trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # not in musl
        if trim is not None:
            trim(0)
