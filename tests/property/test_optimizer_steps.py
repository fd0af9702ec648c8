"""A step follows from what was recorded before it, whatever the optimizer and the run hold.

So a replay differs nowhere, and a what-if without settings is the run again. With
``TRAJSTORE_STATES`` each optimizer has every form of a run (`make states`).
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from small_trainings import same_values
from trainings import scaled_run, tiny_run

from trajstore import open_run, verify
from trajstore.store.reading.run_info import information
from trajstore.trainers import replay, what_if
from trajstore.trainers.rounded_optimizer import RoundedAdam, RoundedAdamW, RoundedSGD

MOMENTS = ("exp_avg", "exp_avg_sq")
SUMMARIES = ("grad_token_norm", "W_step_norm", "W_ulp_l1", "cells")


class Case(NamedTuple):
    """An optimizer, the state that it keeps, and the types of the weights and of the moments."""

    optimizer: Callable[[Any], Any]
    state: tuple[str, ...]
    weights: str = "bfloat16"
    moments: str | None = None


def rounded(kind: Any, state: tuple[str, ...], weights: str, moments: str, **settings: Any) -> Case:
    own = {"lr": 0.01, "state_dtype": moments, "rounding_seed": 5, **settings}
    return Case(partial(kind, **own), state, weights, moments)


optim = torch.optim
CASES = {
    "adamw": Case(partial(optim.AdamW, lr=0.01, foreach=False), MOMENTS),
    "adamw-foreach": Case(partial(optim.AdamW, lr=0.01, foreach=True), MOMENTS),
    "adamw-fused": Case(partial(optim.AdamW, lr=0.01, fused=True), MOMENTS, "float32"),
    "adam": Case(partial(optim.Adam, lr=0.01), MOMENTS),
    "adam-decay": Case(partial(optim.Adam, lr=0.01, weight_decay=0.1), MOMENTS, "float32"),
    "adam-fused-decay": Case(
        partial(optim.Adam, lr=0.01, weight_decay=0.1, fused=True), MOMENTS, "float32"
    ),
    "adam-other": Case(
        partial(optim.Adam, lr=0.02, betas=(0.5, 0.9), eps=1e-3, weight_decay=0.1, maximize=True),
        MOMENTS, "float32",
    ),
    "adam-decoupled": Case(
        partial(optim.Adam, lr=0.02, weight_decay=0.1, decoupled_weight_decay=True), MOMENTS
    ),
    "adam-tensors": Case(
        lambda p: optim.AdamW(
            p, foreach=False, lr=torch.tensor(0.01), betas=(torch.tensor(0.9), torch.tensor(0.999))
        ),
        MOMENTS, "float32",
    ),
    "amsgrad": Case(partial(optim.AdamW, lr=0.01, amsgrad=True), (*MOMENTS, "max_exp_avg_sq")),
    "radam": Case(partial(optim.RAdam, lr=0.01), MOMENTS),
    "nadam": Case(partial(optim.NAdam, lr=0.01), ("mu_product", *MOMENTS), "float32"),
    "adamax": Case(partial(optim.Adamax, lr=0.01), ("exp_avg", "exp_inf")),
    "adadelta": Case(optim.Adadelta, ("square_avg", "acc_delta")),
    "adagrad": Case(partial(optim.Adagrad, lr=0.01, initial_accumulator_value=0.1), ("sum",)),
    "rmsprop": Case(partial(optim.RMSprop, lr=0.01), ("square_avg",)),
    "sgd": Case(partial(optim.SGD, lr=0.1, weight_decay=0.1), ()),
    "sgd-momentum": Case(
        partial(optim.SGD, lr=0.1, momentum=0.9, dampening=0.5), ("momentum_buffer",), "float32"
    ),
    "sgd-float16": Case(partial(optim.SGD, lr=0.1), (), "float16"),
    "sgd-float64": Case(partial(optim.SGD, lr=0.1), (), "float64"),
}  # fmt: skip
for rounding in ("nearest", "stochastic"):
    for weights, moments in (
        ("bfloat16", "float32"), ("bfloat16", "bfloat16"), ("float32", "bfloat16"),
        ("float16", "float32"), ("float32", "float64"),
    ):  # fmt: skip
        CASES[f"rounded-{weights}-{moments}-{rounding}"] = rounded(
            RoundedAdamW, MOMENTS, weights, moments, rounding=rounding
        )
    for name, kind, state, settings in (
        ("adam", RoundedAdam, MOMENTS, {"weight_decay": 0.1}),
        ("amsgrad", RoundedAdam, (*MOMENTS, "max_exp_avg_sq"), {"amsgrad": True}),
        ("momentum", RoundedSGD, ("momentum_buffer",), {"lr": 0.1, "momentum": 0.9}),
        ("sgd", RoundedSGD, (), {"lr": 0.1}),
    ):
        CASES[f"rounded-{name}-{rounding}"] = rounded(
            kind, state, "bfloat16", "float32", rounding=rounding, **settings
        )
FORMS: dict[str, dict[str, Any]] = {
    "whole": {"variables": ("matrix", *SUMMARIES)},
    "rebuilt": {"variables": "weights+grads"},
    # torch rounds differently at the end of a tensor, and 17 × 8 values are no whole vectors.
    "tokens": {"tokens": [3, 5, 16], "count": 20},
    "micro-batches": {"accumulate": 3},
    "unclipped": {"clip": 0},
}
QUICK = {
    "whole": ("adam-other", "rounded-bfloat16-bfloat16-stochastic"),
    "rebuilt": ("sgd-momentum", "nadam", "rounded-amsgrad-stochastic"),
    "tokens": ("adam-fused-decay",),
    "micro-batches": ("adam-tensors",),
    "unclipped": ("adamw-fused", "sgd-float64"),
}


def cells() -> list[Any]:
    """Every optimizer in one form, two, or all, and a few in each; most in the nightly tier."""
    forms = [*FORMS]
    rebuilt = {name for name, case in CASES.items() if case.state not in ((), MOMENTS)}
    return [
        pytest.param(form, name, marks=() if name in QUICK[form] else pytest.mark.nightly)
        for number, name in enumerate(CASES)
        for form in FORMS
        if name in QUICK[form]
        or form == forms[number % 5]
        or (form == "rebuilt" and name in rebuilt)
        or "TRAJSTORE_STATES" in os.environ
    ]


def proven(path: Path, steps: int) -> Any:
    """The replay of a run of which nothing differs, and every step was replayed."""
    found = replay(path)
    assert (found.findings, found.unreplayed) == ((), ())
    assert (found.clean, found.exact) == (True, True)
    assert found.replayed == found.steps == steps
    for name, compared in found.variables.items():
        assert (compared.differing, compared.ulps, compared.first) == (0, 0, None), name
    return found


def is_the_run_again(path: Path, folder: Path, last: int) -> None:
    """Also from a later row."""
    for at in (0, 5):
        made = what_if(path, folder / f"{at}.zarr", at=at or None)
        assert (made.rows, made.first_step, made.last_step) == (last + 1 - at, at, last)
        same_values(path, Path(made.path), first=at)
    again = replay(folder / "0.zarr")
    assert (again.clean, again.replayed) == (True, last)


@pytest.mark.parametrize(("form", "name"), cells())
def test_steps_follow_from_the_row_before(form: str, name: str, tmp_path: Path) -> None:
    case, path = CASES[name], tmp_path / "run.zarr"
    steps = FORMS[form].get("count", 9)
    with torch.autocast(
        "cpu",
        torch.bfloat16,
        enabled=case.weights == "float32" and form in ("micro-batches", "unclipped"),
    ):
        tiny_run(path, case.optimizer, dtype=getattr(torch, case.weights), **FORMS[form])
    found, ds = proven(path, steps), open_run(path)
    held = {state for state in case.state if state in ds}
    assert found.rebuilt == tuple(state for state in case.state if state not in held)
    summaries = SUMMARIES if form == "whole" else ()
    assert {*found.variables} == {"W", "clip_coef", *held, *summaries}
    assert all(one.steps == steps + (of == "cells") for of, one in found.variables.items())
    assert json.loads(json.dumps(found.facts()))["clean"] is True
    types = dict.fromkeys(("W", "grad"), case.weights)
    types |= dict.fromkeys(held, case.moments or case.weights)
    arrays = information(path)["arrays"]
    assert {state: arrays[state]["native_dtype"] for state in types} == types
    assert verify(path).clean
    is_the_run_again(path, tmp_path, steps)


@pytest.mark.parametrize(("fused", "tier"), [(False, "matrix"), (True, "weights+grads")])
def test_skipped_steps_move_nothing_and_do_not_count(
    fused: bool, tier: str, tmp_path: Path
) -> None:
    path = scaled_run(tmp_path / "run.zarr", fused=fused, variables=tier)
    skipped = open_run(path).skipped.values[1:]
    assert skipped[0] == 1
    found = proven(path, 14)
    assert found.skipped == skipped.sum() > 1
    assert found.variables["W"].steps == 14
    is_the_run_again(path, tmp_path, 14)


def test_gradients_clipped_by_value(tmp_path: Path) -> None:
    clip = lambda model: torch.nn.utils.clip_grad_value_(model.parameters(), 1e-3)  # noqa: E731
    path = tiny_run(tmp_path / "run.zarr", max_grad_norm=0.0, clip=0.0, change=clip)
    proven(path, 9)
    is_the_run_again(path, tmp_path, 9)
