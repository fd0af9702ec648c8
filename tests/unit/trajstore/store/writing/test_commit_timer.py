from __future__ import annotations

import math
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import xarray as xr
from still_timer import StillTimer

from trajstore.defaults import check_commit_every
from trajstore.errors import InvalidArgument
from trajstore.store.writing.commit import CommitTimer


def test_the_timer_calls_again_after_the_returned_time() -> None:
    commits = []

    def commit() -> bool:
        commits.append(timer.now)
        return True

    timer = StillTimer(10.0, commit)
    for now, expected in ((0.0, 10.0), (4.0, 6.0), (10.0, 10.0)):
        timer.now = now
        assert timer.commit_if_due() == expected
    assert commits == [10.0]
    timer.now = 14.0
    timer.committed(by_time=True)  # it took four seconds: so the next one is in twenty
    timer.now = 24.0
    assert timer.commit_if_due() == 10.0
    timer.now = 34.0
    assert timer.commit_if_due() == 10.0
    assert commits == [10.0, 34.0]
    timer.now = 36.0
    timer.committed(by_time=True)
    timer.now = 41.0
    timer.committed(by_time=False)  # a whole block puts it off
    timer.now = 46.0
    assert timer.commit_if_due() == 5.0
    assert commits == [10.0, 34.0]


def test_the_timer_commits_until_it_is_stopped() -> None:
    asked = threading.Semaphore(0)

    def commit() -> bool:
        asked.release()
        return True

    timer = CommitTimer(1e-6, commit)
    timer.start()
    assert all(asked.acquire(timeout=30) for _ in range(3))
    assert timer._thread.daemon
    timer.stop()
    assert not timer._thread.is_alive()
    timer.stop()


def test_its_thread_ends_when_there_is_no_writer_any_more() -> None:
    timer = CommitTimer(1e-6, lambda: None)
    timer.start()
    timer._thread.join(timeout=30)
    assert not timer._thread.is_alive()


def test_the_timer_can_be_stopped_by_its_own_thread() -> None:
    stopped = threading.Event()

    def commit() -> bool:
        timer.stop()
        stopped.set()
        return True

    timer = CommitTimer(1e-6, commit)
    timer.start()
    assert stopped.wait(timeout=30)
    timer.stop()


@pytest.mark.parametrize("wrong", [0, -1.0, math.nan, math.inf])
def test_a_wrong_commit_interval_is_an_error(wrong: float) -> None:
    with pytest.raises(InvalidArgument, match=r"commit_every: got .*, expected seconds above 0"):
        check_commit_every(wrong)
    check_commit_every(1e300)
    check_commit_every(None)


NOT_CLOSED = """
import numpy as np
from trajstore import RunWriter

runs = []
for every in ("1e300", "1e-3"):
    run = RunWriter.create(
        every, token=[0, 1], hidden=1, variables={"W": "float32"}, commit_every=float(every)
    )
    run.append(step=0, W=np.zeros((2, 1), "float32"))
    runs.append(run)
while not run.committed_rows:
    pass
"""


def test_runs_that_are_not_closed_keep_no_process_alive(tmp_path: Path) -> None:
    command = [sys.executable, "-c", NOT_CLOSED]
    subprocess.run(command, cwd=tmp_path, check=True, timeout=120)
    for every, rows in (("1e300", 0), ("1e-3", 1)):
        ds = xr.open_zarr(tmp_path / every)
        assert ds.sizes["step"] == rows
        assert ds.attrs["status"] == "recording"
