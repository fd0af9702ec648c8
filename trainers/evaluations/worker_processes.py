"""Results of steps from several processes, in the order of the steps."""

from __future__ import annotations

import multiprocessing
import os
import pickle
import signal
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from functools import cache
from multiprocessing.synchronize import Event
from typing import Any

import torch
import xarray as xr

from trajstore.errors import InvalidArgument, TrajstoreError
from trajstore.threads import threads_of_each

Worker = Callable[..., Callable[[Sequence[int]], Iterable[xr.Dataset]]]
"""Returns a function that yields the results of some steps; called once in each process."""

_LONGEST = 16
"""Most steps of a request."""

_PATIENCE = 2.0
"""Seconds after which a process returns the results of a request that it has not completed. One
that has to stop is terminated then.
"""

_AHEAD = 4
"""Requests of each process whose results may wait for those of earlier steps."""

_stop: Event
"""Set if a process has to stop after its step."""


def in_processes(
    worker: Worker, arguments: tuple[Any, ...], steps: Sequence[int], jobs: int
) -> Iterator[xr.Dataset]:
    """Call ``worker(*arguments)`` in several processes, and the result with some of the steps.

    Yields
    ------
    Dataset
        One for each step, in order.

    Raises
    ------
    InvalidArgument
        If the arguments cannot be pickled.
    TrajstoreError
        If a process is killed; or the error of the first step that fails, after all results before
        it.
    """
    try:
        made = pickle.dumps((worker, arguments))
    except Exception as error:  # pickle raises many types
        raise InvalidArgument(
            f"the function cannot be passed to other processes ({error}); define it in a module, "
            "or give FILE.py:function"
        ) from error
    length = max(1, min(_LONGEST, len(steps) // (_AHEAD * jobs)))
    pieces = deque(steps[start : start + length] for start in range(0, len(steps), length))
    threads = threads_of_each(jobs)
    others = {*multiprocessing.active_children()}
    spawn = multiprocessing.get_context("spawn")
    stop = spawn.Event()
    pool = ProcessPoolExecutor(min(jobs, len(pieces)), spawn, _start, (threads, stop))
    waiting: deque[Any] = deque()
    try:
        while waiting or pieces:
            while pieces and len(waiting) < _AHEAD * jobs:
                piece = pieces.popleft()
                waiting.append((piece, pool.submit(_evaluated, made, piece)))
            piece, future = waiting[0]
            found, failure = future.result()
            waiting.popleft()
            yield from found
            if failure is not None:
                raise failure
            if left := piece[len(found) :]:
                waiting.appendleft((left, pool.submit(_evaluated, made, left)))
    except BrokenProcessPool as error:
        raise TrajstoreError(
            f"a process that evaluated step {piece[0]} or a later one was killed, perhaps because "
            "the memory was full; give fewer jobs"
        ) from error
    finally:
        stop.set()
        pool.shutdown(wait=False, cancel_futures=True)
        for process in {*multiprocessing.active_children()} - others:
            process.join(_PATIENCE)
            process.terminate()
        pool.shutdown()


def _start(threads: int, stop: Event) -> None:
    """Prepare a process. It ends when the first one ends, for whatever reason."""
    global _stop  # noqa: PLW0603
    _stop = stop
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the first process ends this one
    torch.set_num_threads(threads)
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    first: Any = multiprocessing.parent_process()
    first.join()
    os._exit(1)


@cache
def _evaluator(made: bytes) -> Callable[[Sequence[int]], Iterable[xr.Dataset]]:
    worker, arguments = pickle.loads(made)
    return worker(*arguments)  # type: ignore[no-any-return]


def _evaluated(made: bytes, steps: Sequence[int]) -> tuple[list[xr.Dataset], TrajstoreError | None]:
    """Return the results of the first steps, and the error of the next one."""
    found: list[xr.Dataset] = []
    began = time.monotonic()
    try:
        for result in _evaluator(made)([] if _stop.is_set() else steps):
            found.append(result)
            if _stop.is_set() or time.monotonic() - began > _PATIENCE:
                break
    except TrajstoreError as error:
        error.add_note(traceback.format_exc())
        return found, error
    return found, None
