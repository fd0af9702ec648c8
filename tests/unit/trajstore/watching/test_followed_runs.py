from __future__ import annotations

import json
from pathlib import Path

import pytest
from watched_runs import begin, extend

from trajstore.errors import FormatError, RunNotFound
from trajstore.watching.followed_runs import SWEEP, FollowedRuns


def test_runs_of_a_sweep_are_waited_for(tmp_path: Path) -> None:
    followed = FollowedRuns([str(tmp_path)])
    (tmp_path / SWEEP).write_text(json.dumps({"threads": 1, "runs": ["a.zarr", "b.zarr"]}))
    first, second, other = (str(tmp_path / name) for name in ("a.zarr", "b.zarr", "c.zarr"))
    assert {run: look.status for run, look in followed.look().items()} == {
        first: "absent", second: "absent",
    }  # fmt: skip
    with begin(second) as run:
        extend(run, range(4))
        assert followed.look()[second].step == 3
    with begin(other):
        looks = followed.look()
    assert [look.status for look in looks.values()] == ["absent", "complete", "recording"]
    assert list(looks) == [first, second, other], "also one that is there besides"


def test_patterns_and_runs_that_are_not_there_yet(tmp_path: Path) -> None:
    with begin(tmp_path / "a.zarr"):
        followed = FollowedRuns([str(tmp_path / "*.zarr"), str(tmp_path / "later.zarr")])
        assert [look.status for look in followed.look().values()] == ["recording", "absent"]
    with pytest.raises(RunNotFound, match="no run at"):
        FollowedRuns([str(tmp_path / "x*.zarr")]).look()


@pytest.mark.parametrize("text", ["[", "[]", '{"runs": [1]}'])
def test_a_file_that_no_sweep_wrote_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / SWEEP).write_text(text)
    with pytest.raises(FormatError, match=SWEEP):
        FollowedRuns([str(tmp_path)]).look()
