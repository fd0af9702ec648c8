"""What torch makes of the gradients when a setting changes."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import xarray as xr
from altered_runs import change_attributes
from damage import contents
from small_trainings import same_values, small_config
from trainings import VOCAB, scaled_run, tiny_run

from trajstore import open_run
from trajstore.analysis import exact_moments
from trajstore.errors import InvalidArgument, RunExists, StepNotFound, TrajstoreError
from trajstore.trainers import fork, record, replay, what_if
from trajstore.trainers.rounded_optimizer import RoundedAdamW

Runs = Callable[..., Path]
STEPS = 9
DEAD = np.arange(VOCAB) >= 13
SUMMARIES = ("grad_token_norm", "W_step_norm", "W_ulp_l1", "cells")
OPTIMIZERS: dict[str, Callable[[Any], Any]] = {
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.01),
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1),
    "sgd-momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=0.01),
}


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    """Records a tiny run of an optimizer, once for the same options; the tests only read it."""
    runs: dict[tuple[str, ...], Path] = {}

    def run(optimizer: str = "adamw", **options: Any) -> Path:
        key = (optimizer, *map(repr, sorted(options.items())))
        if key not in runs:
            path = tmp_path_factory.mktemp("tiny") / "run.zarr"
            runs[key] = tiny_run(path, OPTIMIZERS[optimizer], count=STEPS, **options)
        return runs[key]

    return run


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A training of 6 steps; the tests only read it."""
    seen = "recording.variables=['matrix','hidden_trace','batch','example_loss','hidden_states']"
    path = tmp_path_factory.mktemp("trained") / "run.zarr"
    return Path(record(small_config(["gatsby"], seen, steps=6), path))


def read(path: Path) -> xr.Dataset:
    """All values of a run."""
    return xr.open_zarr(path, chunks=None).load()


def applied(ds: xr.Dataset, make: Callable[[Any], Any], dtype: Any = torch.float32) -> Any:
    """W after each step by the optimizer itself, from row 0, gradients as they are."""
    W = torch.nn.Parameter(torch.from_numpy(ds.W[0].values.copy()).to(dtype))
    optimizer = make([W])
    rows = [W.detach().float().numpy().copy()]
    for number in range(1, ds.sizes["step"]):
        optimizer.param_groups[0]["lr"] = float(ds.lr.values[number])
        clip = torch.tensor(ds.clip_coef.values[number])
        W.grad = torch.from_numpy(ds.grad[number].values.copy()).mul_(clip).to(dtype)
        optimizer.step()
        rows.append(W.detach().float().numpy().copy())
    return np.stack(rows)


def test_what_a_late_run_does_not_know(tmp_path: Path) -> None:
    held = ("W", "grad", "exp_avg", "exp_avg_sq", "lr", "clip_coef", "skipped")  # no step_count
    run = scaled_run(tmp_path / "run.zarr", fused=False, variables=held)
    skipping = what_if(run, tmp_path / "late.zarr", at=9).path
    new = tiny_run(tmp_path / "new.zarr", count=2, first_step=5, variables=held)
    for late, sentence in ((skipping, "number of skipped steps"), (new, "because recording began")):
        with pytest.raises(TrajstoreError, match=sentence):
            what_if(late, tmp_path / "no.zarr")
    assert not (tmp_path / "no.zarr").exists()


def test_settings_that_are_those_of_the_run_change_nothing(trained: Path, tmp_path: Path) -> None:
    settings = [
        "optimizer.lr=1e-3", "optimizer.betas=[0.9, 0.999]", "optimizer.weight_decay=0.01",
        "schedule.name=linear", "schedule.steps=6", "training.max_grad_norm=1",
        "model.dtype=bfloat16", "optimizer.state_dtype=bfloat16", "rounding=nearest",
    ]  # fmt: skip
    what_if(trained, tmp_path / "same.zarr", settings)
    same_values(trained, tmp_path / "same.zarr")


