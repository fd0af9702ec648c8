from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from trajstore.errors import InvalidArgument, VariableNotRecorded

torch = pytest.importorskip("torch")
from recorded_models import STEPS, OwnModel, same  # noqa: E402

from trajstore.trainers import capture, model_at, optimizer_state_at, restore  # noqa: E402

pytestmark = pytest.mark.torch

FEW = ("W", "params", "params_lr")


@pytest.mark.parametrize("step", [1, STEPS])
def test_the_state_at_a_step_equals_that_of_torch(recorded: Any, step: int) -> None:
    assert same(optimizer_state_at(recorded.path, step), recorded.optimizers[step])


def test_an_optimizer_that_loads_it_takes_the_next_step(recorded: Any) -> None:
    model = model_at(recorded.path, 3)
    matrices = [p for p in model.parameters() if p.ndim > 1]
    vectors = [p for p in model.parameters() if p.ndim < 2]
    optimizer = torch.optim.AdamW([{"params": matrices}, {"params": vectors}])
    optimizer.load_state_dict(optimizer_state_at(recorded.path, 3))
    assert same(optimizer.state_dict(), recorded.optimizers[3])


def test_at_step_0_there_is_no_state(recorded: Any) -> None:
    found = optimizer_state_at(recorded.path, 0)
    assert found["state"] == {}
    assert [group["lr"] for group in found["param_groups"]] == [0.01 * 0.9, 0.02 * 0.9]


def test_parameters_count_their_own_steps(own: Any) -> None:
    found = optimizer_state_at(own.path, 5)
    assert same(found, own.optimizers[5])
    assert {float(values["step"]) for values in found["state"].values()} == {3.0, 5.0}
    assert len(found["state"]) == len([p for p in OwnModel().parameters() if p.requires_grad])


@pytest.mark.parametrize("named", [False, True])
def test_the_order_of_the_optimizer_is_not_that_of_the_model(
    tmp_path: Path, tiny: Any, named: bool
) -> None:
    given = list(tiny.named_parameters())[::-1]
    optimizer = torch.optim.AdamW(given if named else [p for _, p in given], lr=0.01)
    with capture(tiny, optimizer, tmp_path / "run.zarr", variables="everything"):
        tiny(torch.tensor([[1, 2]]), torch.tensor([[2, 3]]))["loss"].backward()
        optimizer.step()
    found, kept = optimizer_state_at(tmp_path / "run.zarr", 1), optimizer.state_dict()
    kept["param_groups"][0].pop("param_names", None)
    assert same(found, kept)
    plain = torch.optim.AdamW(tiny.parameters(), lr=0.01)
    restore(tmp_path / "run.zarr", tiny, plain)
    assert all(same(plain.state[p], optimizer.state[p]) for p in tiny.parameters())
    with pytest.raises(InvalidArgument, match="weight is not in the optimizer"):
        restore(tmp_path / "run.zarr", tiny, torch.optim.AdamW([given[0][1]]))


@pytest.mark.parametrize(
    ("optimizer", "variables", "missing"),
    [
        (lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9), FEW, "momentum_buffer"),
        (lambda p: torch.optim.Adam(p, amsgrad=True), FEW, "max_exp_avg_sq"),
        (torch.optim.Adagrad, FEW, "state of its optimizer torch.optim.adagrad.Adagrad"),
        (torch.optim.Adafactor, "everything", "hold the row_var, col_var of its"),
    ],
)
def test_a_state_that_is_not_recorded(
    tmp_path: Path, tiny: Any, optimizer: Any, variables: Any, missing: str
) -> None:
    built = optimizer(tiny.parameters())
    with capture(tiny, built, tmp_path / "run.zarr", variables=variables):
        tiny(torch.tensor([[1, 2]]), torch.tensor([[2, 3]]))["loss"].backward()
        built.step()
    with pytest.raises(VariableNotRecorded, match=missing):
        optimizer_state_at(tmp_path / "run.zarr", 1)
