"""The state of an optimizer, and parameters of several types, are those of the training."""

from __future__ import annotations

import copy
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from trajstore.errors import InvalidArgument, VariableNotRecorded

torch = pytest.importorskip("torch")
from small_trainings import same_values  # noqa: E402
from trainings import (  # noqa: E402
    RECORDED_STEPS,
    OwnModel,
    Recorded,
    same,
)

from trajstore import open_run, verify  # noqa: E402
from trajstore.store.reading.run_info import information  # noqa: E402
from trajstore.store.writing.new_run import vector_rule  # noqa: E402
from trajstore.trainers import capture, model_at, optimizer_state_at, restore  # noqa: E402
from trajstore.trainers.rounded_optimizer import RoundedAdamW  # noqa: E402

pytestmark = pytest.mark.torch

FEW = ("W", "params", "params_lr")


def test_the_state_at_a_step_is_that_of_torch_which_loads_it(recorded: Any) -> None:
    model = model_at(recorded.path, 3)
    matrices = [p for p in model.parameters() if p.ndim > 1]
    vectors = [p for p in model.parameters() if p.ndim < 2]
    optimizer = torch.optim.AdamW([{"params": matrices}, {"params": vectors}])
    for step in (1, 3, RECORDED_STEPS):
        assert same(optimizer_state_at(recorded.path, step), recorded.optimizers[step])
        optimizer.load_state_dict(optimizer_state_at(recorded.path, step))
        assert same(optimizer.state_dict(), recorded.optimizers[step])
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


MIXED_STEPS = 5
TYPES = {
    "embedding.weight": ("bfloat16", "float32"),
    "norm.weight": ("float32", "bfloat16"),
    "norm.bias": ("float32", "bfloat16"),
    "late.weight": ("bfloat16", "float32"),
    "late.bias": ("bfloat16", "float32"),
    "fixed": ("float16", "float16"),
}
"""Types of each parameter and of its moments."""


