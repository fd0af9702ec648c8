"""Rates and hyperparameters that a schedule changes are those of each step, wherever used."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import xarray as xr
from trainings import adamw as adamw_of
from trainings import steps

from trajstore import open_run, verify
from trajstore.analysis import adam_update, moment_error
from trajstore.trainers import (
    capture,
    optimizer_state_at,
    replay,
    restore,
    what_if,
)

STEPS = 8


def cycled(optimizer: Any) -> Callable[[int], None]:
    """OneCycleLR, which changes the rate and beta1, or the momentum."""
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.05, total_steps=2 * STEPS)
    return lambda step: schedule.step() if step else None


def varied(
    key: str, values: Callable[[int], Any], group: int = 0
) -> Callable[[Any], Callable[[int], None]]:
    """Change of a setting of a group before each step."""
    return lambda optimizer: lambda step: optimizer.param_groups[group].update({key: values(step)})


def built() -> tuple[Any, Any]:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Embedding(29, 8), torch.nn.Linear(8, 29))
    return model, [
        {"params": [*model[0].parameters()]},
        {"params": [*model[1].parameters()], "weight_decay": 0.2},
    ]


def train(
    path: Path, make: Callable[[Any], Any], change: Callable[[Any], Any], **options: Any
) -> tuple[xr.Dataset, list[str]]:
    """A run of some steps, and its notes."""
    notes: list[str] = []
    model, groups = built()
    optimizer = make(groups)
    before_step = change(optimizer)
    options = {"parameter": "0.weight", "on_note": notes.append, "fsync": False} | options
    with capture(model, optimizer, path, **options):
        for step in range(STEPS):
            before_step(step)
            ids = torch.randint(29, (3, 6))
            torch.nn.functional.cross_entropy(model(ids).flatten(0, 1), ids.flatten()).backward()
            optimizer.step()
            optimizer.zero_grad()
    return open_run(path, chunks=None), notes


def adamw(groups: Any) -> Any:
    return torch.optim.AdamW(groups, lr=0.01)


@pytest.mark.parametrize(
    ("make", "change"),
    [
        (partial(torch.optim.Adam, lr=0.01), varied("weight_decay", lambda step: 0.1 * step)),
        (partial(torch.optim.SGD, lr=0.1), varied("momentum", lambda step: 0.1 * max(step - 3, 0))),
    ],
    ids=["coupled decay", "momentum from 0"],
)
def test_every_step_follows_from_the_row_before(
    make: Any, change: Any, tmp_path: Path, path: Path
) -> None:
    ds, notes = train(path, make, change, encoding="compact")
    assert not any("changed" in note for note in notes)
    assert verify(path).problems == ()
    replayed = replay(path)
    assert (replayed.clean, replayed.replayed, replayed.unreplayed) == (True, STEPS, ())
    what_if(path, tmp_path / "same.zarr")
    np.testing.assert_array_equal(open_run(tmp_path / "same.zarr", chunks=None).W, ds.W)


@pytest.fixture(scope="module")
def one_cycle(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, xr.Dataset]:
    """A run of AdamW under OneCycleLR, which tests only read."""
    path = tmp_path_factory.mktemp("cycle") / "run.zarr"
    return path, train(path, adamw, cycled, variables="matrix,everything")[0]


def test_the_update_of_adam_is_the_step(one_cycle: tuple[Path, xr.Dataset]) -> None:
    ds = one_cycle[1].chunk({"step": 5, "token": 15})
    replayed = replay(one_cycle[0])
    assert (replayed.clean, replayed.replayed) == (True, STEPS)
    assert ds.hyperparameter.values.tolist() == ["beta1", "beta2", "eps", "weight_decay"]
    assert np.isnan(ds.hyperparameters[0]).all()
    beta1 = ds.hyperparameters.sel(hyperparameter="beta1")[1:]
    assert len(np.unique(beta1)) == STEPS
    taken = ds.W.astype(float).diff("step")
    np.testing.assert_allclose(adam_update(ds).adam_update, taken, rtol=0, atol=3e-7)
    error = moment_error(ds).norm_ratio.sel(population="all", step=STEPS)
    np.testing.assert_allclose(error, 1, atol=1e-6)
    fixed = {"class": "AdamW", "hyperparameters": ds.attrs["optimizer"]["hyperparameters"]}
    assert abs(adam_update(ds, optimizer=fixed).adam_update - taken).max() > 1e-3


def test_a_setting_of_what_if_holds_in_all_steps(
    one_cycle: tuple[Path, xr.Dataset], tmp_path: Path
) -> None:
    path, ds = one_cycle
    other = tmp_path / "other.zarr"
    what_if(path, other, ["optimizer.weight_decay=0.3"])
    numbers = open_run(other).hyperparameters
    assert (numbers.sel(hyperparameter="weight_decay")[1:] == 0.3).all()
    beta1 = numbers.sel(hyperparameter="beta1")
    assert beta1.equals(ds.hyperparameters.sel(hyperparameter="beta1"))
    assert replay(other).clean
    what_if(path, tmp_path / "sgd.zarr", ["optimizer.name=sgd", "optimizer.momentum=0.5"])
    named = open_run(tmp_path / "sgd.zarr").hyperparameters[-1].to_series().to_dict()
    assert named == {"momentum": 0.5, "dampening": 0.0, "weight_decay": 0.01}


def test_restore_sets_what_the_next_step_used(one_cycle: tuple[Path, xr.Dataset]) -> None:
    path, ds = one_cycle
    model, groups = built()
    optimizer = adamw(groups)
    restore(path, model, optimizer, step=4)
    recorded, other = optimizer.param_groups
    used = ds.hyperparameters.sel(step=5, hyperparameter=["beta1", "beta2"]).values
    assert (recorded["lr"], recorded["betas"]) == (ds.lr.sel(step=5), tuple(used))
    assert (other["lr"], other["betas"]) == (ds.params_lr.sel(step=5)[1], (0.9, 0.999))
    (group, _) = optimizer_state_at(path, 4)["param_groups"]
    assert group["betas"][0] == ds.hyperparameters.sel(step=4, hyperparameter="beta1")


def test_a_list_that_changes_in_place_is_read_again(path: Path) -> None:
    def change(optimizer: Any) -> Callable[[int], None]:
        betas = optimizer.param_groups[0]["betas"] = [0.9, 0.999]
        return lambda step: betas.__setitem__(0, 0.9 - step / 100)

    ds, _ = train(path, adamw, change)
    beta1 = ds.hyperparameters.sel(hyperparameter="beta1")[1:].values
    assert beta1.tolist() == [0.9 - step / 100 for step in range(STEPS)]


@pytest.mark.parametrize(
    ("change", "options", "said"),
    [
        (varied("weight_decay", lambda step: 0.2 / (step + 1), group=1), {}, None),
        (varied("weight_decay", lambda step: 0.2 / (step + 1), group=1),
         {"variables": "everything"}, "weight_decay of other groups changed"),
        (cycled, {"variables": ("W", "grad", "lr", "clip_coef")}, "beta1 of the group of"),
        (varied("maximize", lambda step: bool(step % 2)), {}, "maximize of the group of"),
    ],
)  # fmt: skip
def test_changes_that_no_row_holds_are_named(
    change: Any, options: Any, said: str | None, path: Path
) -> None:
    _, notes = train(path, adamw, change, **options)
    changed = [note for note in notes if "changed" in note]
    assert [note.startswith(said or "") for note in changed] == [True] * (said is not None)


def test_a_rate_that_is_a_tensor_of_one_in_groups_that_are_loaded(tiny: Any, record: Any) -> None:
    optimizer = adamw_of(tiny, lr=torch.tensor([0.01]))
    with record(optimizer, variables=("matrix", "everything", "norms")):
        optimizer.load_state_dict(optimizer.state_dict())
        for _ in steps(tiny, optimizer):
            optimizer.param_groups[0]["lr"].mul_(0.5)
    expected = [np.float32(0.01) / 2**n for n in (1, 2, 3)]
    ds = record.read()
    np.testing.assert_allclose(ds.lr.values[1:], expected)
    np.testing.assert_array_equal(ds.params_lr[:, 0], ds.lr)
    assert np.isfinite(ds.param_update_lost.values[1:]).all()
