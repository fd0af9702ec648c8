"""Models and states of recorded steps have the recorded bits, in memory, a loop and a folder."""

from __future__ import annotations

import copy
import inspect
import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from altered_runs import change_attributes
from bits_and_calls import Cli
from damage import contents
from safetensors import safe_open
from safetensors.torch import load_file
from small_trainings import same_values
from trainings import (
    RECORDED_STEPS,
    STEPS,
    Accumulated,
    OwnModel,
    Recorded,
    gpt2,
    same,
    take_steps,
    tiny_run,
)
from transformers import AutoModelForCausalLM, AutoTokenizer

from trajstore import open_run, sample_run, verify
from trajstore.errors import (
    InvalidArgument,
    NothingToResume,
    RunExists,
    StepNotFound,
    VariableNotRecorded,
)
from trajstore.store.reading.run_info import information
from trajstore.store.writing.new_run import vector_rule
from trajstore.trainers import (
    capture,
    checkout,
    model_at,
    models,
    optimizer_state_at,
    restore,
)
from trajstore.trainers.rounded_optimizer import RoundedAdamW


def test_models_of_all_steps_are_one_that_changes_in_place(recorded: Any, own: Any) -> None:
    random = torch.get_rng_state()
    for run, constructor in ((recorded, None), (own, OwnModel)):
        first = None
        for step, model in models(run.path, constructor=constructor):
            first = first or model
            assert model is first
            assert same(dict(model.state_dict()), dict(run.models[step])), step
            assert not model.training
            parameters = [*model.parameters()]
            assert [p.requires_grad for p in parameters] == [
                p.requires_grad for p in run.model.parameters()
            ]
            assert all(p.grad is None for p in parameters)
            model.train()  # undone at the next step, like the gradient
            sum(p.sum() for p in parameters if p.requires_grad).backward()
            model.half()  # replaces the buffers
        assert step == RECORDED_STEPS
    assert [step for step, _ in models(recorded.path, [5, 1])] == [1, 5]
    model_at(recorded.path, 1)
    assert torch.equal(torch.get_rng_state(), random)


def test_buffers_that_do_not_change_have_the_type_of_the_training(tmp_path: Any) -> None:
    config = transformers.LlamaConfig(
        vocab_size=17, hidden_size=8, intermediate_size=8, num_hidden_layers=1,
        num_attention_heads=2, max_position_embeddings=16, bos_token_id=None, eos_token_id=None,
    )  # fmt: skip
    trained = transformers.LlamaForCausalLM(config).to(torch.bfloat16)
    optimizer = torch.optim.AdamW(trained.parameters())
    ids = torch.arange(16)[None]
    with capture(trained, optimizer, tmp_path / "run.zarr", variables="everything"):
        trained(ids, labels=ids).loss.backward()
        optimizer.step()
    model = model_at(tmp_path / "run.zarr", 1)
    assert same(dict(model.named_buffers()), dict(trained.named_buffers()))
    assert same(model(ids).logits, trained.eval()(ids).logits)


def test_a_missing_constructor_and_a_wrong_one(own: Any, recorded: Any) -> None:
    def untied() -> Any:
        model = gpt2()
        model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight.detach().clone())
        return model

    for path, constructor, message in (
        (own.path, None, "does not record the configuration.*constructor"),
        (own.path, lambda: "model", r"returned str, expected a torch.nn.Module"),
        (own.path, gpt2, "the run has no transformer.wte.weight.*more diff"),
        (recorded.path, untied, "wte.weight and lm_head.weight are one parameter"),
    ):
        with pytest.raises(InvalidArgument, match=message):
            model_at(path, 1, constructor=constructor)


def test_another_version_of_transformers_is_named(recorded: Any, tmp_path: Path) -> None:
    run = Path(shutil.copytree(recorded.path, tmp_path / "run"))
    version = transformers.__version__
    for kind, layers, message in (
        ("GPT2LMHeadModel", 3, rf"no transformer.h.2.*99.0.*{version}: install"),
        ("GPT9", 2, rf"GPT9.*{version} does not have.*99.0"),
        ("Trainer", 2, rf"Trainer.*{version} does not have.*99.0"),
    ):
        model = json.loads((run / "zarr.json").read_text())["attributes"]["model_config"]
        model |= {"class": kind, "transformers": "99.0"}
        model["config"]["n_layer"] = layers
        change_attributes(run, lambda root, model=model: root.update(model_config=model))
        with pytest.raises(InvalidArgument, match=message):
            model_at(run, 1)


