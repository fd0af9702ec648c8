"""An optimizer that rounds at random: threads, and settings that are lost."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
from altered_runs import change_attributes  # noqa: E402
from trainings import tiny_run  # noqa: E402

from trajstore.trainers import replay  # noqa: E402
from trajstore.trainers.rounded_optimizer import RoundedAdamW  # noqa: E402

pytestmark = pytest.mark.torch

STEPS = 9


def adamw(rounding: str, state: str = "float32", **settings: Any) -> Any:
    own = {"state_dtype": state, "rounding": rounding, "rounding_seed": 5}
    return partial(RoundedAdamW, lr=0.01, **own, **settings)


def test_how_many_threads_there_are_does_not_enter(tmp_path: Path) -> None:
    before = torch.get_num_threads()
    ends = []
    try:
        for number in (1, 2):
            torch.set_num_threads(number)
            W = torch.nn.Parameter(torch.ones(400, 300, dtype=torch.bfloat16))
            optimizer = adamw("stochastic", "bfloat16")([W])
            W.grad = torch.linspace(-1, 1, W.numel()).view_as(W).to(W.dtype)
            optimizer.step()
            ends.append(W.detach().view(torch.int16))
    finally:
        torch.set_num_threads(before)
    assert torch.equal(*ends)


def test_settings_that_are_lost_or_changed_are_reported(tmp_path: Path) -> None:
    recorded = tiny_run(
        tmp_path / "run.zarr", adamw("stochastic"), dtype=torch.bfloat16, steps=STEPS
    )

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
        (lambda root: settings(root).pop("state_dtype"),
         "does not record the optimizer's state_dtype"),
        (lambda root: settings(root).update(state_dtype="int8"),
         "state_dtype is 'int8', expected one of"),
        (lambda root: settings(root).update(state_dtype="bfloat16"),
         "exp_avg is float32, but the recorded optimizer keeps it in bfloat16"),
    ):  # fmt: skip
        result = changed(change)
        assert result.replayed == 0
        assert any(reason in gap.reason for gap in result.unreplayed), result.unreplayed
