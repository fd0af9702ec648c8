"""What dask holds at once while a question is answered, with workers whose time is counted.

A worker takes one unit of time to read a block, several to work on one, and next to none for
anything smaller: so it shows, and every time alike, whether the others read on meanwhile.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from typing import Any
from unittest import mock

import dask
import dask.array as da
import dask.local
import numpy as np
import xarray as xr
from dask.callbacks import Callback

ROWS, TOKENS, HIDDEN = 2, 128, 16
BLOCK = ROWS * TOKENS * HIDDEN * 4
MATRICES = ("W", "grad", "exp_avg", "exp_avg_sq")


def made_of_blocks(rows: int) -> xr.Dataset:
    """Matrices in blocks of two rows."""
    sizes = ((ROWS,) * (rows // ROWS), (TOKENS,), (HIDDEN,))

    def read(block_info: Any) -> np.ndarray[Any, Any]:
        (start, stop), (first, last), _ = block_info[None]["array-location"]
        steps, tokens = np.arange(start, stop)[:, None, None], np.arange(first, last)[:, None]
        return (1 + (steps * (1 + tokens % 3) + np.arange(HIDDEN)) % 5 / 128).astype(np.float32)

    options: dict[str, Any] = {"chunks": sizes, "dtype": "f4", "meta": np.empty((0, 0, 0), "f4")}
    blocks = {name: da.map_blocks(read, name=f"read-{name}", **options) for name in MATRICES}
    ds = xr.Dataset(
        {"clip_coef": ("step", np.ones(rows)), "lr": ("step", np.full(rows, 1e-3))},
        coords={"step": np.arange(rows), "is_dead": ("token", np.arange(TOKENS) % 2 == 0)},
    )
    dims, attrs = ("step", "token", "hidden"), {"native_dtype": "bfloat16"}
    return ds.assign({name: (dims, array, attrs) for name, array in blocks.items()})


def _arrays(value: Any) -> Iterator[np.ndarray[Any, Any]]:
    """The arrays whose memory a result keeps."""
    if isinstance(value, np.ndarray):
        while isinstance(value.base, np.ndarray):
            value = value.base
        yield value
    elif isinstance(value, list | tuple):
        for part in value:
            yield from _arrays(part)
    elif isinstance(value, dict):
        yield from _arrays(list(value.values()))
    elif hasattr(value, "__dataclass_fields__"):
        yield from _arrays([getattr(value, name) for name in value.__dataclass_fields__])


def held_at_most(question: Callable[[], Any], workers: int = 1) -> int:
    """Bytes of the arrays that dask holds at once."""
    largest = now = 0
    running: list[tuple[float, int, Future[Any], Any]] = []

    def submit(execute: Callable[..., Any], tasks: list[Any]) -> Future[Any]:
        future: Future[Any] = Future()
        _, (_, inputs), *_ = tasks[0]
        sizes = [array.nbytes for array in _arrays(dict(inputs))]
        takes = 4.0 if max(sizes, default=0) >= BLOCK // 2 else 0.01 if inputs else 1.0
        heapq.heappush(running, (now + takes, len(started), future, (execute, tasks)))
        started.append(future)
        return future

    def first_done(queue: Any) -> Future[Any]:
        nonlocal now
        if queue.empty():
            now, _, future, (execute, tasks) = heapq.heappop(running)
            future.set_result(execute(tasks))
        done: Future[Any] = queue.get()
        return done

    def look(key: Any, result: Any, dsk: Any, state: dict[str, Any], worker: Any) -> None:
        nonlocal largest
        held = {id(array): array.nbytes for array in _arrays(state["cache"])}
        largest = max(largest, sum(held.values()))

    def get(dsk: Any, keys: Any, **_: Any) -> Any:
        return dask.local.get_async(submit, workers, dsk, keys)

    started: list[Future[Any]] = []
    patched = mock.patch.object(dask.local, "queue_get", first_done)
    with patched, Callback(posttask=look), dask.config.set(scheduler=get):
        question()
    return largest