class Model(torch.nn.Module):
    """bfloat16 weights, float32 normalization, a layer without gradient in even steps."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = torch.nn.Embedding(11, 4, dtype=torch.bfloat16)
        self.norm = torch.nn.LayerNorm(4)
        self.late = torch.nn.Linear(4, 4, dtype=torch.bfloat16)
        self.fixed = torch.nn.Parameter(torch.rand(3).half(), requires_grad=False)

    def forward(self, ids: Any, *, whole: bool) -> Any:
        hidden = self.norm(self.embedding(ids))
        return (self.late(hidden) if whole else hidden) @ self.embedding.weight.T


def built() -> tuple[Any, Any]:
    model = Model()
    matrices = [model.embedding.weight, *model.late.parameters()]
    norms = {"params": list(model.norm.parameters()), "state_dtype": "bfloat16"}
    return model, RoundedAdamW([{"params": matrices}, norms], lr=0.05, state_dtype="float32")


def train(recorded: Recorded, first: int = 0) -> list[dict[str, Any]]:
    """Train with a gradient scaler; return the unscaled gradients of each step."""
    model, optimizer = recorded.model, recorded.optimizer
    gradients = []
    scaler = torch.amp.GradScaler("cpu", init_scale=1000.0)
    with capture(
        model, optimizer, recorded.path, variables="everything", encoding="compact", scaler=scaler,
        parameter="embedding.weight", resume=first > 0, first_step=first,
    ) as recorder:  # fmt: skip
        recorded.keep()
        for step in range(first, MIXED_STEPS):
            ids = (torch.arange(10).reshape(2, 5) * (step + 1)) % 11
            logits = model(ids, whole=step % 2 == 1).float()
            loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), ids.flatten())
            scaler.scale(loss).backward()
            recorder.observe(loss=loss)
            scaler.unscale_(optimizer)
            gradients.append({n: copy.deepcopy(p.grad) for n, p in model.named_parameters()})
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            recorded.keep()
    return gradients


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> tuple[Recorded, list[dict[str, Any]]]:
    torch.manual_seed(2)
    model, optimizer = built()
    path = tmp_path_factory.mktemp("mixed") / "run.zarr"
    recorded = Recorded(path=path, model=model, optimizer=optimizer)
    return recorded, train(recorded)


def test_gradients_are_unscaled_in_their_own_type_if_others_have_none(tmp_path: Path) -> None:
    model = torch.nn.Sequential(torch.nn.Embedding(11, 4), torch.nn.Linear(4, 11)).bfloat16()
    model.unused = torch.nn.Parameter(torch.ones(3))  # float32, so the vector is
    optimizer = torch.optim.AdamW(model.parameters())
    scaler = torch.amp.GradScaler("cpu", init_scale=1000.0)
    path = tmp_path / "run.zarr"
    with capture(
        model, optimizer, path, variables="everything", scaler=scaler, parameter="0.weight"
    ) as recorder:
        ids = torch.arange(11)
        loss = torch.nn.functional.cross_entropy(model(ids).float(), ids.flip(0))
        scaler.scale(loss).backward()
        recorder.observe(loss=loss)
        scaler.unscale_(optimizer)
        expected = model[1].weight.grad.float().numpy()
        scaler.step(optimizer)
        scaler.update()
    found = open_run(path).traj.parameter("1.weight").grad[1].values
    np.testing.assert_array_equal(found, expected)


def test_every_tensor_of_a_step_has_its_own_type(run: Any) -> None:
    recorded, gradients = run
    ds = open_run(recorded.path)
    vectors = ("params", "params_grad", "params_exp_avg", "params_exp_avg_sq")
    assert {ds[name].attrs["native_dtype"] for name in vectors} == {"float32"}
    assert not verify(recorded.path).problems
    for step in range(MIXED_STEPS + 1):
        model = model_at(recorded.path, step, constructor=Model)
        assert same(dict(model.state_dict()), dict(recorded.models[step]))
        state = optimizer_state_at(recorded.path, step)["state"]
        assert same(state, recorded.optimizers[step]["state"])
    for name, (weights, moments) in TYPES.items():
        one = ds.traj.parameter(name)
        held = [one[key].attrs["native_dtype"] for key in ("W", "grad", "exp_avg", "exp_avg_sq")]
        assert held == [weights, weights, moments, moments], name
        for step, found in enumerate(gradients, 1):
            grad = np.nan if found[name] is None else found[name].float().numpy().ravel()
            np.testing.assert_array_equal(one.grad[step].values.ravel(), grad, name)


def test_the_encoding_compact_computes_no_vectors_of_several_types(run: Any) -> None:
    recorded, _ = run
    facts, notes = information(recorded.path), []
    kinds = {name: array["kind"] for name, array in facts["arrays"].items()}
    assert (kinds["W"], kinds["params"]) == ("computed", "delta")
    types = {name: array["native_dtype"] for name, array in facts["arrays"].items()}
    assert vector_rule(facts, types, notes.append) is None
    assert "have several types: bfloat16, float16, float32" in notes[0]


def test_a_loop_continues_with_the_types_of_the_run(run: Any, tmp_path: Path) -> None:
    recorded, _ = run
    path = Path(shutil.copytree(recorded.path, tmp_path / "run.zarr"))
    model, optimizer = built()
    assert restore(path, model, optimizer, step=3) == 3
    train(Recorded(path=path, model=model, optimizer=optimizer), first=3)
    same_values(recorded.path, path)


def test_a_step_may_have_gradients_of_one_type_only(tmp_path: Path) -> None:
    model, optimizer = built()
    norms = []
    with capture(
        model, optimizer, tmp_path / "run.zarr", variables="everything",
        parameter="embedding.weight", max_grad_norm=0.05,
    ) as recorder:  # fmt: skip
        for both in (False, True, False):
            loss = model.embedding.weight.float().square().sum()
            loss = loss + model.norm.weight.sum() if both else loss
            loss.backward()
            recorder.observe(loss=loss)
            norms.append(torch.nn.utils.clip_grad_norm_(model.parameters(), 0.05).item())
            optimizer.step()
            optimizer.zero_grad()
    ds = open_run(tmp_path / "run.zarr")
    assert ds.grad_norm[1:].values.tolist() == norms
    assert ds.grad_norm.native_dtype == "float32"
    assert (ds.clip_coef[1:] < 1).all()