def test_a_missing_step_and_a_run_of_another_tier(recorded: Any, tmp_path: Any) -> None:
    run = sample_run(tmp_path / "run.zarr")
    part = tiny_run(tmp_path / "part.zarr", count=1, variables=("W", "params_grad"))
    step: Any
    for path, step, kind, message in (
        (recorded.path, 9, StepNotFound, "no row of step 9; the nearest: 6"),
        (recorded.path, "1", InvalidArgument, "got step='1', expected a whole number"),
        (run, 1, VariableNotRecorded, "not hold all parameters.*tier everything"),
        (part, 1, VariableNotRecorded, "not hold all parameters"),
    ):
        with pytest.raises(kind, match=message):
            model_at(path, step)
    with pytest.raises(StepNotFound, match="no row of step -1; the nearest: 0"):
        next(models(recorded.path, [2, -1]))
    for steps in ([1.0], [True], ["1"], [[1]]):
        with pytest.raises(InvalidArgument, match=r"steps: got .* at position 0"):
            next(models(recorded.path, steps))


def test_transformers_loads_the_model_the_tokenizer_and_the_optimizer(
    recorded: Any, tmp_path: Path, trajstore_cli: Cli
) -> None:
    folder = tmp_path / "step"
    found = checkout(recorded.path, folder, step=4, optimizer=True)
    model = AutoModelForCausalLM.from_pretrained(folder)
    assert same(dict(model.state_dict()), dict(recorded.models[4]))
    assert model.generation_config.eos_token_id is None
    text = "a 'b' , c .\n\t" + "".join(map(chr, range(128)))
    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert tokenizer(text)["input_ids"] == [*text.encode()]
    assert tokenizer.decode([*text.encode()]) == text
    with pytest.raises(Exception, match="UNK"):
        tokenizer("é")
    assert same(torch.load(folder / "optimizer.pt"), recorded.optimizers[4])
    assert (found.tokenizer, found.notes) == ("ascii", ())
    with pytest.raises(RunExists, match="already exists"):
        checkout(recorded.path, folder, step=4)
    trajstore_cli("checkout", recorded.path, "--at", 4, "-o", folder, "--overwrite")
    assert not (folder / "optimizer.pt").exists()
    (folder / "config.json").unlink()
    with pytest.raises(RunExists, match="is not a checkout and is not overwritten; choose another"):
        checkout(recorded.path, folder, step=4, overwrite=True)


def test_a_model_that_transformers_cannot_load(
    own: Any, tmp_path: Path, trajstore_cli: Cli
) -> None:
    folder = tmp_path / "step"
    with pytest.raises(InvalidArgument, match=r"give constructor=…"):
        checkout(own.path, folder, step=4)
    assert [*tmp_path.iterdir()] == []
    checkout(own.path, folder, step=3, constructor=OwnModel)
    how = ("--constructor", f"{inspect.getsourcefile(OwnModel)}:OwnModel", "--overwrite")
    said = trajstore_cli("checkout", own.path, "--at", 4, "-o", folder, *how).stdout
    assert "Wrote" in said
    assert "model.pt of step 4" in said
    assert same(torch.load(folder / "model.pt"), dict(own.models[4]))


@pytest.mark.parametrize("name", ["step.PTH", "step.safetensors"])
def test_the_weights_of_a_step_in_a_file(
    name: str, own: Any, recorded: Any, tmp_path: Path, trajstore_cli: Cli
) -> None:
    told = Path(shutil.copytree(recorded.path, tmp_path / "told.zarr"))
    trajstore_cli("annotate", told, "--tokenizer", "ascii")
    change_attributes(told, lambda root: root.update(config={"data": {"target_offset": 2}}))
    file = tmp_path / name
    assert checkout(own.path, file, step=4, constructor=OwnModel).strict
    words = ("checkout", own.path, "--at", 4, "-o", file, "--overwrite")
    assert ", strict=False)" in trajstore_cli(*words).stdout
    for run, kept, model, strict in (
        (own.path, own.models[4], OwnModel(), False),  # with buffers
        (told, recorded.models[4], gpt2(), True),  # with tied weights
    ):
        found = checkout(run, file, step=4, overwrite=True)
        model.load_state_dict(torch.load(file) if name == "step.PTH" else load_file(file))
        assert same(dict(model.state_dict()), dict(kept))
        assert found.strict == strict == (not any("never changed" in n for n in found.notes))
        (other := tmp_path / "other").touch()
        assert file.stat().st_mode == other.stat().st_mode
    with pytest.raises(InvalidArgument, match=r"expected a folder, NAME\.pt or NAME\.safetensors"):
        checkout(own.path, tmp_path / "step.bin", step=4)
    assert any("the token after next" in note for note in found.notes)
    if name == "step.PTH":
        assert "the file has no token_text" in found.notes[-1]
    else:
        with safe_open(file, "pt") as opened:
            assert json.loads(opened.metadata()["token_text"])[ord("a")] == "a"
    with pytest.raises(InvalidArgument, match="weights only; give a folder"):
        checkout(own.path, file, step=4, optimizer=True, overwrite=True)


