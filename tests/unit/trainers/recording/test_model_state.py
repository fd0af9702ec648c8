"""The state of a whole model in a run, bit for bit that of a plain loop which records nothing."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import xarray as xr

torch = pytest.importorskip("torch")
from no_float64 import OnMps, on_mps  # noqa: E402
from stored_forms import stored_forms  # noqa: E402
from trainings import (  # noqa: E402
    HIDDEN,
    VOCAB,
    TinyModel,
    batches,
    scaled_run,
)
from transformers import GPT2Config  # noqa: E402

from trajstore import open_run, verify  # noqa: E402
from trajstore.errors import InvalidArgument, RecordingError, VariableNotRecorded  # noqa: E402
from trajstore.trainers import capture  # noqa: E402
from trajstore.trainers.recording.device_to_host import JoinedVector  # noqa: E402
from trajstore.trainers.recording.kept_state import ModelBuffers  # noqa: E402
from trajstore.trainers.recording.model_state import OF_ADAM  # noqa: E402
from trajstore.trainers.step_model import set_generators  # noqa: E402

pytestmark = pytest.mark.torch

STEPS = 5
GRADIENT = "grad"
State = dict[str, dict[str, Any]]


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


def train(model: Any, optimizer: Any) -> Iterator[State]:
    """A plain loop with accumulation and clipping; yields the state after each step."""
    torch.manual_seed(3)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
    for number in range(STEPS):
        optimizer.zero_grad()
        random = torch.get_rng_state()
        for batch in batches(2, number):
            (model(**batch)["loss"] / 2).backward()
        raw = {name: p.grad for name, p in model.named_parameters()}
        raw = {name: None if grad is None else grad.clone() for name, grad in raw.items()}
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.05)
        rates = [group["lr"] for group in optimizer.param_groups]
        optimizer.step()
        schedule.step()
        yield {
            "W": {name: p.detach().clone() for name, p in model.named_parameters()},
            GRADIENT: raw,
            "state": {
                name: copy.deepcopy(optimizer.state.get(p, {}))
                for name, p in model.named_parameters()
            },
            "step": {"lr": rates, "random": random},
            "buffers": {name: b.detach().clone() for name, b in model.named_buffers()},
        }


def bits(values: Any) -> np.ndarray[Any, Any]:
    """Bits as float32, with one NaN for all."""
    wide = np.asarray(values.float().numpy() if torch.is_tensor(values) else values, np.float32)
    return np.where(np.isnan(wide), np.float32(np.nan), wide).view(np.uint32)


def assert_parameters(ds: xr.Dataset, states: list[State]) -> None:
    """Compare every parameter, gradient and moment of each row with those of the plain loop."""
    for entry in ds.attrs["parameters"]:
        name = entry["name"]
        stored = ds.traj.parameter(name)[["W", GRADIENT, "exp_avg", "exp_avg_sq"]].load()
        shape = stored.W.shape[1:]
        for number, state in enumerate(states):
            now, gradient, moments = state["W"][name], state[GRADIENT][name], state["state"][name]
            expected = {
                "W": now,
                "grad": torch.full_like(now, float("nan")) if gradient is None else gradient,
                "exp_avg": moments.get("exp_avg", torch.zeros_like(now)),
                "exp_avg_sq": moments.get("exp_avg_sq", torch.zeros_like(now)),
            }
            for key, tensor in expected.items():
                np.testing.assert_array_equal(
                    bits(stored[key][number].values),
                    bits(tensor.reshape(shape)),
                    f"{key} of {name}",
                )


@pytest.mark.parametrize(
    ("dtype", "encoding"), [(torch.float32, "delta"), (torch.bfloat16, "compact")]
)
def test_every_step_is_that_of_a_plain_loop(dtype: Any, encoding: str, path: Path) -> None:
    torch.manual_seed(1)
    model = Model(dtype)
    plain = copy.deepcopy(model)
    before = {name: p.detach().clone() for name, p in plain.named_parameters()}
    states: list[State] = [
        {"W": before, GRADIENT: dict.fromkeys(before), "state": {key: {} for key in before}},
        *train(plain, adamw(plain)),
    ]
    small_run(path, model, encoding=encoding, max_grad_norm=0.05)
    ds = open_run(path, chunks=None)
    forms = stored_forms(path)
    computed = [forms[name] for name in ("params", *OF_ADAM[:2]) if name in forms]
    assert len(computed) == (3 if encoding == "compact" else 0)
    assert not any(each["corrected"] or each["differences"] for each in computed)
    assert not verify(path).problems
    assert_parameters(ds, states)
    of_steps = ds[["params_lr", "params_count", "random_state", "buffers"]].load()
    for number, state in enumerate(states[1:], 1):
        row = of_steps.isel(step=number)
        assert row.params_lr.values.tolist() == state["step"]["lr"]
        counts = [float(state["state"][name].get("step", 0)) for name in row.parameter.values]
        assert row.params_count.values.tolist() == counts
        assert row.random_state.values.tolist() == state["step"]["random"].tolist()
        buffers = torch.cat([b.double().flatten() for b in state["buffers"].values()])
        assert row.buffers.values.tolist() == buffers.tolist()
    assert {"unused", "seldom"} < set(ds.parameter.values[ds.params_count[-1] < STEPS].tolist())


def test_attributes_describe_the_configuration(recorded: Any) -> None:
    described = open_run(recorded.path).attrs["model_config"]
    assert described["class"] == "GPT2LMHeadModel"
    assert GPT2Config.from_dict(described["config"]).to_dict() == recorded.model.config.to_dict()


def test_attributes_describe_the_parameters(tmp_path: Path) -> None:
    ds = small_run(tmp_path / "run.zarr", Model())
    table = {entry["name"]: entry for entry in ds.attrs["parameters"]}
    assert list(table) == ds.parameter.values.tolist()
    assert table["embedding.weight"]["tied"] == ["head.weight"]
    assert table["embedding.weight"]["variable"] == "W"
    assert "offset" not in table["embedding.weight"]
    assert table["unused"] == {
        "name": "unused", "shape": [2, 2, 2], "dtype": "float32", "variable": "params",
        "group": 1, "position": 3, "requires_grad": True, "offset": 3,
    }  # fmt: skip
    assert table["fixed"]["group"] is None
    assert not table["fixed"]["requires_grad"]
    assert table["seldom"]["shape"] == []
    decays = [group["hyperparameters"]["weight_decay"] for group in ds.attrs["optimizer"]["groups"]]
    assert decays == [0.1, 0.0]
    assert [entry["name"] for entry in ds.attrs["buffers"]] == [
        "norm.running_mean", "norm.running_var", "norm.num_batches_tracked",
    ]  # fmt: skip
    tied = ds.traj.parameter("head.weight")
    assert tied.W.shape == (STEPS + 1, VOCAB, HIDDEN)
    assert tied.attrs["recording"]["parameter"] == "embedding.weight"
    bias = open_run(tmp_path / "run.zarr", chunks=None).traj.parameter("mix.bias")
    assert bias.W.dims == ("step", "row", "column")
    assert bias.W.chunks is not None
    assert bias.W.shape == (STEPS + 1, HIDDEN, 1)
    assert bias.attrs["optimizer"]["hyperparameters"]["weight_decay"] == 0.0
    np.testing.assert_array_equal(bias.lr, ds.params_lr[:, 1])
    with pytest.raises(InvalidArgument, match=r"no parameter 'mix.bia' \(did you mean 'mix.bias'"):
        ds.traj.parameter("mix.bia")
    with pytest.raises(InvalidArgument, match="select parts of the result"):
        ds.isel(element=slice(3)).traj.parameter("mix.bias")
    with pytest.raises(VariableNotRecorded, match="variables='everything'"):
        ds.drop_attrs().traj.parameter("mix.bias")


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
    same = (ds.params.values[1:] == ds.params.values[:-1]).all(1)
    np.testing.assert_array_equal(same, skipped[1:])
    taken = ~skipped
    taken[0] = False
    whole = np.hypot(*(np.linalg.norm(v.reshape(len(v), -1).astype("f8"), axis=1)
                       for v in (ds.params_grad.values, ds.grad.values)))  # fmt: skip
    np.testing.assert_allclose(whole[taken], ds.grad_norm.values[taken], rtol=1e-5)
    assert (ds.params_count[:, 0] == np.cumsum(taken)).all()
    assert ds.scale.values[1] == 2.0**20
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


def test_a_run_is_resumed_with_the_same_parameters(path: Path) -> None:
    model = Model()
    optimizer = adamw(model)
    small_run(path, model, optimizer)
    resumed = {"resume": True, "first_step": STEPS}
    ds = small_run(path, model, optimizer, **resumed)
    assert ds.step.values.tolist() == list(range(2 * STEPS + 1))
    np.testing.assert_array_equal(
        ds.traj.parameter("mix.weight").W[-1], model.mix.weight.detach().numpy()
    )
    assert not verify(path).problems
    model.unused = torch.nn.Parameter(torch.ones(8))
    with pytest.raises(InvalidArgument, match="parameter 1 of the model is"):
        small_run(path, model, adamw(model), resume=True, first_step=2 * STEPS)


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
    monkeypatch.setattr(torch.mps, "get_rng_state", lambda: of_device[-1])
    monkeypatch.setattr(torch.mps, "set_rng_state", of_device.append)

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


def test_the_host_waits_once_for_a_vector_and_for_all_buffers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(OnMps, "waits", 0)
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
