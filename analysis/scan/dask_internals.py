"""What the analysis needs of dask outside its documented interface, each with the reason."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import dask.array as da
import numpy.typing as npt
from dask._task_spec import DataNode, Task, TaskRef, convert_legacy_graph
from dask.base import clone_key, get_scheduler, unpack_collections
from dask.core import flatten
from dask.highlevelgraph import HighLevelGraph


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