@pytest.fixture
def accumulated(tmp_path: Path) -> Path:
    """A loop with dropout and buffers."""
    Accumulated().train(path := tmp_path / "run.zarr", variables="everything")
    return path


def test_what_cannot_be_restored(accumulated: Path) -> None:
    loop = Accumulated()
    other = torch.optim.RAdam(loop.model.parameters())
    for optimizer, step, message in (
        (loop.optimizers, STEPS, f"does not hold step {STEPS + 1}"),  # it draws numbers
        (other, None, "the optimizer is RAdam, and that of .* was SGD"),
    ):
        with pytest.raises(InvalidArgument, match=message):
            restore(accumulated, loop.model, optimizer, step=step)
    with pytest.raises(InvalidArgument, match=r"embedding.weight is float64 in the model"):
        restore(accumulated, loop.model.double(), loop.optimizers)


def test_rows_with_a_next_step_can_be_restored(tmp_path: Path) -> None:
    options: dict[str, Any] = {"variables": "everything", "every": 3}
    for name, last in (("run.zarr", STEPS), ("none.zarr", 3)):
        Accumulated().train(tmp_path / name, last=last, **options)
    loop = Accumulated()
    assert restore(tmp_path / "run.zarr", loop.model, loop.optimizers) == 6
    with pytest.raises(InvalidArgument, match=r"does not hold step 4, .* restore step 6"):
        restore(tmp_path / "run.zarr", loop.model, loop.optimizers, step=3)
    with pytest.raises(InvalidArgument, match="no step that can be restored"):
        restore(tmp_path / "none.zarr", loop.model, loop.optimizers)


def test_a_resume_compares_the_whole_state(accumulated: Path) -> None:
    loop, before = Accumulated(), contents(accumulated)
    restore(accumulated, loop.model, loop.optimizers, step=3)
    loop.optimizers.state[loop.model.sometimes.weight]["momentum_buffer"][0, 0] += 1
    loop.model.normalization.running_mean[1] = 2
    with pytest.raises(
        NothingToResume, match="buffers, params_momentum_buffer of the training differ"
    ):
        loop.train(accumulated, first=3, resume=True, variables="everything")
    assert contents(accumulated) == before


# The state of an optimizer, and parameters of several types --------------------------------------

FEW = ("W", "params", "params_lr")


def test_the_state_at_a_step_is_that_of_torch_which_loads_it(recorded: Any, own: Any) -> None:
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
    assert same(optimizer_state_at(own.path, 5), own.optimizers[5])  # counts of each parameter


@pytest.mark.parametrize("named", [False, True])
def test_the_order_of_the_optimizer_is_not_that_of_the_model(
    tmp_path: Path, tiny: Any, named: bool
) -> None:
    given = list(tiny.named_parameters())[::-1]
    optimizer = torch.optim.AdamW(given if named else [p for _, p in given], lr=0.01)
    with capture(tiny, optimizer, tmp_path / "run.zarr", variables="everything"):
        take_steps(tiny, optimizer, 1)
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
    tmp_path: Path, optimizer: Any, variables: Any, missing: str
) -> None:
    path = tiny_run(tmp_path / "run.zarr", optimizer, count=1, variables=variables)
    with pytest.raises(VariableNotRecorded, match=missing):
        optimizer_state_at(path, 1)