def test_float32_weights_are_what_torch_makes_of_the_gradients(tiny: Runs, tmp_path: Path) -> None:
    run = tiny(dtype=torch.bfloat16, variables=("matrix", *SUMMARIES))
    ds = read(run)
    out = Path(what_if(run, tmp_path / "wide.zarr", ["model.dtype=float32"]).path)
    wide = read(out)
    expected = applied(ds, lambda p: torch.optim.AdamW(p, lr=0.01))
    assert wide.W.values.tobytes() == expected.tobytes()
    for name in ("W", "grad", "exp_avg", "exp_avg_sq"):
        assert wide[name].attrs["native_dtype"] == "float32"
    assert (wide.grad.values[1:] == ds.grad.values[1:]).all()
    assert replay(out).clean
    moved = np.sqrt(((expected[1:].astype("f8") - expected[:-1]) ** 2).sum(-1)).astype("f4")
    np.testing.assert_allclose(wide.W_step_norm.values[1:], moved, rtol=1e-6)
    late = what_if(run, tmp_path / "late.zarr", ["model.dtype=float32"], at=5).path
    assert np.isnan(open_run(late).W_ulp_l1.values[0]).all()
    assert (open_run(late).W_step_norm.values[0] == ds.W_step_norm.values[5]).all()


@pytest.mark.parametrize(
    ("kind", "at", "setting", "make"),
    [
        ("adamw", 0, "optimizer.betas=[0.5, 0.9]", partial(torch.optim.AdamW, betas=(0.5, 0.9))),
        ("adamw", 0, "optimizer.name=adam", partial(torch.optim.Adam, weight_decay=0.01)),
        ("adamw", 0, "optimizer.name=sgd", partial(torch.optim.SGD, weight_decay=0.01)),
        ("sgd-momentum", 0, "optimizer.name=adam", torch.optim.Adam),
        ("sgd-momentum", 2, "optimizer.momentum=0", torch.optim.SGD),
    ],
)
def test_changed_hyperparameters(
    kind: str, at: int, setting: str, make: Any, tiny: Runs, tmp_path: Path
) -> None:
    run = tiny(kind, variables=("matrix", "cells"))
    ds = read(run).isel(step=slice(at, None))
    what_if(run, tmp_path / "other.zarr", [setting], at=at or None)
    out = read(tmp_path / "other.zarr")
    expected = applied(ds, make)
    assert out.W.values.tobytes() == expected.tobytes()
    assert not np.array_equal(expected, ds.W.values)
    cells = torch.from_numpy(expected).bfloat16().float().numpy()
    np.testing.assert_array_equal(out.cells, cells)
    assert replay(tmp_path / "other.zarr").clean
    held = {"exp_avg", "exp_avg_sq"} if "Adam" in str(make) else set()
    assert {*out.data_vars} & {"exp_avg", "exp_avg_sq", "momentum_buffer"} == held


def test_rates_of_a_schedule_and_in_proportion(trained: Path, tiny: Runs, tmp_path: Path) -> None:
    def rates(run: Path, *settings: str) -> Any:
        path = tmp_path / "o.zarr"
        what_if(run, path, settings, overwrite=True)
        return xr.open_zarr(path, chunks=None).lr.values

    for settings, first, expected in (
        (["optimizer.lr=2e-3"], 1, [2e-3 * (6 - step) / 6 for step in range(6)]),
        (["schedule.name=constant"], 1, [1e-3] * 6),
        (["schedule.steps=12"], 1, [1e-3 * ((12 - step) / 12) for step in range(6)]),
        (["schedule.name=constant", "optimizer.lr=5e-4", "schedule.warmup_steps=4"], 1,
         [5e-4 * step / 4 for step in range(5)] + [5e-4]),
    ):  # fmt: skip
        found = rates(trained, *settings)
        assert np.isnan(found[0])
        np.testing.assert_array_equal(found[first:], expected)
    # An extended run has a schedule for each segment.
    run = tmp_path / "run.zarr"
    record(small_config(["gatsby"], steps=2), run)
    record(small_config(["gatsby"], steps=4), run, resume=True)
    np.testing.assert_array_equal(
        rates(run, "optimizer.lr=7e-4")[1:],
        [7e-4 * ((end - step) / end) for end, step in ((2, 0), (2, 1), (4, 2), (4, 3))],
    )
    # A loop of one's own, whose schedule nobody knows.
    np.testing.assert_array_equal(rates(tiny(), "optimizer.lr=0.005")[1:], np.full(STEPS, 0.005))
    with pytest.raises(InvalidArgument, match=r"set schedule\.name"):
        what_if(tiny(), tmp_path / "other.zarr", ["schedule.steps=5"])


