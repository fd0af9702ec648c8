"""Threads: their number, and jobs for them, also while the interpreter exits."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, TypeVar

T = TypeVar("T")

Progress = Callable[[int, int], None]
"""Called with the bytes that are done and the bytes in total."""

_MOST_THREADS = 8


def submit(pool: ThreadPoolExecutor, work: Callable[..., T], *arguments: Any) -> Future[T]:
    """Submit work to a pool. While the interpreter exits, pools accept none: run the work here."""
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
    """Number of processors that this process may use, at most 8."""
    return min(_processors(), _MOST_THREADS)


def encoding_threads() -> int:
    """Number of threads that encode beside a training: all processors but one, 2 to 8."""
    return min(max(_processors() - 1, min(2, _processors())), _MOST_THREADS)


def threads_of_each(processes: int) -> int:
    """Threads of each of several processes: OMP_NUM_THREADS, or a share of the processors."""
    text = os.environ.get("OMP_NUM_THREADS", "")
    return int(text) if text.isdigit() and int(text) else max(1, _processors() // processes)


def _processors() -> int:
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def in_parallel(jobs: Iterable[Callable[[], T]], threads: int | None = None) -> Iterator[T]:
    """Results of jobs, in order. Threads run a few jobs ahead.

    Decoding and writing release the interpreter's lock. After a job fails, or the caller stops, no
    further job starts.

    Parameters
    ----------
    jobs : iterable of callable
    threads : int, optional
        Default: `default_threads`.
    """
    threads = threads or default_threads()
    waiting: deque[Future[T]] = deque()
    pool = ThreadPoolExecutor(threads, thread_name_prefix="trajstore-job")
    waits = True
    try:
        for job in jobs:
            waiting.append(submit(pool, job))
            if len(waiting) > threads:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()
    except GeneratorExit:
        # The garbage collector closes an abandoned iterator in any thread, also in one that is
        # starting. Waiting for threads can block there forever.
        waits = False
        raise
    finally:
        pool.shutdown(wait=waits, cancel_futures=True)
