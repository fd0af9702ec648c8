"""Runs whose optimizer has a state of its own type, or rounds at random, replay to the last bit."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
from altered_runs import change_attributes  # noqa: E402
from tiny_runs import tiny_run  # noqa: E402

from trajstore import open_run, verify  # noqa: E402
from trajstore.store.reading.run_info import information  # noqa: E402
from trajstore.trainers import replay  # noqa: E402
from trajstore.trainers.rounded_optimizer import RoundedAdam, RoundedAdamW, RoundedSGD  # noqa: E402

pytestmark = pytest.mark.torch

STEPS = 9
ROUNDINGS = pytest.mark.parametrize(
    "rounding", [pytest.param("nearest", marks=pytest.mark.nightly), "stochastic"]
)


def proven(path: Path, steps: int = STEPS) -> Any:
    result = replay(path)
    assert result.findings == ()
    assert (result.clean, result.exact, result.unreplayed) == (True, True, ())
    assert result.replayed == result.steps == steps
    assert all(compared.differing == 0 for compared in result.variables.values())
    return result


def adamw(rounding: str, state: str = "float32", **settings: Any) -> Any:
    own = {"state_dtype": state, "rounding": rounding, "rounding_seed": 5}
    return partial(RoundedAdamW, lr=0.01, **own, **settings)


@pytest.mark.parametrize(
    ("weights", "state"),
    [
        ("bfloat16", "float32"),
        ("bfloat16", "bfloat16"),
        ("float32", "bfloat16"),
        pytest.param("float16", "float32", marks=pytest.mark.nightly),
        pytest.param("float32", "float64", marks=pytest.mark.nightly),
    ],
)
@ROUNDINGS
def test_weights_and_moments_of_any_types(
    weights: str, state: str, rounding: str, tmp_path: Path
) -> None:
    path = tiny_run(
        tmp_path / "run.zarr", adamw(rounding, state), dtype=getattr(torch, weights), steps=STEPS
    )
    ds = open_run(path)
    assert [ds[name].attrs["native_dtype"] for name in ("W", "grad")] == [weights] * 2
    assert [ds[name].attrs["native_dtype"] for name in ("exp_avg", "exp_avg_sq")] == [state] * 2
    assert information(path)["arrays"]["exp_avg"]["native_dtype"] == state
    assert verify(path).clean
    result = proven(path)
    assert {"W", "exp_avg", "exp_avg_sq", "clip_coef"} <= set(result.variables)
    assert result.rebuilt == ()


REBUILT = {
    "adam": partial(RoundedAdam, lr=0.01, weight_decay=0.1),
    "amsgrad": partial(RoundedAdam, lr=0.01, amsgrad=True),
    "momentum": partial(RoundedSGD, lr=0.1, momentum=0.9),
    "sgd": partial(RoundedSGD, lr=0.1),
}


@pytest.mark.parametrize("name", REBUILT)
@ROUNDINGS
def test_state_that_is_not_recorded_is_rebuilt(name: str, rounding: str, tmp_path: Path) -> None:
    optimizer = partial(REBUILT[name], state_dtype="float32", rounding=rounding)
    path = tiny_run(
        tmp_path / "run.zarr", optimizer, dtype=torch.bfloat16, steps=STEPS,
        variables="weights+grads",
    )  # fmt: skip
    moments = ("exp_avg", "exp_avg_sq")
    rebuilt = {
        "adam": moments, "amsgrad": (*moments, "max_exp_avg_sq"),
        "momentum": ("momentum_buffer",), "sgd": (),
    }  # fmt: skip
    assert proven(path).rebuilt == rebuilt[name]


@ROUNDINGS
def test_some_tokens_keep_their_places_and_their_random_numbers(
    rounding: str, tmp_path: Path
) -> None:
    path = tiny_run(
        tmp_path / "run.zarr", adamw(rounding), dtype=torch.bfloat16, steps=STEPS, tokens=[3, 16]
    )
    proven(path)


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
