from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from watched_runs import BLOCK, HIDDEN, TOKENS, begin, extend, norms, values

from trajstore import RunWriter
from trajstore.errors import FormatError, InvalidArgument
from trajstore.watching.measures import Measured, RowMeasures
from trajstore.watching.run_follower import RunFollower

ROW_BYTES = 2 * TOKENS * HIDDEN * 4


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "run.zarr"


@pytest.fixture
def read(monkeypatch: pytest.MonkeyPatch) -> list[range]:
    """Ranges of rows whose matrices are read."""
    seen: list[range] = []
    before = RowMeasures.read

    def counted(self: RowMeasures, rows: range) -> Measured:
        seen.append(rows)
        return before(self, rows)

    monkeypatch.setattr(RowMeasures, "read", counted)
    return seen


def test_a_run_is_followed_from_before_it_is_there_to_its_end(
    path: Path, read: list[range]
) -> None:
    follower = RunFollower(path)
    assert follower.look().status == "absent"
    run = begin(path)
    look = follower.look()
    assert (look.status, look.rows, look.curves) == ("recording", 0, {})
    extend(run, range(BLOCK + 1))
    look = follower.look()
    assert (look.status, look.rows, look.step, look.steps) == ("recording", 4, 3, 40)
    assert look.curves["loss"].last == pytest.approx(4.7)
    assert look.lr == 0.1
    extend(run, range(BLOCK + 1, 3 * BLOCK))
    follower.look()
    follower.look()
    assert read == [range(4), range(4, 12)]
    run.close()
    look = follower.look()
    assert (look.status, look.rows, look.measured) == ("complete", 12, 12)
    assert look.remaining is None
    for name, wanted in norms(range(12)).items():
        assert np.allclose(look.curves[f"gradient {name}"].means(12), wanted)
    assert read == [range(4), range(4, 12)], "a row is read once"


def test_what_is_read_at_a_look_is_bounded_and_the_newest_rows_come_first(
    path: Path, read: list[range]
) -> None:
    with begin(path) as run:
        extend(run, range(8))
        follower = RunFollower(path, budget=3 * ROW_BYTES)
        assert follower.look().measured == 3
        extend(run, range(8, 12))
        assert follower.look().measured == 6
        for _ in range(2):
            look = follower.look()
        assert look.measured == 12
        follower.look()
    assert read == [range(5, 8), range(9, 12), range(8, 9), range(3, 5), range(3)]
    for name, wanted in norms(range(12)).items():
        assert np.allclose(look.curves[f"gradient {name}"].means(12), wanted)
    assert RunFollower(path, budget=1).look().measured == 1


def test_pace_and_remaining_time_are_those_of_the_commits(path: Path) -> None:
    with begin(path) as run:
        follower = RunFollower(path, clock=lambda: path.joinpath("zarr.json").stat().st_mtime + 2)
        extend(run, range(4))
        assert follower.look().commit_age == pytest.approx(2)
        extend(run, range(4, 8))
        look = follower.look()
        assert look.rows_per_second is not None
        assert look.remaining == pytest.approx(max(33 / look.rows_per_second - 2, 0), abs=1e-3)


def test_a_run_that_is_cut_and_recorded_anew_is_read_anew(path: Path) -> None:
    with begin(path) as run:
        extend(run, range(12))
    follower = RunFollower(path)
    follower.look()
    with RunWriter.resume(path, rows=4, commit_every=None) as run:
        extend(run, range(4, 16), seed=1)
        look = follower.look()
    assert (look.rows, look.measured) == (16, 16)
    for name, wanted in norms(range(4, 16), seed=1).items():
        assert np.allclose(look.curves[f"gradient {name}"].means(16)[4:], wanted)


def test_a_run_that_is_cut_while_it_is_read_is_opened_again(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with begin(path) as run:
        extend(run, range(8))
    before, failures = RowMeasures.read, [1, 1]

    def torn(self: RowMeasures, rows: range) -> Measured:
        if failures:
            failures.pop()
            raise FormatError("the shard is missing")
        return before(self, rows)

    monkeypatch.setattr(RowMeasures, "read", torn)
    assert RunFollower(path).look().measured == 8


def test_a_damaged_run_is_reported(path: Path) -> None:
    with begin(path) as run:
        extend(run, range(4))
    (path / "grad" / "c.0.0.0").unlink()
    with pytest.raises(FormatError, match="grad"):
        RunFollower(path).look()


def test_a_replaced_run_is_followed_from_its_start(path: Path) -> None:
    with begin(path) as run:
        extend(run, range(8))
    follower = RunFollower(path)
    follower.look()
    with begin(path, overwrite=True) as run:
        extend(run, range(4), seed=1)
        look = follower.look()
    assert look.measured == 4
    assert np.allclose(look.curves["gradient dead"].means(4), norms(range(4), seed=1)["dead"])
    shutil.rmtree(path)
    assert follower.look().status == "absent"


def test_a_recorder_that_died_is_noticed_and_one_that_ends_is_not_taken_for_it(path: Path) -> None:
    code = """
import os, sys
from pathlib import Path
from watched_runs import begin, extend
run = begin(Path(sys.argv[1]))
extend(run, range(4))
os._exit(0)
"""
    folder = Path(__file__).parents[3]
    subprocess.run([sys.executable, "-c", code, path], cwd=folder, check=True, timeout=120)
    look = RunFollower(path).look()
    assert (look.status, look.rows, look.remaining) == ("abandoned", 4, None)
    with RunWriter.resume(path) as run:
        assert RunFollower(path).look().status == "recording"
        run.close("interrupted")
    assert RunFollower(path).look().status == "interrupted"


def test_a_run_at_an_address() -> None:
    pytest.importorskip("obstore")
    address = "memory://watched/run.zarr"
    follower = RunFollower(address)
    assert follower.look().status == "absent"
    with begin(address) as run:
        extend(run, range(4))
        look = follower.look()
        assert (look.status, look.rows) == ("recording", 4)
        assert look.bytes_on_disk > 0
        run.append(4, **values(4))
    look = follower.look()
    assert (look.status, look.rows) == ("complete", 5)
    assert np.allclose(look.curves["gradient dead"].means(5), norms(range(5))["dead"])


def test_a_path_that_is_no_run_is_reported(tmp_path: Path) -> None:
    with pytest.raises(InvalidArgument, match="an unknown kind of address"):
        RunFollower("file:///b/r")
    (tmp_path / "zarr.json").write_text("{}")
    with pytest.raises(FormatError):
        RunFollower(tmp_path).look()
    (tmp_path / "file").write_text("")
    assert RunFollower(tmp_path / "file").look().status == "absent"
