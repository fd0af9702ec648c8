from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from trajstore.threads import default_threads, in_parallel, submit


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="Linux alone has it")
def test_as_many_threads_as_processors_that_the_process_may_use() -> None:
    """As under `taskset`, and in containers that are given some processors of many."""
    code = """
import os
from trajstore.threads import default_threads, in_parallel
os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
import threading
started = set()
for _ in in_parallel(lambda: started.add(threading.get_ident()) for _ in range(50)):
    pass
print(default_threads(), len(started))
"""
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout.split() == ["1", "1"]


def test_at_most_eight_threads_by_default(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(200)), raising=False)
    assert default_threads() == 8
    monkeypatch.delattr(os, "sched_getaffinity")
    monkeypatch.setattr(os, "cpu_count", lambda: None)
    assert default_threads() == 1


def test_results_come_in_the_order_of_the_jobs() -> None:
    gate = threading.Event()

    def first() -> int:
        gate.wait(10)
        return 0

    def second() -> int:
        gate.set()
        return 1

    assert list(in_parallel([first, second], threads=2)) == [0, 1]


def test_after_a_failure_no_job_is_begun() -> None:
    begun = []

    def jobs() -> Iterator[Callable[[], int]]:
        for number in range(100):

            def job(number: int = number) -> int:
                begun.append(number)
                return 1 // (number - 3)

            yield job

    with pytest.raises(ZeroDivisionError):
        list(in_parallel(jobs(), threads=1))
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
