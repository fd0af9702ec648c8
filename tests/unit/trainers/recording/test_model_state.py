"""The state of a whole model in a run, bit for bit that of a plain loop which records nothing."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import xarray as xr
from no_float64 import OnMps, on_mps
from stored_forms import stored_forms
from trainings import (
    HIDDEN,
    TinyModel,
    batches,
    scaled_run,
)
from transformers import GPT2Config

from trajstore import open_run, verify
from trajstore.errors import InvalidArgument, RecordingError, VariableNotRecorded
from trajstore.trainers import capture
from trajstore.trainers.recording.device_to_host import JoinedVector
from trajstore.trainers.recording.kept_state import ModelBuffers
from trajstore.trainers.recording.model_state import OF_ADAM
from trajstore.trainers.step_model import set_generators

STEPS = 5


class Model(TinyModel):
    """With dropout, running statistics, and parameters that are not trained, not used, seldom used.

    The embedding and the head are tied.
    """

    def __init__(self, dtype: Any = torch.float32, dropout: float = 0.1) -> None:
        super().__init__()
        self.norm = torch.nn.BatchNorm1d(HIDDEN)
        self.drop = torch.nn.Dropout(dropout)
        self.fixed = torch.nn.Parameter(torch.full((3,), 2.0), requires_grad=False)
        self.unused = torch.nn.Parameter(torch.ones(2, 2, 2))
        self.seldom = torch.nn.Parameter(torch.tensor(0.5))
        self.passes = 0
        self.to(dtype)

    def forward(self, input_ids: Any, labels: Any = None) -> dict[str, Any]:
        self.passes += 1
        hidden = self.drop(torch.tanh(self.mix(self.embedding(input_ids)))).flatten(0, 1)
        hidden = self.norm(hidden)
        if self.passes % 4 == 0:
            hidden = hidden * self.seldom
        logits = self.head(hidden)
        loss = torch.nn.functional.cross_entropy(logits.float(), labels.flatten())
        return {"loss": loss, "logits": logits.view(*input_ids.shape, -1)}


def adamw(model: Any) -> Any:
    """Two groups, with their own rates and decay; `fixed` is in none."""
    matrices = [model.embedding.weight, model.mix.weight]
    others = [model.mix.bias, *model.norm.parameters(), model.unused, model.seldom]
    groups = [{"params": matrices, "lr": 0.01}, {"params": others, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=0.003, weight_decay=0.1)


def train(model: Any, optimizer: Any) -> Iterator[dict[str, Any]]:
    """A plain loop with accumulation and clipping; yields what each step used."""
    torch.manual_seed(3)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
    for number in range(STEPS):
        optimizer.zero_grad()
        random = torch.get_rng_state()
        for batch in batches(2, number):
            (model(**batch)["loss"] / 2).backward()
        gradients = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.05)
        rates = [group["lr"] for group in optimizer.param_groups]
        optimizer.step()
        schedule.step()
        names = {p: name for name, p in model.named_parameters()}
        counts = {names[p]: float(kept.get("step", 0)) for p, kept in optimizer.state.items()}
        yield {"grad": gradients, "rates": rates, "random": random, "counts": counts}


def test_every_step_is_that_of_a_plain_loop(path: Path) -> None:
    """The gradients before clipping, and what is restored with weights, moments and buffers."""
    torch.manual_seed(1)
    model = Model(torch.bfloat16)
    plain = copy.deepcopy(model)
    states = [*train(plain, adamw(plain))]
    ds = small_run(path, model, encoding="compact", max_grad_norm=0.05).load()
    assert not verify(path).problems
    forms = stored_forms(path)
    for name in ("params", *OF_ADAM[:2]):
        assert (forms[name]["corrected"], forms[name]["differences"]) == (0, 0)
    for name, last in plain.named_parameters():
        stored = ds.traj.parameter(name)
        assert np.isnan(stored.grad[0]).all()
        assert torch.equal(torch.from_numpy(stored.W.values[-1]).view(last.shape), last.float())
        for number, state in enumerate(states, 1):
            gradient = state["grad"].get(name)
            wide = torch.full_like(last, np.nan) if gradient is None else gradient
            np.testing.assert_array_equal(
                stored.grad.values[number].ravel(), wide.detach().float().flatten(), name
            )
    for number, state in enumerate(states, 1):
        row = ds.isel(step=number)
        assert row.params_lr.values.tolist() == state["rates"]
        assert row.random_state.values.tolist() == state["random"].tolist()
        counts = [state["counts"].get(name, 0) for name in row.parameter.values]
        assert row.params_count.values.tolist() == counts
    buffers = torch.cat([buffer.double().flatten() for buffer in plain.buffers()])
    assert ds.buffers.values[-1].tolist() == buffers.tolist()
    assert {"unused", "seldom"} < set(ds.parameter.values[ds.params_count[-1] < STEPS].tolist())


def test_attributes_describe_configuration_and_parameters(recorded: Any, tmp_path: Path) -> None:
    described = open_run(recorded.path).attrs["model_config"]
    assert described["class"] == "GPT2LMHeadModel"
    assert GPT2Config.from_dict(described["config"]).to_dict() == recorded.model.config.to_dict()
    ds = small_run(tmp_path / "run.zarr", Model())
    table = {entry["name"]: entry for entry in ds.attrs["parameters"]}
    assert list(table) == ds.parameter.values.tolist()
    assert table["embedding.weight"]["tied"] == ["head.weight"]
    assert "offset" not in table["embedding.weight"]
    assert table["unused"] == {
        "name": "unused", "shape": [2, 2, 2], "dtype": "float32", "variable": "params",
        "group": 1, "position": 3, "requires_grad": True, "offset": 3,
    }  # fmt: skip
    assert (table["fixed"]["group"], table["fixed"]["requires_grad"]) == (None, False)
    assert table["seldom"]["shape"] == []
    decays = [group["hyperparameters"]["weight_decay"] for group in ds.attrs["optimizer"]["groups"]]
    assert decays == [0.1, 0.0]
    assert [entry["name"] for entry in ds.attrs["buffers"]] == [
        "norm.running_mean", "norm.running_var", "norm.num_batches_tracked",
    ]  # fmt: skip
    tied = ds.traj.parameter("head.weight")
    assert tied.attrs["recording"]["parameter"] == "embedding.weight"
    bias = open_run(tmp_path / "run.zarr", chunks=None).traj.parameter("mix.bias")
    assert bias.W.chunks is not None
    assert dict(bias.W.sizes) == {"step": STEPS + 1, "row": HIDDEN, "column": 1}
    assert bias.attrs["optimizer"]["hyperparameters"]["weight_decay"] == 0.0
    np.testing.assert_array_equal(bias.lr, ds.params_lr[:, 1])
    for error, wrong, name, message in (
        (InvalidArgument, ds, "mix.bia", "did you mean 'mix.bias'"),
        (InvalidArgument, ds.isel(element=slice(3)), "mix.bias", "select parts of the result"),
        (VariableNotRecorded, ds.drop_attrs(), "mix.bias", "variables='everything'"),
    ):
        with pytest.raises(error, match=message):
            wrong.traj.parameter(name)


def small_run(path: Path, model: Any, optimizer: Any = None, **options: Any) -> xr.Dataset:
    optimizer = optimizer or adamw(model)
    options = {"variables": "everything", "block_rows": 4, "fsync": False} | options
    with capture(model, optimizer, path, **options):
        for _ in train(model, optimizer):
            pass
    return open_run(path)


def test_a_model_without_state_records_parameters_only(tmp_path: Path) -> None:
    model = TinyModel()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    ds = small_run(tmp_path / "run.zarr", model, optimizer, every=2)
    assert ds.step.values.tolist() == [0, 2, 4, 5]
    recorded = {name for name in ds.data_vars if name.startswith("params")}
    assert recorded == {"params", "params_grad", "params_lr"}
    assert not {"random_state", "buffers", "scale", "batch", "exp_avg"} & set(ds.variables)
    assert "random_state" not in str(ds.attrs["notes"])
    assert "buffers" not in ds.attrs
    bias = ds.traj.parameter("mix.bias")
    named = {"W", "grad", "loss", "lr", "hyperparameters", "grad_norm", "clip_coef"}
    assert set(bias.data_vars) == named


def test_a_scaler_that_skips_steps(tmp_path: Path) -> None:
    scaled_run(tmp_path / "run.zarr", fused=True, variables="everything,norms,W_step_norm")
    ds = open_run(tmp_path / "run.zarr", chunks=None)
    skipped = ds.skipped.values == 1
    assert skipped[1]
    assert not skipped[1:].all()
    taken = ~skipped
    taken[0] = False
    whole = np.hypot(*(np.linalg.norm(v.reshape(len(v), -1).astype("f8"), axis=1)
                       for v in (ds.params_grad.values, ds.grad.values)))  # fmt: skip
    np.testing.assert_allclose(whole[taken], ds.grad_norm.values[taken], rtol=1e-5)
    assert (ds.params_count[:, 0] == np.cumsum(taken)).all()
    assert ds.scale.values[1] == 2.0**18
    assert np.isnan(ds.scale.values[0])
    assert (ds.param_update_norm.values[skipped] == 0).all()
    assert np.isnan(ds.param_update_lost.values[skipped]).all()
    moved = np.linalg.norm(ds.W_step_norm.values.astype("f8"), axis=1)
    np.testing.assert_allclose(ds.param_update_norm[taken, 0], moved[taken], rtol=1e-6)
    gradients = np.linalg.norm(ds.param_grad_norm.values[taken].astype("f8"), axis=1)
    np.testing.assert_allclose(gradients, ds.grad_norm.values[taken], rtol=1e-5)


def test_models_that_cannot_be_recorded_whole_are_refused(path: Path) -> None:
    def refused(message: str, model: Any, *optimizer: Any, **options: Any) -> None:
        with pytest.raises((RecordingError, InvalidArgument), match=message):
            small_run(path, model, *optimizer, **options)

    for kind, device, message in (
        (torch.complex64, "cpu", "more has the type torch.complex64, expected one of"),
        (torch.bfloat16, "meta", "more is on meta, but mix.weight is on cpu; move all"),
    ):
        model = TinyModel()
        model.more = torch.nn.Parameter(torch.zeros(2, dtype=kind, device=device))
        refused(message, model, torch.optim.SGD(model.parameters(), lr=0.1))
    refused(r"got a list of ids, .* leave out tokens", Model(), tokens=[1, 2])
    two = ["embedding.weight", "mix.weight"]
    refused("recorded with one matrix, got 2", Model(), parameter=two)
    model, alone = Model(), torch.nn.Parameter(torch.ones(2))
    more = torch.optim.SGD([*model.parameters(), alone], lr=0.1)
    refused("has 1 parameters that Model lacks", model, more)
    for first in (torch.tensor([1j]), torch.tensor([2**53 + 1])):
        model.register_buffer("running_mean", first)
        refused(r"running_mean has values of .* does not have", model, adamw(model), strict=True)
    assert not path.exists()


def test_parameters_of_another_optimizer_are_noted(tmp_path: Path) -> None:
    model, notes = Model(), []
    small_run(
        tmp_path / "run.zarr", model, torch.optim.SGD(model.mix.parameters()), on_note=notes.append,
        parameter="mix.weight",
    )  # fmt: skip
    assert any("lacks 5 parameters with requires_grad=True (unused)" in note for note in notes)


@pytest.mark.parametrize(
    ("late", "message"),
    [
        ("dropout", "draws random numbers"),
        ("buffer", "the buffer table changes"),
        ("type", "params_grad: fixed is now float64, but was float32 in the first row"),
    ],
)
def test_state_that_begins_to_change_later(late: str, message: str, tmp_path: Path) -> None:
    model = Model(dropout=0.0)
    model.register_buffer("table", torch.zeros(2))
    optimizer = adamw(model)

    def run() -> None:
        with capture(model, optimizer, tmp_path / "run.zarr", variables="everything", strict=True):
            for _ in train(model, optimizer):
                if late == "dropout":
                    model.drop.p = 0.1
                elif late == "type":
                    model.fixed.data = model.fixed.data.double()
                else:
                    model.table += 1

    with pytest.raises(RecordingError, match=message):
        run()
    assert open_run(tmp_path / "run.zarr").step.values.tolist() == [0, 1]


def test_steps_without_a_gradient_are_skipped_steps_of_the_parameter(own: Any) -> None:
    stored = open_run(own.path).traj.parameter("sometimes.weight")
    assert stored.skipped[1:].values.tolist() == [0, 1, 0, 1, 0, 1]
    exact = stored.traj.exact_moments().exact_exp_avg
    np.testing.assert_allclose(exact, stored.exp_avg.values[-exact.sizes["step"] :], atol=1e-8)
    assert "skipped" not in open_run(own.path).traj.parameter("head.weight")
    chosen = open_run(own.path).sel(parameter=["sometimes.weight"])
    chosen = chosen.traj.parameter("sometimes.weight")
    assert chosen.skipped.equals(stored.skipped)


def test_a_device_without_float64_has_the_rows_of_the_cpu(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rate and counts are tensors on the device; dropout draws from the generator of the CPU."""
    of_device = [torch.arange(44, dtype=torch.uint8)]
    calls = {"get_rng_state": lambda: of_device[-1], "set_rng_state": of_device.append}
    monkeypatch.setattr(torch, "mps", SimpleNamespace(**vars(torch.mps) | calls))

    def run(path: Path, model: Any, rate: Any) -> xr.Dataset:
        torch.manual_seed(1)
        optimizer = torch.optim.AdamW(model.parameters(), lr=rate, foreach=False)
        with capture(model, optimizer, path, variables="everything", max_grad_norm=0.05):
            for batch in batches(STEPS):
                model(**batch)["loss"].backward()
                torch.nn.utils.clip_grad_norm_(model.parameters(), 0.05, foreach=False)
                optimizer.step()
                optimizer.zero_grad()
                for state in optimizer.state.values():  # as fused optimizers have it
                    state["step"] = state["step"].as_subclass(type(rate))
        return open_run(path, chunks=None)

    plain, rate = Model(), torch.tensor(0.01)
    model = on_mps(copy.deepcopy(plain))
    expected = run(tmp_path / "cpu.zarr", plain, rate)
    mps_run = run(tmp_path / "mps.zarr", model, rate.as_subclass(OnMps))
    states, mps_run = mps_run.random_state, mps_run.isel(byte=slice(44, None))
    for name in expected.data_vars:
        np.testing.assert_array_equal(mps_run[name], expected[name], name)
    set_generators(model, states[3].values)
    drawn = [*of_device[1].tolist(), *torch.get_rng_state().tolist()]
    assert drawn == states[3].values.tolist() != states[2].values.tolist()
    assert drawn[:44] == list(range(44))
    with pytest.raises(InvalidArgument, match="random_state: got 10 bytes, expected 5100 on mps"):
        set_generators(model, states[3].values[:10])


def test_the_host_waits_once_for_a_vector_and_for_all_buffers() -> None:
    OnMps.waits = 0
    like = [torch.arange(6.0).view(2, 3), torch.ones(2), torch.full((2,), 7.0)]
    there = [tensor.as_subclass(OnMps) for tensor in like]
    place = torch.empty(10)
    vector = JoinedVector(
        like=there, tensors=[there[0].t(), None, there[2]], dtype=torch.float32, missing=-1
    )
    vector.copy_to(place)
    assert place.tolist() == [0, 3, 1, 4, 2, 5, -1, -1, 7, 7]
    assert OnMps.waits == 1
    model = torch.nn.Module()
    for name in ("a", "b", "same"):
        model.register_buffer(name, torch.zeros(2))
    buffers = ModelBuffers(on_mps(model))
    model.a += 1
    model.b += 2
    OnMps.waits = 0
    values: Any = buffers.after_step(first=True)
    assert OnMps.waits == 1
    assert values.tolist() == [1, 1, 2, 2]
