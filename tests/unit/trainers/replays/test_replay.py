"""What a replay reads and says, and which steps it leaves out, with the reason."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")
from altered_runs import change_attributes, flip  # noqa: E402
from trainings import TinyModel, batches, scaled_run, tiny_run  # noqa: E402  # noqa: E402

from trajstore import RunWriter, open_run  # noqa: E402
from trajstore.cli.run_commands import print_replay  # noqa: E402
from trajstore.store.reading.tiled_reader import open_tiled  # noqa: E402
from trajstore.trainers import attach, replay  # noqa: E402
from trajstore.trainers.replays.recorded_rows import RecordedRows  # noqa: E402

pytestmark = pytest.mark.torch

STEPS = 9
SUMMARIES = ("grad_token_norm", "W_step_norm", "W_ulp_l1")


@pytest.mark.parametrize("dtype", [torch.float16, torch.float64])
def test_an_altered_value_of_other_types(dtype: Any, tmp_path: Path) -> None:
    path = tiny_run(tmp_path / "run.zarr", lambda p: torch.optim.SGD(p, lr=0.1), dtype=dtype)
    flip(path, "W", (7, 3, 1), 9)
    finding = replay(path).findings[0]
    assert (finding.variable, finding.step, finding.token) == ("W", 7, 3)


def test_large_blocks_are_read_in_parts(tmp_path: Path) -> None:
    rows = RecordedRows(open_tiled(tiny_run(tmp_path / "run.zarr", steps=20, block_rows=16)))
    whole, parts = (list(rows.read(["W"], window=window)) for window in (1 << 20, 5 * 17 * 8 * 4))
    assert [row.step for row in parts] == [row.step for row in whole] == [*range(21)]
    for one, other in zip(parts, whole, strict=True):
        assert np.array_equal(one.bits["W"], other.bits["W"])


def test_progress_counts_rows(tmp_path: Path) -> None:
    path = tiny_run(tmp_path / "run.zarr", steps=3)
    seen: list[tuple[int, int]] = []
    replay(path, on_progress=lambda done, rows: seen.append((done, rows)))
    assert seen == [(1, 4), (2, 4), (3, 4), (4, 4)]


# What cannot be replayed is said ---------------------------------------------------------------


def left_out(path: Path) -> dict[str, tuple[int, int, int]]:
    """Number, first and last of the steps that were left out for each reason."""
    result = replay(path)
    assert result.clean
    assert result.replayed + sum(part.steps for part in result.unreplayed) == result.steps
    return {part.reason: (part.steps, part.first, part.last) for part in result.unreplayed}


def test_only_pairs_of_consecutive_steps(tmp_path: Path) -> None:
    path = tiny_run(tmp_path / "run.zarr", steps=7, every=2)
    ((reason, steps),) = left_out(path).items()
    assert "every > 1" in reason
    assert steps == (3, 2, 6)
    assert replay(path).variables["exp_avg"].steps == 1  # 6 to 7


def test_a_gap_ends_the_replay(tmp_path: Path) -> None:
    path = tiny_run(tmp_path / "run.zarr", steps=7, every=2, variables="weights+grads")
    reasons = left_out(path)
    assert list(reasons.values()) == [(3, 2, 6), (1, 7, 7)]
    assert "exp_avg, exp_avg_sq is not recorded" in list(reasons)[1]


def test_skipped_steps_between_rows_are_not_guessed(tmp_path: Path) -> None:
    held = ("W", "grad", "exp_avg", "exp_avg_sq", "lr", "clip_coef", "skipped")  # no step_count
    path = scaled_run(tmp_path / "run.zarr", fused=False, steps=13, every=2, variables=held)
    reasons = list(left_out(path))
    assert any("the number of skipped steps before it" in reason for reason in reasons)


def clipped_by_value(model: Any) -> None:
    torch.nn.utils.clip_grad_value_(model.parameters(), 1e-3)


@pytest.mark.parametrize("clip", [0.3, 0.0], ids=["norm", "value"])
def test_clipping_that_was_not_named_is_replayed(clip: float, tmp_path: Path) -> None:
    change = {} if clip else {"change": clipped_by_value}
    path = tiny_run(tmp_path / "run.zarr", max_grad_norm=0.0, clip=clip, **change)
    assert np.isnan(open_run(path).clip_coef.values[1:]).all() == (clip == 0)
    assert not left_out(path)
    assert replay(path).variables["W"].steps == STEPS


def test_an_unknown_factor_of_a_gradient_before_clipping(tmp_path: Path) -> None:
    path = tiny_run(tmp_path / "run.zarr", max_grad_norm=0.0, clip=0.0, change=clipped_by_value)
    flip(path, "grad", (3, 1, 1), 20)
    ((reason, steps),) = left_out(path).items()
    assert "clip_coef is NaN" in reason
    assert steps == (1, 3, 3)


def test_runs_without_gradients(tmp_path: Path) -> None:
    path = tiny_run(tmp_path / "run.zarr", variables=("weights", *SUMMARIES), steps=3)
    ((reason, _),) = left_out(path).items()
    assert "gradient was not recorded; record weights+grads or matrix" in reason
    compared = {name: one.steps for name, one in replay(path).variables.items()}
    assert compared == {"W_step_norm": 3, "W_ulp_l1": 3}
    for missing in ("lr", "clip_coef"):
        names = [name for name in ("W", "grad", "loss", "lr", "clip_coef") if name != missing]
        path = tiny_run(tmp_path / f"{missing}.zarr", variables=names, steps=3)
        ((reason, _),) = left_out(path).items()
        assert "every tier has it" in reason


def test_runs_that_begin_late(tmp_path: Path) -> None:
    """Their first row holds the moments that the optimizer had by then."""
    model = TinyModel()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    for number, batch in enumerate(batches(12)):
        if number == 5:
            recorder = attach(model, optimizer, tmp_path / "late.zarr", first_step=5)
        optimizer.zero_grad()
        model(**batch)["loss"].backward()
        optimizer.step()
    recorder.close()
    assert left_out(tmp_path / "late.zarr") == {}


DEFAULTS = {"lr": 0.01, "betas": [0.9, 0.999], "eps": 1e-8, "weight_decay": 0.01}


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"class": "os.system"}, "the optimizer os.system cannot be replayed; supported"),
        ({"class": None}, "does not record its optimizer"),
        ({"hyperparameters": {}}, "does not record the optimizer's betas, eps, lr, weight_decay"),
        ({"hyperparameters": DEFAULTS | {"lr": "fast"}}, "refuses the recorded hyperparameters"),
    ],
)
def test_optimizers_that_are_not_known(change: Any, reason: str, tmp_path: Path) -> None:
    path = tiny_run(tmp_path / "run.zarr", steps=3)
    change_attributes(path, lambda root: root["optimizer"].update(change))
    ((said, _),) = left_out(path).items()
    assert reason in said


def test_a_run_without_settings_is_not_replayed(tmp_path: Path) -> None:
    path = tmp_path / "run.zarr"
    with RunWriter.create(
        path, token=[1, 2], hidden=3, variables={"W": "float32", "grad": "bfloat16"}
    ) as run:
        for step in range(3):
            zero = np.zeros((2, 3), "f4")
            run.append(step=step, W=zero, grad=zero if step else zero * np.nan)
    result = replay(path)
    assert result.replayed == 0
    assert result.unreplayed[0].steps == 2
    assert not result.exact


def test_a_run_without_rows(tmp_path: Path) -> None:
    path = tmp_path / "run.zarr"
    RunWriter.create(path, token=[1, 2], hidden=3, variables={"W": "float32"}).close("complete")
    result = replay(path)
    assert result.steps == result.replayed == 0
    assert result.clean


def test_what_the_console_shows(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    print_replay(replay(tiny_run(tmp_path / "run.zarr", steps=7)).facts())
    shown = capsys.readouterr().out
    assert "Replayed 7 of 7 steps with torch.optim.adamw.AdamW: 0 values differ." in shown
    assert "Wrong" not in shown
    path = tiny_run(tmp_path / "some.zarr", variables="weights+grads", steps=7, every=2)
    flip(path, "grad", (0, 3, 1), 0)
    print_replay(replay(path).facts())
    shown = capsys.readouterr().out
    assert (
        "Problem: step 0, token 3, hidden 1: grad differs from the state before training." in shown
    )
    assert "Not proven: 3 steps from 2 to 6 were not replayed: the row of the step before" in shown