def test_clipping_goes_by_the_recorded_norm(tiny: Runs, tmp_path: Path) -> None:
    run = tiny()
    ds = read(run)
    none = open_run(what_if(run, tmp_path / "none.zarr", ["training.max_grad_norm=0"]).path)
    assert (none.clip_coef.values[1:] == 1).all()
    tight = what_if(run, tmp_path / "tight.zarr", ["training.max_grad_norm=0.01"]).path
    norm = torch.from_numpy(ds.grad_norm.values[1:].copy())
    np.testing.assert_array_equal(open_run(tight).clip_coef.values[1:], 0.01 / (norm + 1e-6))
    assert replay(tight).clean


def test_state_of_float32_rounds_the_weights_once(tiny: Runs, tmp_path: Path) -> None:
    run = tiny(dtype=torch.bfloat16, is_dead=DEAD)
    what_if(run, tmp_path / "wide.zarr", ["optimizer.state_dtype=float32"])
    out = read(tmp_path / "wide.zarr")
    rounded = partial(RoundedAdamW, lr=0.01, state_dtype="float32")
    expected = applied(read(run), rounded, torch.bfloat16)
    assert out.W.values.tobytes() == expected.tobytes()
    assert out.W.attrs["native_dtype"] == "bfloat16"
    assert out.exp_avg_sq.attrs["native_dtype"] == "float32"
    assert replay(tmp_path / "wide.zarr").clean
    falls = np.diff(out.exp_avg_sq.values, axis=0) < 0
    assert falls.any()


def test_stochastic_rounding_is_seeded(tiny: Runs, tmp_path: Path) -> None:
    run = tiny(dtype=torch.bfloat16, is_dead=DEAD)

    def rounded(seed: int) -> Any:
        settings = ["rounding=stochastic", "optimizer.state_dtype=float32"]
        what_if(run, tmp_path / "o.zarr", settings, seed=seed, overwrite=True)
        return xr.open_zarr(tmp_path / "o.zarr", chunks=None).W.values

    assert rounded(1).tobytes() == rounded(1).tobytes() != rounded(2).tobytes()


def test_selected_tokens_have_the_values_of_all_tokens(tiny: Runs, tmp_path: Path) -> None:
    run, settings = tiny(dtype=torch.bfloat16, is_dead=DEAD), ["optimizer.lr=0.003"]
    chosen: dict[str, Any] = {"all": "all", "some": "dead", "ids": [3, 1]}
    for name, tokens in chosen.items():
        what_if(run, tmp_path / name, settings, tokens=tokens)
    same_values(tmp_path / "all", tmp_path / "some", token=DEAD)
    same_values(tmp_path / "all", tmp_path / "ids", token=[1, 3])
    assert replay(tmp_path / "ids").clean


def test_steps_that_a_fork_had_before(trained: Path, tmp_path: Path) -> None:
    other = fork(trained, tmp_path / "fork.zarr", at=4, settings=["optimizer.betas=[0.5, 0.9]"])
    with pytest.raises(TrajstoreError, match="start at the fork"):
        what_if(other, tmp_path / "no.zarr")
    what_if(other, tmp_path / "same.zarr", at=4)
    same_values(other, tmp_path / "same.zarr", first=4)
    with pytest.raises(InvalidArgument, match="precede the fork"):
        exact_moments(open_run(other))
    exact_moments(open_run(other).sel(step=slice(4, None))).isel(step=-1).compute()


def test_a_recorded_subset(tiny: Runs, tmp_path: Path) -> None:
    run = tmp_path / "run.zarr"
    shutil.copytree(tiny(dtype=torch.bfloat16, tokens=[2, 3, 15]), run)
    with pytest.raises(InvalidArgument, match="the run lacks 4"):
        what_if(run, tmp_path / "no.zarr", tokens=[4])
    for name in ("one", "of an unknown vocabulary"):
        what_if(run, tmp_path / name, tokens=[15])
        same_values(run, tmp_path / name, token=[2])
        change_attributes(run, lambda root: root["recording"].pop("vocabulary", None))


