"""Threads: their number, jobs for them, compiled loops, and memory side by side."""

from __future__ import annotations

import importlib
import os
import sys
import threading
import weakref
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import nullcontext
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from trajstore.threads import (
    CompiledLoop,
    default_threads,
    in_parallel,
    readers,
    rows_in_one_piece,
    share,
    submit,
    values_side_by_side,
)


def test_at_most_eight_threads_and_no_more_than_processors_that_the_process_may_use(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As under `taskset`, and in containers that are given some processors of many."""
    allowed = {3}
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: allowed, raising=False)
    assert (default_threads(), len({*in_parallel([threading.get_ident] * 50)})) == (1, 1)
    allowed |= set(range(200))
    assert default_threads() == 8
    monkeypatch.delattr(os, "sched_getaffinity")  # as on other systems
    counts = iter([200, 3, None])
    monkeypatch.setattr(os, "cpu_count", lambda: next(counts))
    assert [default_threads() for _ in range(3)] == [8, 3, 1]


def test_results_come_in_the_order_of_the_jobs() -> None:
    gate = threading.Event()
    assert list(in_parallel([partial(gate.wait, 10), gate.set], threads=2)) == [True, None]


def test_after_a_failure_no_job_is_begun() -> None:
    begun = []

    def job(number: int) -> int:
        begun.append(number)
        return 1 // (number - 3)

    with pytest.raises(ZeroDivisionError):
        list(in_parallel((partial(job, number) for number in range(100)), threads=1))
    assert 3 in begun
    assert max(begun) < 8


def test_closing_the_results_waits_for_no_job() -> None:
    started, gate = threading.Event(), threading.Event()
    opened = []

    def wait() -> None:
        started.set()
        opened.append(gate.wait(10))

    results = in_parallel([int, wait, wait], threads=1)
    assert next(results) == 0
    assert started.wait(10)
    results.close()
    assert not opened
    gate.set()


def test_a_pool_that_takes_no_more_has_it_done_by_the_caller() -> None:
    pool = ThreadPoolExecutor(1)
    pool.shutdown()
    assert submit(pool, threading.get_ident).result() == threading.get_ident()
    failed = submit(pool, lambda: 1 // 0)
    assert isinstance(failed.exception(), ZeroDivisionError)


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded")
def test_idle_readers_take_tasks_and_none_after_a_failure() -> None:
    """Files of the tasks can be closed."""
    begun: set[int] = set()
    ended: list[int] = []
    together = threading.Barrier(2)

    def task(most: int) -> None:
        if threading.get_ident() not in begun:
            begun.add(threading.get_ident())
            together.wait(10)
        ended.append(1)
        if len(ended) > most:
            raise ValueError("broken")

    share([partial(task, 50)] * 50, threads=2)
    assert (len(begun), len(ended)) == (2, 50)
    child = os.fork()  # which has threads of its own
    if child == 0:
        undone = 1
        try:
            undone = len(wait([readers().submit(int)], 10).not_done)
        finally:
            os._exit(undone)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    begun.clear()
    ended.clear()
    with pytest.raises(ValueError, match="broken"):
        share([partial(task, 4)] * 50, threads=2)
    count = len(ended)
    assert count < 10
    share([int], threads=2)
    assert len(ended) == count


def test_busy_readers_are_not_waited_for_and_hold_nothing() -> None:
    done = threading.Event()
    for _ in range(default_threads()):
        readers().submit(done.wait, 10)
    values = np.zeros(3)
    share([partial(np.add, values, 1, out=values) for _ in range(50)], threads=2)
    held = weakref.ref(values)
    assert values.tolist() == [50] * 3
    del values
    assert held() is None
    assert not done.is_set()
    done.set()


SOURCE = """
def double(values, out):
    for at in range(values.size):
        out[at] = 2 * values[at]
"""


@pytest.fixture
def loop(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> CompiledLoop:
    """The loop of a module in `tmp_path`, compiled after 1,000 numbers."""
    (tmp_path / "doubling.py").write_text(SOURCE)
    monkeypatch.syspath_prepend(tmp_path)
    importlib.invalidate_caches()
    sys.modules.pop("doubling", None)
    return CompiledLoop("doubling", "double", enough=1_000)


def doubled(loop: CompiledLoop, dtype: str = "f8") -> bool:
    """Whether it doubled numbers; if it did, they are right."""
    values, out = np.arange(5, dtype=dtype), np.full(5, -1, dtype)
    done = loop.run(values, out)
    np.testing.assert_array_equal(out, 2 * values if done else [-1] * 5)
    return done


def test_a_loop_is_compiled_after_enough_elements(loop: CompiledLoop) -> None:
    assert not loop.is_worth(999)
    assert loop.is_worth(1)
    assert "doubling" not in sys.modules
    assert doubled(loop)
    assert "doubling" in sys.modules
    assert doubled(loop)
    assert doubled(loop, "i4")


def test_other_threads_use_numpy_during_compilation(
    loop: CompiledLoop, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert doubled(loop)
    preparing, prepared = threading.Event(), threading.Event()
    real = loop._compiled

    def compiled(values: np.ndarray, out: np.ndarray) -> None:
        if values.dtype == "f4":
            preparing.set()
            assert prepared.wait(10)
        real(values, out)

    monkeypatch.setattr(loop, "_compiled", compiled)
    thread = threading.Thread(target=doubled, args=(loop, "f4"))
    thread.start()
    assert preparing.wait(10)
    assert not doubled(loop, "f4")
    assert not doubled(loop, "i4")
    assert doubled(loop, "f8")  # is ready
    # A child would wait for a thread that it has not.
    child = os.fork()
    if child == 0:
        os._exit(0 if not doubled(loop, "f4") else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    prepared.set()
    thread.join()
    assert doubled(loop, "f4")


def test_a_loop_is_compiled_after_an_interruption(loop: CompiledLoop, tmp_path: Path) -> None:
    (tmp_path / "doubling.py").write_text("raise KeyboardInterrupt")
    with pytest.raises(KeyboardInterrupt):
        doubled(loop)
    (tmp_path / "doubling.py").write_text(SOURCE)
    assert doubled(loop)


def never(loop: CompiledLoop, message: str | None) -> None:
    """It is not run. A warning says why, if there is a reason; it is not tried again."""
    with pytest.warns(RuntimeWarning, match=message) if message else nullcontext():
        assert not doubled(loop)
    assert not loop.is_worth(1_000)


TOO_OLD = 'raise ImportError("Numba needs NumPy 2.3 or less")'
SWITCHED_OFF = "class config:\n    DISABLE_JIT = True"


@pytest.mark.parametrize("source", [None, TOO_OLD, SWITCHED_OFF])
def test_without_numba_no_python_loop_runs(
    loop: CompiledLoop, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, source: str | None
) -> None:
    monkeypatch.setitem(sys.modules, "numba", None)
    if source is not None:
        (tmp_path / "numba.py").write_text(source)
        monkeypatch.delitem(sys.modules, "numba")
    never(loop, r"2\.3 or less.*NUMBA_DISABLE_JIT" if source == TOO_OLD else None)


def test_a_damaged_cache_of_numba_is_reported(loop: CompiledLoop, tmp_path: Path) -> None:
    assert doubled(loop)
    kept = list((tmp_path / "__pycache__").glob("*.nbc"))
    assert kept
    for path in kept:
        path.write_bytes(path.read_bytes()[:300])
    never(CompiledLoop("doubling", "double"), r"truncated.*is damaged, delete it: \*\.nbi")


def test_a_loop_is_compiled_without_a_cache(loop: CompiledLoop, tmp_path: Path) -> None:
    """numba finds no place for that of code without a file."""
    (tmp_path / "doubling.py").write_text(f"exec({SOURCE!r})")
    assert doubled(loop)
    assert not list((tmp_path / "__pycache__").glob("*.nbi"))


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        (np.empty((3, 4, 5)), (0, 20)),
        (np.empty((3, 4, 5))[:, :, ::2], (2, 1)),
        (np.empty((4, 3, 5)).transpose(1, 0, 2), (1, 5)),
        (np.empty((3, 4, 1))[:, ::2], (1, 1)),
        (np.empty(3), (0, 1)),
        (np.empty((3, 0, 5)), (2, 0)),
        (np.broadcast_to(np.zeros(()), (3, 4)), (1, 1)),
        (np.empty((3, 4, 5))[:, ::-1], (2, 0)),
        (np.zeros((3, 4), ">f8"), (1, 0)),
        (np.zeros((3, 4), "f4,u2")["f0"], (1, 0)),
        (np.zeros(97, "u1")[1:].view("f8").reshape(3, 4), (1, 0)),
    ],
)
def test_how_far_values_lie_side_by_side(values: np.ndarray, expected: tuple[int, int]) -> None:
    assert values_side_by_side(values) == expected
    assert values_side_by_side(np.empty(values.shape, values.dtype), values) == expected
    assert rows_in_one_piece(values) == (expected[0] == 0)
