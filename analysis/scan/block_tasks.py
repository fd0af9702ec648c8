"""Kernels applied to blocks of rows or to single rows, last rows, and the order of tasks.

Types of NumPy arrays.

Computation with progress reports, on dask's local schedulers and on clusters.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import itertools
import string
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

import dask
import dask.array as da
import numpy as np
import numpy.typing as npt
import xarray as xr
from dask._task_spec import DataNode, Task, TaskRef, convert_legacy_graph
from dask.base import clone_key, get_scheduler, unpack_collections
from dask.callbacks import Callback
from dask.core import flatten
from dask.highlevelgraph import HighLevelGraph
from dask.tokenize import tokenize

from trajstore.analysis.scan.input_checks import Facts, dataset, record_of

Array = npt.NDArray[Any]
Wide = npt.NDArray[np.float64]
Numbers = npt.NDArray[np.int64]
Groups = npt.NDArray[np.bool_]
"""Members of each population, (population, token), or other flags."""

# Pairs of vectors per task: rows with few tokens are combined to limit dask's overhead.
_PAIRS_OF_A_TASK = 1 << 24


@dataclass(frozen=True, kw_only=True, eq=False)
class Points:
    """A matrix whose rows are positions, or displacements between them, and the row before each.

    Attributes
    ----------
    variable : str
        Source of the values, such as ``W``, ``cells`` or ``delta``.
    type : str
        Type that defines the lattice of the values.
    blocks : dask Array, (step, token, hidden)
    are_changes : bool
        True if a row is the displacement from the previous row, not a position.
    first : dask Array, (1, token, hidden), optional
        Row before the first block. Default: its own first row.
    """

    variable: str
    type: str
    blocks: da.Array
    are_changes: bool = False
    first: da.Array | None = None

    @functools.cached_property
    def boundaries(self) -> da.Array:
        """Row before each block, (1 per block, token, hidden); see `rows_before`."""
        return rows_before(self.blocks, self.first)


def measure(
    kernel: Callable[..., Any],
    dims: str,
    /,
    *sources: Points | da.Array | Array | tuple[da.Array, str],
    dtype: npt.DTypeLike | Facts,
    sizes: Mapping[str, int] | None = None,
    by_row: bool = False,
    **options: Any,
) -> da.Array:
    """Apply a function block by block, or row by row, without floating-point warnings.

    Parameters
    ----------
    kernel : callable
        Function of a block of every source that returns an array, or a mapping with an array for
        each of the facts. Along a dimension that the result lacks, a source has one chunk, or the
        kernel gets nested lists of chunks. `dask.array.map_blocks` with ``drop_axis`` would copy
        every such block to concatenate them.
    dims : str
        One letter per dimension of the result: s for step, t for token, h for hidden, or any other.
    *sources : Points, dask Array, ndarray, or tuple of dask Array and str
        The first has all its chunks. Along each dimension, others have as many chunks, of any
        length, or one. The string holds their dimensions; default: the first letters of "sth". An
        ndarray has one value per row, and its blocks are (row, 1, 1). For `Points` the kernel gets
        two arguments: a block, and the row before it.
    dtype : dtype, or mapping of str to Fact
        Type of the result, or the facts that it holds.
    sizes : mapping of str to int, optional
        Length of each dimension that only the result has, or of each block of the result.
    by_row : bool
        True for a kernel of one row of each source; with all tokens, if the result has none. A
        source without steps is passed whole, an ndarray as one number. For `Points` the kernel gets
        the row and the row before it, which is zero for changes.
    **options
        Passed to `kernel`. Arrays become one task each, not a copy in each task.
    """
    arrays: list[da.Array] = []
    letters: list[str] = []
    kinds: list[str] = []
    for source in sources:
        array, own = source if isinstance(source, tuple) else (source, "sth")
        parts = [(array, "row" if own[0] == "s" else "whole")]
        if isinstance(array, Points):
            parts = [(array.blocks, "row"), (array.boundaries, "row_before")]
            if by_row and array.are_changes:
                parts = [(array.blocks, "change")]
        elif isinstance(array, np.ndarray):
            parts, own = [(per_row(arrays[0], array), "number")], "sTH"
        for part, kind in parts:
            arrays.append(part)
            letters.append(own[: part.ndim])
            kinds.append(kind)
    known = "".join(letters)
    changed = dict(sizes or {})
    record = record_of(cast(Facts, dtype)) if isinstance(dtype, Mapping) else np.dtype(dtype)
    run: Callable[..., Array] = functools.partial(_of_blocks, kernel, record, len(dims))
    if by_row:
        lengths = [
            changed[letter] if letter in changed else _place(letter, letters) for letter in dims[1:]
        ]
        run = functools.partial(_row_by_row, kernel, record, lengths, kinds)
    return da.blockwise(
        run,
        dims,
        *itertools.chain(*zip(arrays, letters, strict=True)),
        dtype=record,
        meta=np.empty((0,) * len(dims), record),
        align_arrays=False,
        new_axes={letter: size for letter, size in changed.items() if letter not in known},
        adjust_chunks={letter: size for letter, size in changed.items() if letter in known},
        **{
            name: shared(value) if isinstance(value, np.ndarray) else value
            for name, value in options.items()
        },
    )


def _place(letter: str, letters: Sequence[str]) -> tuple[int, int]:
    """Array, and its dimension, with the given letter."""
    return next((at, own.index(letter)) for at, own in enumerate(letters) if letter in own)


def _of_blocks(
    kernel: Callable[..., Any], record: np.dtype[Any], ndim: int, /, *blocks: Any, **options: Any
) -> Array:
    """Result of a kernel of the only blocks: `dask.array.blockwise` passes nested lists."""
    with np.errstate(all="ignore"):  # NaN and infinity are valid results
        found = kernel(*map(_only_block, blocks), **options)
    if not isinstance(found, Mapping):
        return np.asarray(found)
    result = np.empty(found[next(iter(found))].shape[:ndim], record)
    for name, values in found.items():
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
    for at, (block, kind) in enumerate(zip(blocks, kinds, strict=True)):
        if kind == "whole":
            values.append(itertools.repeat(_only_block(block)))
        elif kind == "number":
            values.append(_only_block(block)[:, 0, 0])
        elif kind == "row_before":
            values.append(itertools.chain(_rows(block), _rows(blocks[at - 1])))
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
    for row, given in enumerate(zip(*values, strict=False)):
        found = kernel(*given, **options)
        if isinstance(found, Mapping):
            for name, each in found.items():
                result[name][row] = each
        else:
            result[row] = found
    return result


def _rows(nested: Any) -> Iterable[Array]:
    """Rows of a block with all tokens, contiguous."""
    first, *others = chunks_of(nested)
    return (
        map(np.concatenate, zip(first, *others, strict=True))
        if others
        else map(np.ascontiguousarray, first)
    )


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


def table(
    measured: da.Array, facts: Facts, dims: Sequence[str], coords: Mapping[Any, Any]
) -> xr.Dataset:
    """Dataset of measured facts, with their attributes.

    Parameters
    ----------
    measured : dask Array of `record_of` these facts
    facts : mapping of str to Fact
    dims : sequence of str
        Dimensions of the array, and the one that a type with a shape adds.
    coords : mapping
    """
    arrays = {name: field(measured, name) for name in facts}
    variables = {name: (dims[: data.ndim], data, facts[name]) for name, data in arrays.items()}
    return dataset(variables, coords)


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
    measure: Callable[..., da.Array], points: Points, *others: Points | da.Array | Array
) -> da.Array:
    """Measure blocks of rows in sequence: the row before each waits for the previous result.

    Otherwise dask may read a block early for its last row, and hold all of it in memory.

    Parameters
    ----------
    measure : callable
        From a block of each source to one block of the result.
    points : Points
        Its boundaries wait.
    *others : Points, dask Array or ndarray
        An ndarray has one value per row, and is split as `points`.
    """
    ends = np.cumsum(points.blocks.chunks[0])[:-1]
    measured: list[da.Array] = []
    for number in range(points.blocks.numblocks[0]):
        own = [
            np.split(each, ends)[number]
            if isinstance(each, np.ndarray)
            else _block_of(each, number)
            for each in others
        ]
        part = _block_of(points, number)
        waited = replace(part, first=waiting(part.first, *measured[-1:]))
        measured.append(measure(waited, *own))
    return da.concatenate(measured)


def _block_of(source: Any, number: int) -> Any:
    if not isinstance(source, Points):
        return source.blocks[number]
    first = source.boundaries.blocks[number]
    return replace(source, blocks=source.blocks.blocks[number], first=first)


def chunks_of(nested: Any) -> list[Array]:
    """The chunks of a block, as a kernel gets them: one array, or nested lists."""
    return list(flatten([nested]))


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
    client = _client()
    if client is None or report is None:
        with progress_of_tasks(report):
            return tuple(dask.compute(*lazy))
    from distributed.diagnostics.progressbar import ProgressBar

    forward: Report = report

    class Bar(ProgressBar):  # type: ignore[misc]
        def _draw_bar(self, remaining: int, all: int, **_: Any) -> None:
            forward(all - remaining, all)

    collections, repack = unpack_collections(*lazy)
    futures = client.compute(collections)
    try:
        if futures:
            client.sync(Bar(futures, client.scheduler.address).listen)
        return tuple(repack(client.gather(futures)))
    except BaseException:
        client.cancel(futures)
        raise


def return_memory() -> None:
    """Return free memory to the operating system, if the C library supports it.

    Call it between two computations of large blocks. glibc keeps freed memory between blocks in
    use, and the next computation, with other block sizes, would allocate more.
    """
    if sys.platform == "linux":
        trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # not in musl
        if trim is not None:
            trim(0)


def _client() -> Any | None:
    """Client of the current dask cluster; None for a local scheduler."""
    owner = getattr(get_scheduler(), "__self__", None)
    return owner if hasattr(owner, "scheduler_info") else None
