"""Threads: their number, jobs for them, and compiled loops that do not block each other.

numba compiles a loop, if it is installed and there are enough numbers to process. NumPy reads the
numbers once per operation, and takes the interpreter's lock after each; threads then wait for one
another. A compiled loop reads them once, without the lock. numba is the extra `fast`. Without it
the results are the same, only later. A process loads numba in about half a second. It compiles a
short loop in the same time, a long one in seconds, once per machine. Small runs therefore use
neither.

Loops take their arrays as 1-D memory, since numba knows only then that values are contiguous.
"""

from __future__ import annotations

import os
import warnings
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from threading import Lock
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt
from numpy.lib.stride_tricks import as_strided

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


_TASKS_OF_A_THREAD = 8  # for fewer tasks, another thread does not pay


@cache
def readers() -> ThreadPoolExecutor:
    """Permanent threads that decode. They keep their scratch memory."""
    return ThreadPoolExecutor(default_threads(), "trajstore-reader")


os.register_at_fork(after_in_child=readers.cache_clear)  # threads do not exist in a child


def share(tasks: Iterable[Callable[[], object]], threads: int) -> None:
    """Run tasks here and in idle `readers`; whoever is free takes the next one.

    After a task fails, no further one starts, and those that run are waited for.

    Parameters
    ----------
    tasks : iterable of callable
    threads : int
        Most threads, with this one.
    """
    left = deque(tasks)
    count = min(threads - 1, len(left) // _TASKS_OF_A_THREAD)
    called = [submit(readers(), _run_all, left) for _ in range(count)]
    try:
        _run_all(left)
    finally:
        begun = [helper for helper in called if not helper.cancel()]
        wait(begun)
    for helper in begun:
        helper.result()


def _run_all(left: deque[Callable[[], object]]) -> None:
    try:
        while left:
            try:
                task = left.popleft()
            except IndexError:  # another thread took the last one
                return
            task()
    finally:
        left.clear()  # after an error, all threads stop


Array = npt.NDArray[Any]
Types = tuple[tuple[np.dtype[Any], bool], ...]
"""Dtype and writeability of each array. numba compiles a loop again for each combination."""

_ENOUGH = 1 << 26
"""Numbers that NumPy processes first, in less time than loading numba takes. A scan of ten times as
many then takes about as long as without numba. Each further scan takes three fifths of that."""


class CompiledLoop:
    """A loop that is compiled once enough numbers were processed.

    Parameters
    ----------
    module : str
        Module of the loop.
    name : str
        Name of a function that `numba.njit` can compile, and that raises nothing.
    enough : int, optional
        Numbers that NumPy processes first; default: `_ENOUGH` when the loop is called.
    """

    def __init__(self, module: str, name: str, enough: int | None = None) -> None:
        self._module, self._name, self._enough = module, name, enough
        self._processed = 0
        self._compiled: Callable[..., None] | None = None
        self._ready: set[Types] = set()
        self._unavailable = False
        self._preparing = Lock()

    def is_worth(self, count: int) -> bool:
        """True if `run` is worth a try.

        Parameters
        ----------
        count : int
            Numbers to process now.
        """
        self._processed += count  # races between threads may lose counts: a rough sum is enough
        enough = _ENOUGH if self._enough is None else self._enough
        return self._processed >= enough and not self._unavailable

    def run(self, *arguments: Any) -> bool:
        """Run the loop.

        The first thread with arrays of these types compiles the loop, or loads it from numba's
        cache. Meanwhile the loop is unavailable to other threads. It is also unavailable to a child
        process that is forked in this time, in which it would never become ready.

        Returns
        -------
        bool
            True if the loop was run. If False, nothing was done.
        """
        arrays = [item for item in arguments if isinstance(item, np.ndarray)]
        types = tuple((array.dtype, array.flags.writeable) for array in arrays)
        if types in self._ready and self._compiled is not None:
            self._compiled(*arguments)
            return True
        if not self._preparing.acquire(blocking=False):
            return False
        try:
            if self._compiled is None:
                self._compiled = self._load()
            if self._compiled is None:
                self._unavailable = True
                return False
            self._compiled(*arguments)
            self._ready.add(types)
            return True
        except Exception as error:  # raised by numba: the loop itself raises nothing
            self._unavailable = True
            warnings.warn(
                f"numba failed, so reading takes longer ({error!r}). If its cache is damaged, "
                f"delete it: *.nbi and *.nbc next to the module {self._module}, or in "
                "NUMBA_CACHE_DIR. NUMBA_DISABLE_JIT=1 switches numba off.",
                RuntimeWarning,
                stacklevel=2,
            )
            return False
        finally:
            self._preparing.release()

    def _load(self) -> Callable[..., None] | None:
        """The function, which numba compiles at its first call; None without numba.

        A division by 0 gives the same result as in NumPy, and raises nothing.
        """
        if find_spec("numba") is None:
            return None
        numba = import_module("numba")
        if numba.config.DISABLE_JIT:
            return None
        function = getattr(import_module(self._module), self._name)
        try:
            compiled: Callable[..., None] = numba.njit(cache=True, nogil=True, error_model="numpy")(
                function
            )
        except RuntimeError:  # no folder for the cache: each process compiles the loop
            compiled = numba.njit(nogil=True, error_model="numpy")(function)
        return compiled


def memory_of(array: Array) -> Array:
    """Memory from the first to the last value of an array, 1-D, with everything between.

    Parameters
    ----------
    array : ndarray
        Not empty. `values_side_by_side` must return a width above 0 for it.
    """
    if array.flags.c_contiguous:
        return array.reshape(-1)
    axes = zip(array.shape, array.strides, strict=True)
    reach = sum((length - 1) * stride for length, stride in axes)
    return as_strided(array, (reach // array.itemsize + 1,), (array.itemsize,))


def values_side_by_side(*arrays: Array) -> tuple[int, int]:
    """Axis and width of the longest rows that are contiguous in every array, all of one shape.

    Parameters
    ----------
    *arrays : ndarray, (step, …)

    Returns
    -------
    axis : int
        The last axis that counts rows.
    width : int
        Values of a row; 0 if the arrays are empty, or a loop cannot process their memory.
    """
    shape = arrays[0].shape
    axis, width = len(shape) - 1, 1
    if min(shape) == 0 or not all(map(_is_plain, arrays)):
        return axis, 0
    while axis > 0 and (
        shape[axis] == 1 or all(array.strides[axis] == width * array.itemsize for array in arrays)
    ):
        width *= shape[axis]
        axis -= 1
    return axis, width


def rows_in_one_piece(*arrays: Array) -> bool:
    """True if each step of each array is contiguous. All arrays have one shape."""
    axis, width = values_side_by_side(*arrays)
    return axis == 0 and width > 0


def _is_plain(array: Array) -> bool:
    """True if the values are aligned, in native byte order, with strides of whole values.

    numba does not distinguish byte orders.
    """
    whole = all(stride >= 0 and stride % array.itemsize == 0 for stride in array.strides)
    return whole and array.dtype.isnative and array.flags.aligned
