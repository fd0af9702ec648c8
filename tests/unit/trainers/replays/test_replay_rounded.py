"""Runs whose optimizer has a state of its own type, or rounds at random, replay to the last bit."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")
from list_recorder import TinyModel, batches  # noqa: E402
from tiny_runs import tiny_run  # noqa: E402

from trajstore import open_run, verify  # noqa: E402
from trajstore.store.reading.run_info import information  # noqa: E402
from trajstore.trainers import capture, preset, record  # noqa: E402
from trajstore.trainers.replays.replay import replay  # noqa: E402
from trajstore.trainers.replays.replay_result import Replay  # noqa: E402
from trajstore.trainers.rounded_optimizer import RoundedAdam, RoundedAdamW, RoundedSGD  # noqa: E402

pytestmark = pytest.mark.torch

STEPS = 12
ROUNDINGS = pytest.mark.parametrize(
    "rounding", [pytest.param("nearest", marks=pytest.mark.nightly), "stochastic"]
)


def proven(path: Path, steps: int = STEPS) -> Replay:
    result = replay(path)
    assert result.findings == ()
    assert (result.clean, result.exact, result.unreplayed) == (True, True, ())
    assert result.replayed == result.steps == steps
    assert all(compared.differing == 0 for compared in result.variables.values())
    return result


def adamw(rounding: str, state: str = "float32", **settings: Any) -> Any:
    own = {"state_dtype": state, "rounding": rounding, "rounding_seed": 5}
    return partial(RoundedAdamW, lr=0.01, **own, **settings)


def attributes(path: Path, change: Any) -> None:
    metadata = json.loads((path / "zarr.json").read_text())
    change(metadata["attributes"])
    (path / "zarr.json").write_text(json.dumps(metadata))


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


def test_another_seed_is_found(tmp_path: Path) -> None:
    path = tiny_run(tmp_path / "run.zarr", adamw("stochastic"), dtype=torch.bfloat16, steps=STEPS)

    def reseed(root: Any) -> None:
        root["optimizer"]["hyperparameters"]["rounding_seed"] = 6

    attributes(path, reseed)
    assert not replay(path).clean


def test_steps_that_a_scaler_skipped_do_not_count(tmp_path: Path) -> None:
    torch.manual_seed(1)
    model = TinyModel()
    optimizer = RoundedSGD(
        model.parameters(), lr=0.1, momentum=0.9, state_dtype="bfloat16", rounding="stochastic"
    )
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**20, growth_interval=4)
    path = tmp_path / "run.zarr"
    with capture(model, optimizer, path, scaler=scaler, max_grad_norm=0.3):
        for batch in batches(STEPS):
            optimizer.zero_grad()
            with torch.autocast("cpu", torch.float16):
                loss = model(**batch)["loss"]
            scaler.scale(loss).backward()
            scaler.unscale_(optimizer)
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.3)
            scaler.step(optimizer)
            scaler.update()
    result = proven(path)
    assert 0 < result.skipped < STEPS


def lose(*keys: str) -> Any:
    def change(root: Any) -> None:
        for key in keys[:-1]:
            root = root[key]
        del root[keys[-1]]

    return change


def said(*keys: str, value: Any) -> Any:
    def change(root: Any) -> None:
        for key in keys[:-1]:
            root = root[key]
        root[keys[-1]] = value

    return change


HYPER = ("optimizer", "hyperparameters")


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lose("recording", "vocabulary"), "number of tokens of the parameter is not recorded"),
        (lose(*HYPER, "state_dtype"), "does not record the optimizer's state_dtype"),
        (lose(*HYPER, "rounding_seed"), "does not record the optimizer's rounding_seed"),
        (said(*HYPER, "state_dtype", value="int8"), "state_dtype is 'int8', expected one of"),
        (
            said(*HYPER, "state_dtype", value="bfloat16"),
            "exp_avg is float32, but the recorded optimizer keeps it in bfloat16",
        ),
        (
            said("optimizer", "class", value="trajstore.trainers.rounded_optimizer.RoundedRMSprop"),
            "of trajstore.trainers.rounded_optimizer: RoundedAdam, RoundedAdamW, RoundedSGD",
        ),
    ],
)
def test_what_is_not_known_is_reported(change: Any, reason: str, tmp_path: Path) -> None:
    path = tiny_run(tmp_path / "run.zarr", adamw("stochastic"), dtype=torch.bfloat16, steps=3)
    attributes(path, change)
    result = replay(path)
    assert result.replayed == 0
    assert any(reason in gap.reason for gap in result.unreplayed), result.unreplayed


PRESETS = {
    "as torch has it": [],
    "float32 state": ["optimizer.state_dtype=float32"],
    "stochastic": ["optimizer.rounding=stochastic"],
    "plain loop, both": [
        "optimizer.state_dtype=float32", "optimizer.rounding=stochastic", "training.loop=plain",
    ],
}  # fmt: skip


@pytest.mark.nightly
@pytest.mark.parametrize("name", PRESETS)
def test_the_preset_with_another_state(name: str, tmp_path: Path) -> None:
    small = ["training.steps=20", "training.batch_size=4", "training.device=cpu"]
    config = preset("gatsby").with_values([*small, *PRESETS[name]])
    path = record(config, tmp_path / "run.zarr")
    proven(path, 20)
    moment = open_run(path).exp_avg_sq.values
    falls = np.count_nonzero(moment[1:] < moment[:-1])
    if name == "as torch has it":
        assert falls == 0
    else:
        assert falls > 100