MIXED_STEPS = 5
TYPES = dict.fromkeys(("embedding.weight", "late.weight", "late.bias"), ("bfloat16", "float32"))
TYPES |= dict.fromkeys(("norm.weight", "norm.bias"), ("float32", "bfloat16"))
TYPES |= {"fixed": ("float16", "float16")}
"""Types of each parameter and of its moments."""


class Model(torch.nn.Module):
    """bfloat16 weights and float32 normalization; some steps have gradients of one type only."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = torch.nn.Embedding(11, 4, dtype=torch.bfloat16)
        self.norm = torch.nn.LayerNorm(4)
        self.late = torch.nn.Linear(4, 4, dtype=torch.bfloat16)
        self.fixed = torch.nn.Parameter(torch.rand(3).half(), requires_grad=False)

    def forward(self, ids: Any, *, normed: bool, whole: bool) -> Any:
        hidden = self.embedding(ids)
        hidden = self.norm(hidden) if normed else hidden
        return (self.late(hidden) if whole else hidden) @ self.embedding.weight.T


def built() -> tuple[Any, Any]:
    model = Model()
    matrices = [model.embedding.weight, *model.late.parameters()]
    norms = {"params": list(model.norm.parameters()), "state_dtype": "bfloat16"}
    return model, RoundedAdamW([{"params": matrices}, norms], lr=0.05, state_dtype="float32")


def train(recorded: Recorded, first: int = 0) -> tuple[list[dict[str, Any]], list[float]]:
    """Train with a gradient scaler; return the unscaled gradients of each step, and their norm."""
    model, optimizer = recorded.model, recorded.optimizer
    gradients, norms = [], []
    scaler = torch.amp.GradScaler("cpu", init_scale=1000.0)
    with capture(
        model, optimizer, recorded.path, variables="everything", encoding="compact", scaler=scaler,
        parameter="embedding.weight", max_grad_norm=0.05, resume=first > 0, first_step=first,
    ) as recorder:  # fmt: skip
        recorded.keep()
        for step in range(first, MIXED_STEPS):
            ids = (torch.arange(10).reshape(2, 5) * (step + 1)) % 11
            logits = model(ids, normed=step not in (0, 2), whole=step % 2 == 0).float()
            loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), ids.flatten())
            scaler.scale(loss).backward()
            recorder.observe(loss=loss)
            scaler.unscale_(optimizer)
            gradients.append({n: copy.deepcopy(p.grad) for n, p in model.named_parameters()})
            norms.append(torch.nn.utils.clip_grad_norm_(model.parameters(), 0.05).item())
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            recorded.keep()
    return gradients, norms


@pytest.fixture(scope="module")
def mixed(tmp_path_factory: pytest.TempPathFactory) -> Any:
    torch.manual_seed(2)
    model, optimizer = built()
    path = tmp_path_factory.mktemp("mixed") / "run.zarr"
    recorded = Recorded(path=path, model=model, optimizer=optimizer)
    return recorded, *train(recorded)


def test_every_tensor_of_a_step_has_its_own_type(mixed: Any) -> None:
    recorded, gradients, norms = mixed
    ds = open_run(recorded.path)
    vectors = ("params", "params_grad", "params_exp_avg", "params_exp_avg_sq")
    assert {ds[name].attrs["native_dtype"] for name in vectors} == {"float32"}
    assert not verify(recorded.path).problems
    assert (ds.grad_norm[1:].values.tolist(), ds.grad_norm.native_dtype) == (norms, "float32")
    assert (ds.clip_coef[1:] < 1).all()
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
    facts, notes = information(recorded.path), []  # the encoding compact computes no such vectors
    kinds = {name: array["kind"] for name, array in facts["arrays"].items()}
    assert (kinds["W"], kinds["params"]) == ("computed", "delta")
    types = {name: array["native_dtype"] for name, array in facts["arrays"].items()}
    assert vector_rule(facts, types, notes.append) is None
    assert "have several types: bfloat16, float16, float32" in notes[0]


def test_a_loop_continues_with_the_types_of_the_run(mixed: Any, tmp_path: Path) -> None:
    recorded, *_ = mixed
    path = Path(shutil.copytree(recorded.path, tmp_path / "run.zarr"))
    model, optimizer = built()
    assert restore(path, model, optimizer, step=3) == 3
    train(Recorded(path=path, model=model, optimizer=optimizer), first=3)
    same_values(recorded.path, path)
