"""Threads: how many, and how work is handed to them, also when the interpreter is ending."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, TypeVar

__all__ = ["Progress", "default_threads", "in_parallel", "submit"]

T = TypeVar("T")

Progress = Callable[[int, int], None]
"""Called with the bytes that are done, and those there are."""

_MOST_THREADS = 8


def submit(pool: ThreadPoolExecutor, work: Callable[..., T], *arguments: Any) -> Future[T]:
    """Have a pool do something; do it here, if the interpreter is ending and pools take no more."""
    try:
        return pool.submit(work, *arguments)
    except RuntimeError:
        done: Future[T] = Future()
        try:
            done.set_result(work(*arguments))
        except BaseException as error:
            done.set_exception(error)
        return done


def default_threads() -> int:
    """As many as there are processors that this process may use, at most 8."""
    if hasattr(os, "sched_getaffinity"):
        return min(len(os.sched_getaffinity(0)), _MOST_THREADS)
    return min(os.cpu_count() or 1, _MOST_THREADS)


def in_parallel(jobs: Iterable[Callable[[], T]], threads: int | None = None) -> Iterator[T]:
    """Results of jobs, in order, a few of them running ahead in threads.

    Decoding and writing release the interpreter's lock. When a job fails, or the caller stops, no
    further one is begun.

    Parameters
    ----------
    jobs : iterable of callable
    threads : int, optional
        `default_threads` without it.
    """
    threads = threads or default_threads()
    waiting: deque[Future[T]] = deque()
    pool = ThreadPoolExecutor(threads, thread_name_prefix="trajstore-job")
    try:
        for job in jobs:
            waiting.append(submit(pool, job))
            if len(waiting) > threads:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()
    finally:
        pool.shutdown(wait=True, cancel_futures=True)
