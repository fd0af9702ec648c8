"""Stored bits are flipped, with valid checksums: the replay names step, token and variable."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
from altered_runs import change_attributes, flip, flipped  # noqa: E402
from trainings import HIDDEN, VOCAB, scaled_run, tiny_run  # noqa: E402  # noqa: E402

from trajstore.trainers import replay  # noqa: E402

pytestmark = pytest.mark.torch

STEPS = 11


def named(finding: Any) -> tuple[str, str, int, int | None, int | None]:
    return finding.kind, finding.variable, finding.step, finding.token, finding.hidden


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run in bfloat16, in blocks of 4 rows."""
    path = tmp_path_factory.mktemp("recorded") / "run.zarr"
    return tiny_run(path, dtype=torch.bfloat16, steps=STEPS)


# Both sides of the boundary of a block, and the last row.
@pytest.mark.parametrize(
    ("variable", "row"), [("W", 7), ("exp_avg", 8), ("exp_avg_sq", STEPS), ("W", STEPS)]
)
def test_an_altered_value_is_named_where_it_lies(variable: str, row: int, recorded: Path) -> None:
    with flipped(recorded, variable, (row, 3, 1), 12):
        result = replay(recorded)
    first, *after = result.findings
    assert named(first) == ("mismatch", variable, row, 3, 1)
    assert (first.values, first.tokens) == (1, 1)
    # The next step starts from it, and the one after that from what is right again.
    assert {(f.kind, f.step, f.token, f.tokens) for f in after} <= {("mismatch", row + 1, 3, 1)}
    assert result.variables[variable].first == {"step": row, "token": 3, "hidden": 1}
    assert result.replayed == STEPS


@pytest.mark.parametrize(("variable", "row", "step"), [("W", 0, 1), ("grad", 9, 9)])
def test_an_altered_input_shows_in_its_step(
    variable: str, row: int, step: int, recorded: Path
) -> None:
    with flipped(recorded, variable, (row, 3, 1), 12):
        (finding,) = replay(recorded).findings
    assert (finding.kind, finding.step, finding.token, finding.hidden) == ("mismatch", step, 3, 1)


def test_an_altered_rate_concerns_its_step_alone(recorded: Path) -> None:
    with flipped(recorded, "lr", (5,), 50):
        (finding,) = replay(recorded).findings
    assert (finding.kind, finding.step) == ("mismatch", 5)
    assert finding.tokens > VOCAB // 2


def test_a_rate_that_no_optimizer_takes(recorded: Path) -> None:
    with flipped(recorded, "lr", (5,), 62):
        result = replay(recorded)
    (finding,) = result.findings
    assert (finding.kind, finding.variable, finding.step) == ("invalid", "lr", 5)
    (gap,) = result.unreplayed
    assert (gap.first, gap.last) == (5, 5)
    assert "its learning rate is too large" in gap.reason


@pytest.mark.parametrize("tier", ["matrix", "weights+grads"])
def test_a_seam_is_named_once(tier: str, tmp_path: Path) -> None:
    def stitch(model: Any, number: int) -> None:
        if number == 4:
            with torch.no_grad():
                model.embedding.weight.mul_(1.01)

    path = tiny_run(tmp_path / "run.zarr", between=stitch, variables=tier)
    change_attributes(path, lambda root: root.update(notes=[]))  # as if no recorder had seen it
    result = replay(path)
    (finding,) = result.findings
    assert (finding.kind, finding.variable, finding.step) == ("mismatch", "W", 6)
    assert finding.tokens == VOCAB
    assert finding.values > 0.9 * VOCAB * HIDDEN
    assert result.variables["W"].ulps > 100


def test_a_value_whose_state_is_rebuilt_is_compared_until_it_differs(tmp_path: Path) -> None:
    path = tiny_run(tmp_path / "run.zarr", variables="weights+grads")
    flip(path, "grad", (4, 3, 1), 30)
    flip(path, "W", (9, 8, 2), 25)
    result = replay(path)
    assert list(map(named, result.findings)) == [
        ("mismatch", "W", 4, 3, 1),
        ("mismatch", "W", 9, 8, 2),
    ]
    assert result.notes == (
        "2 values were not compared after their first difference, because the state rebuilt for "
        "them is wrong after it",
    )


def test_tokens_are_named_by_id(tmp_path: Path) -> None:
    path = tiny_run(tmp_path / "run.zarr", tokens=[3, 5, 16], steps=9)
    flip(path, "exp_avg", (9, 2, 1), 20)
    (finding,) = replay(path).findings
    assert named(finding) == ("mismatch", "exp_avg", 9, 16, 1)


def test_many_findings_are_counted_and_the_first_are_listed(tmp_path: Path) -> None:
    path = tiny_run(tmp_path / "run.zarr", steps=24)
    for row in range(2, 24, 2):
        flip(path, "exp_avg_sq", (row, 1, 1), 20)
    result = replay(path)
    assert result.total >= 22
    assert [finding.step for finding in result.findings] == list(range(2, 22))


def test_a_step_that_was_skipped_moves_nothing(tmp_path: Path) -> None:
    path = scaled_run(tmp_path / "run.zarr", fused=False)
    flip(path, "lr", (1,), 62)  # the scaler skips the first step, which uses no rate
    assert replay(path).findings == ()
    flip(path, "W", (1, 3, 1), 20)
    first = replay(path).findings[0]
    assert named(first) == ("skipped", "W", 1, 3, 1)