def test_omitted_variables_are_named(tiny: Runs, tmp_path: Path) -> None:
    run = tiny(variables="matrix,norms")
    found = what_if(run, tmp_path / "same.zarr")
    names = "param_grad_norm, param_norm, param_update_norm, param_update_lost"
    assert f"{names}: left out, because the gradients of W do not determine them" in found.notes


def test_provenance_and_configuration_name_the_run_the_step_and_the_settings(
    trained: Path, tiny: Runs, tmp_path: Path
) -> None:
    recorded = open_run(trained).attrs
    betas = ["optimizer.betas=[0.8, 0.99]"]
    found = what_if(trained, tmp_path / "other.zarr", betas, at=3)
    made = open_run(found.path).attrs
    optimizer = recorded["config"]["optimizer"] | {"betas": [0.8, 0.99]}
    assert made["config"] == recorded["config"] | {"optimizer": optimizer}
    said = made["provenance"]["what_if"]
    assert (said["run"], said["from_step"], said["settings"]) == ("run.zarr", 3, betas)
    for name in ("created", "fingerprint"):
        assert said[name] == recorded[name]
    assert "recorded run" in said["caveat"]
    assert {"grad", "loss", "logits"} <= set(said["of_recorded_path"])
    assert any("recorded run" in note for note in found.notes)
    own = what_if(tiny(), tmp_path / "own.zarr", ["optimizer.eps=1e-4"]).path
    assert not open_run(own).attrs["config"]
    assert open_run(own).attrs["provenance"]["what_if"]["settings"] == ["optimizer.eps=0.0001"]


BAD: dict[str, tuple[dict[str, Any], Any, dict[str, Any], type[Exception], str]] = {
    "no gradients": ({"variables": "weights"}, [], {}, TrajstoreError, "gradient was not recorded"),
    "every": ({"every": 2}, [], {}, TrajstoreError, "record with every=1"),
    "step": ({}, [], {"at": 99}, StepNotFound, "step 99 was not recorded"),
    "other field": ({}, ["model.hidden=4"], {}, InvalidArgument, "cannot change model.hidden"),
    "betas of sgd": (
        {"optimizer": "sgd"}, ["optimizer.betas=[0.1, 0.2]"], {}, InvalidArgument,
        "SGD has no betas",
    ),
    "state of rmsprop": (
        {"optimizer": "rmsprop", "dtype": torch.bfloat16},
        ["optimizer.state_dtype=float32"], {}, InvalidArgument, "RMSprop keeps its state",
    ),
    "momentum": ({"optimizer": "sgd"}, ["optimizer.momentum=0.5"], {"at": 2}, TrajstoreError,
                 "has no state at step 2.*start at the first row"),
    "seed": ({}, [], {"seed": 3}, InvalidArgument, "only stochastic rounding is random"),
    "last step": ({}, [], {"at": STEPS}, TrajstoreError, "is the last step"),
    "tokens": ({}, [], {"tokens": "dead"}, InvalidArgument, "the dead tokens are not known"),
    "numbers": ({}, [], {"tokens": [1.5]}, InvalidArgument, "^tokens: got "),
    "place": ({}, [], {"at": "a"}, InvalidArgument, "got at='a', expected a whole number"),
    "text": ({}, "optimizer.lr=1", {}, InvalidArgument, "settings=.*, expected a list of strings"),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD)
def test_wrong_questions_are_errors_and_write_nothing(
    name: str, tiny: Runs, tmp_path: Path
) -> None:
    options, settings, how, error, sentence = BAD[name]
    run = tiny(**options)
    with pytest.raises(error, match=sentence) as raised:
        what_if(run, tmp_path / "other.zarr", settings, **how)
    assert "\n" not in str(raised.value)
    assert not [*tmp_path.iterdir()]


def test_the_output_is_not_the_run(tiny: Runs) -> None:
    run = tiny()
    with pytest.raises(InvalidArgument, match="is the run with the gradients"):
        what_if(run, run / ".." / run.name, overwrite=True)


@pytest.mark.parametrize("make", [what_if, partial(fork, at=3)])
def test_what_exists_is_not_replaced(make: Any, trained: Path, tmp_path: Path) -> None:
    path = Path(shutil.copytree(trained, tmp_path / "other.zarr"))
    before = contents(tmp_path)
    with pytest.raises(RunExists, match="already exists"):
        make(trained, path)
    assert contents(tmp_path) == before
