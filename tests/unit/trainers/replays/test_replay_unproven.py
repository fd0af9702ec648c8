"""Sound runs whose steps do not all follow from the recorded values: no step is called wrong."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
from altered_runs import change_attributes  # noqa: E402
from tiny_runs import tiny_run  # noqa: E402

from trajstore import export  # noqa: E402
from trajstore.cli.integrity_commands import print_replay  # noqa: E402
from trajstore.trainers.replays.replay import replay  # noqa: E402

pytestmark = pytest.mark.torch


def reasons(path: Path) -> dict[str, tuple[int, int, int]]:
    """Number, first and last of the steps that are not proven, by reason; nothing is wrong."""
    found = replay(path)
    assert (found.clean, found.findings) == (True, ())
    assert found.replayed + sum(one.steps for one in found.unreplayed) == found.steps
    return {one.reason: (one.steps, one.first, one.last) for one in found.unreplayed}


def note_unproven(path: Path, sentence: str, *ranges: list[int]) -> None:
    note = {"note": sentence, "first_step": 0, "last_step": 0, "count": 1, "unproven": [*ranges]}
    change_attributes(path, lambda attributes: attributes.update(notes=[note]))


def set_weights_before(*steps: int) -> Any:
    def between(model: Any, number: int) -> None:
        if number + 2 in steps:
            with torch.no_grad():
                model.embedding.weight[3] = 0.5

    return between


def test_noted_steps_are_not_proven_and_later_ones_are(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tiny_run(tmp_path / "run.zarr", steps=9, between=set_weights_before(4, 7, 8))
    note_unproven(path, "the loop set W", [4, 4], [7, 8])
    assert reasons(path) == {"the loop set W": (3, 4, 8)}
    print_replay(replay(path).facts())
    shown = capsys.readouterr().out
    assert "Replayed 6 of 9 steps with torch.optim.adamw.AdamW: 0 values differ; 3 steps not" in shown
    assert "Not proven: 3 steps from 4 to 8 were not replayed: the loop set W." in shown


def test_rebuilt_state_ends_at_an_unproven_step(tmp_path: Path) -> None:
    path = tiny_run(
        tmp_path / "run.zarr", steps=9, variables="weights+grads", between=set_weights_before(4)
    )
    note_unproven(path, "the loop set W", [4, 4])
    assert [*reasons(path).values()] == [(1, 4, 4), (5, 5, 9)]


def test_the_step_after_missing_steps_is_not_proven(tmp_path: Path) -> None:
    path = tiny_run(tmp_path / "run.zarr", steps=9)
    export(path, tmp_path / "gaps.zarr", format="run", steps=[0, 1, 2, 5, 6, 8])
    assert reasons(tmp_path / "gaps.zarr") == {
        "steps 3 to 4 are missing": (1, 5, 5),
        "step 7 is missing": (1, 8, 8),
    }
