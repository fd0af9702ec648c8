"""Stored bits are flipped, with valid checksums: the replay names step, token and variable."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from altered_runs import change_attributes, flip, flipped
from trainings import VOCAB, scaled_run, tiny_run

from trajstore.trainers import replay
from trajstore.trainers.rounded_optimizer import RoundedAdamW

STEPS = 11


def named(finding: Any) -> tuple[str, str, int, int | None, int | None]:
    return finding.kind, finding.variable, finding.step, finding.token, finding.hidden


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run in bfloat16, in blocks of 4 rows."""
    path = tmp_path_factory.mktemp("recorded") / "run.zarr"
    return tiny_run(path, dtype=torch.bfloat16, count=STEPS)


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


@pytest.mark.parametrize("dtype", [torch.float16, torch.float64])
def test_an_altered_value_of_other_types(dtype: Any, tmp_path: Path) -> None:
    path = tiny_run(tmp_path / "run.zarr", lambda p: torch.optim.SGD(p, lr=0.1), dtype=dtype)
    flip(path, "W", (7, 3, 1), 9)
    assert named(replay(path).findings[0])[1:4] == ("W", 7, 3)


@pytest.mark.parametrize(
    ("variable", "where", "step"), [("W", (0, 3, 1), 1), ("grad", (9, 3, 1), 9), ("lr", (5,), 5)]
)
def test_an_altered_input_shows_in_its_step_alone(
    variable: str, where: tuple[int, ...], step: int, recorded: Path
) -> None:
    with flipped(recorded, variable, where, 50 if variable == "lr" else 12):
        (finding,) = replay(recorded).findings
    assert (finding.kind, finding.step) == ("mismatch", step)
    if variable == "lr":
        assert finding.values > finding.tokens > VOCAB // 2
    else:
        assert (finding.token, finding.hidden) == (3, 1)


def test_a_rate_that_no_optimizer_takes(recorded: Path) -> None:
    with flipped(recorded, "lr", (5,), 62):
        result = replay(recorded)
    (finding,) = result.findings
    assert (finding.kind, finding.variable, finding.step) == ("invalid", "lr", 5)
    (gap,) = result.unreplayed
    assert (gap.first, gap.last) == (5, 5)
    assert "its learning rate is too large" in gap.reason


def test_weights_changed_between_two_steps_are_named_once(tmp_path: Path) -> None:
    def change(model: Any, number: int) -> None:
        if number == 4:
            with torch.no_grad():
                model.embedding.weight.mul_(1.01)

    path = tiny_run(tmp_path / "run.zarr", between=change, variables="weights+grads")
    change_attributes(path, lambda root: root.update(notes=[]))  # as if no recorder had seen it
    (finding,) = replay(path).findings
    assert (finding.kind, finding.variable, finding.step) == ("mismatch", "W", 6)
    assert finding.tokens == VOCAB


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
    path = tiny_run(tmp_path / "run.zarr", tokens=[3, 5, 16], count=9)
    flip(path, "exp_avg", (9, 2, 1), 20)
    (finding,) = replay(path).findings
    assert named(finding) == ("mismatch", "exp_avg", 9, 16, 1)


def test_many_findings_are_counted_and_the_first_are_listed(tmp_path: Path) -> None:
    path = tiny_run(tmp_path / "run.zarr", count=24)
    for row in range(2, 24, 2):
        flip(path, "exp_avg_sq", (row, 1, 1), 20)
    result = replay(path)
    assert result.total >= 22
    assert [finding.step for finding in result.findings] == list(range(2, 22))


def test_a_step_that_was_skipped_moves_nothing_and_the_flag_is_0_or_1(tmp_path: Path) -> None:
    path = scaled_run(tmp_path / "run.zarr", fused=False)
    flip(path, "lr", (1,), 62)  # the scaler skips the first step, which uses no rate
    assert replay(path).findings == ()
    flip(path, "W", (1, 3, 1), 20)
    assert named(replay(path).findings[0]) == ("skipped", "W", 1, 3, 1)
    flip(path, "skipped", (10,), 3)  # neither 0 nor 1
    assert ("invalid", "skipped", 10, None, None) in map(named, replay(path).findings)


# What the values of one row say of each other ---------------------------------------------------

SUMMARIES = ("grad_token_norm", "W_step_norm", "W_ulp_l1")


@pytest.fixture(scope="module")
def summarized(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("summarized") / "run.zarr"
    return tiny_run(path, dtype=torch.bfloat16, count=9, variables=("matrix", "cells", *SUMMARIES))


@pytest.mark.parametrize("name", [*SUMMARIES, "cells"])
def test_derived_arrays_are_compared_with_their_source(name: str, summarized: Path) -> None:
    where = (3, 1, 2) if name == "cells" else (3, 1)
    with flipped(summarized, name, where, 4):
        found = replay(summarized)
    (finding,) = found.findings
    assert (finding.kind, finding.variable, finding.step) == ("inconsistent", name, 3)
    assert (finding.token, finding.hidden) == (1, 2 if name == "cells" else None)
    assert found.variables[name].differing == 1


def test_an_altered_array_accounts_for_what_is_made_of_it(summarized: Path) -> None:
    with flipped(summarized, "W", (3, 1, 2), 12):
        found = replay(summarized)
    assert [finding.kind for finding in found.findings] == ["mismatch", "mismatch"]


@pytest.mark.parametrize("name", ["clip_coef", "grad_norm"])
def test_clipping_is_held_against_the_norm(name: str, summarized: Path) -> None:
    with flipped(summarized, name, (4,), 5):
        found = replay(summarized).findings
    first = found[0]
    assert (first.kind, first.variable, first.step) == ("inconsistent", "clip_coef, grad_norm", 4)
    assert {finding.step for finding in found} == {4}


def test_row_0_must_be_the_state_before_training(tmp_path: Path) -> None:
    path = tiny_run(tmp_path / "run.zarr", count=3)
    flip(path, "exp_avg", (0, 6, 1), 0)
    flip(path, "grad", (0, 8, 2), 3)
    assert {(f.kind, f.variable, f.step, f.token) for f in replay(path).findings} == {
        ("start", "exp_avg", 0, 6),
        ("start", "grad", 0, 8),
    }


def test_settings_that_are_lost_or_changed_are_reported(tmp_path: Path) -> None:
    own = {"state_dtype": "float32", "rounding": "stochastic", "rounding_seed": 5}
    optimizer = partial(RoundedAdamW, lr=0.01, **own)
    recorded = tiny_run(tmp_path / "run.zarr", optimizer, dtype=torch.bfloat16, count=3)

    def settings(root: dict[str, Any]) -> dict[str, Any]:
        return root["optimizer"]["hyperparameters"]

    def changed(change: Callable[[dict[str, Any]], Any]) -> Any:
        path = shutil.copytree(recorded, tmp_path / "copy.zarr", dirs_exist_ok=True)
        change_attributes(path, change)
        return replay(path)

    assert changed(lambda root: settings(root).update(rounding_seed=6)).findings
    for change, reason in (
        (lambda root: root["recording"].pop("vocabulary"),
         "number of tokens of the parameter is not recorded"),
        (lambda root: settings(root).update(state_dtype="bfloat16"),
         "exp_avg is float32, but the recorded optimizer keeps it in bfloat16"),
    ):  # fmt: skip
        result = changed(change)
        assert result.replayed == 0
        assert any(reason in gap.reason for gap in result.unreplayed), result.unreplayed
