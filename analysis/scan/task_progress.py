"""Computation with progress reports, on dask's local schedulers and on clusters."""

from __future__ import annotations

import contextlib
import ctypes
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import dask
from dask.base import get_scheduler, unpack_collections
from dask.callbacks import Callback

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
