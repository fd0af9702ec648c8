"""Processes that stand in for trainings: they record runs, as slowly as they are told."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path

from trajstore.store.storage.lock import RunLock
from trajstore.trainers.sweeps.process_queue import Job, run_jobs


def job(tmp_path: Path, name: str, code: str, done: Callable[[], bool] = lambda: False) -> Job:
    run = tmp_path / f"{name}.zarr"
    return Job(
        run=run, command=[sys.executable, "-c", code], log=run.with_suffix(".log"), done=done
    )


def run(jobs: list[Job], stop: Callable[[], bool] = lambda: False, at_once: int = 2) -> None:
    most = []

    def report() -> None:
        most.append(sum(one.state == "running" for one in jobs))

    run_jobs(jobs, at_once=at_once, environment=os.environ, stop=stop, report=report)
    assert max(most) <= at_once


def test_one_that_fails_does_not_keep_the_others_from_running(tmp_path: Path) -> None:
    jobs = [
        job(tmp_path, "fails", "import sys; print('x'); sys.exit('trajstore: no such text')"),
        job(tmp_path, "dies", "import os; os.kill(os.getpid(), 9)"),
        job(tmp_path, "there", "raise SystemExit(1)", done=lambda: True),
        job(tmp_path, "mute", "raise SystemExit(3)"),
        job(tmp_path, "runs", "import os; print(os.environ['HOME'])"),
    ]
    run(jobs)
    assert [one.state for one in jobs] == ["failed", "failed", "skipped", "failed", "complete"]
    assert [one.message for one in jobs[:4]] == [
        "no such text", "ended by SIGKILL", "", "exit code 3",
    ]  # fmt: skip
    assert jobs[0].log.read_text() == "x\ntrajstore: no such text\n"
    assert not jobs[2].log.exists()


STOPPED = """
import os, signal, sys, time
def stop(number, frame):
    sys.exit(128 + number)
signal.signal(signal.SIGTERM, stop)
open(sys.argv[1], "w").close()
while True: time.sleep(60)  # works until it is stopped
"""


def test_a_stop_interrupts_running_jobs_and_starts_no_others(tmp_path: Path) -> None:
    began = [tmp_path / name for name in "ab"]
    jobs = [job(tmp_path, path.name, STOPPED) for path in began]
    for one, path in zip(jobs, began, strict=True):
        one.command = [*one.command, str(path)]
    jobs.append(job(tmp_path, "c", "raise SystemExit(1)"))
    run(jobs, stop=lambda: all(path.exists() for path in began))
    assert [one.state for one in jobs] == ["interrupted", "interrupted", "waiting"]


def test_a_run_that_somebody_writes_to_is_waited_for(tmp_path: Path) -> None:
    jobs = [job(tmp_path, "busy", ""), job(tmp_path, "free", "")]
    lock = RunLock.acquire(jobs[0].run)
    seen: list[str] = []

    def stop() -> bool:
        seen.append(jobs[0].state)
        if jobs[1].state == "complete":
            lock.release()
        return False

    run(jobs, stop, at_once=1)
    assert [one.state for one in jobs] == ["complete", "complete"]
    assert "busy" in seen
