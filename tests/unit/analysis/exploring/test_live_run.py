from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from growing_runs import begin, extend

from trajstore.analysis.exploring.page import LiveRun
from trajstore.errors import InvalidArgument, RunNotFound


def test_new_rows_come_while_the_run_is_recorded(tmp_path: Path) -> None:
    path = tmp_path / "run.zarr"
    with begin(path) as run:
        extend(run, range(8))
        live = LiveRun(path)
        first = live.state
        assert (first.standing, first.history.rows) == ("recording", 8)
        live.look()
        assert live.state is first  # nothing is new
        extend(run, range(8, 12))
        live.look()
        assert live.state.history.rows == 12
        assert live.state.ds.sizes["step"] == 12
    live.look()
    assert (live.state.standing, live.state.history.rows) == ("complete", 12)
    # Another run in its place, with fewer rows.
    shutil.rmtree(path)
    with begin(path) as run:
        extend(run, range(4), seed=1)
    live.look()
    assert live.state.history.rows == 4
    assert float(live.state.history.data["loss"]["loss"][0]) == 6


def test_what_cannot_be_read_is_reported_and_what_was_seen_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "run.zarr"
    with pytest.raises(RunNotFound, match="no run at"):
        LiveRun(path)
    with pytest.raises(InvalidArgument, match="unknown kind"):
        LiveRun("file:///run.zarr")
    with begin(path) as run:
        extend(run, range(8))
    live = LiveRun(path)
    shutil.rmtree(path)
    waits = iter([False, False, True])
    monkeypatch.setattr(live._stop, "wait", lambda seconds: next(waits))
    live._follow()
    assert "no run at" in live.state.trouble
    assert live.state.history.rows == 8
