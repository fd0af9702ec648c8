"""The recorded matrices of any model and of several optimizers: found, followed, or noted."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.nn.utils import parametrizations, prune
from trainings import (
    HIDDEN,
    VOCAB,
    Lists,
    Pair,
    SmallGPT,
    adamw,
    batches,
    muon_and_adamw,
    same,
    steps,
    take_steps,
)

from trajstore import open_run, verify
from trajstore.errors import (
    InvalidArgument,
    RecordingError,
)
from trajstore.trainers import (
    capture,
    replay,
)
from trajstore.trainers.recording.parameters import JoinedOptimizer


class OwnModel(nn.Module):
    """Returns its loss only. The hidden layer has as many features as there are tokens."""

    def __init__(self, unembed: str) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.pos_emb = nn.Embedding(2 * VOCAB, HIDDEN)
        self.embedding = nn.Embedding(VOCAB, HIDDEN)
        self.inner = nn.Sequential(nn.Linear(HIDDEN, VOCAB), nn.GELU(), nn.Linear(VOCAB, HIDDEN))
        self.unembed = unembed
        if unembed != "functional":
            self.head = nn.Linear(HIDDEN, VOCAB, bias=False)
        if unembed in ("tied", "chunks"):
            self.head.weight = self.embedding.weight

    def forward(self, input_ids: Any, labels: Any) -> Any:
        x = self.embedding(input_ids) + self.pos_emb(torch.arange(input_ids.shape[1]))
        x = self.inner(x)
        if self.unembed == "functional":
            logits = x @ self.embedding.weight.T
        elif self.unembed == "chunks":
            logits = torch.cat([self.head(part) for part in x.split(2)])
        elif self.unembed == "flat":
            logits = self.head(x.flatten(0, 1)).unflatten(0, input_ids.shape)
        else:
            logits = self.head(x)
        self.logits = logits.detach()
        return cross_entropy(10 * logits.flatten(0, 1).float(), labels.flatten())


class Pairs(nn.Module):
    """As word2vec with two tables: no token has a logit."""

    def __init__(self) -> None:
        super().__init__()
        self.inputs = nn.EmbeddingBag(VOCAB, HIDDEN)
        self.outputs = nn.EmbeddingBag(VOCAB, HIDDEN)

    def forward(self, input_ids: Any, labels: Any) -> Any:
        return -(self.inputs(input_ids) * self.outputs(labels)).sum(-1).sigmoid().log().mean()


def train_matrix(
    model: Any, record: Callable[..., Any], kind: Any = torch.optim.SGD, **options: Any
) -> None:
    optimizer = kind(model.parameters(), lr=0.1)
    with record(optimizer, model, **options):
        for batch in batches(2):
            optimizer.zero_grad()
            model(**batch).backward()
            optimizer.step()


@pytest.mark.parametrize(
    ("unembed", "has_logits", "note"),
    [
        ("tied", True, "W is embedding.weight (17 × 8), and not pos_emb.weight (34 × 8), inner.0"),
        ("untied", True, "(34 × 8), inner.0.weight (17 × 8), head.weight (17 × 8)"),
        ("flat", True, "head.weight (17 × 8)"),
        ("functional", False, "W is embedding.weight (17 × 8)"),
        ("chunks", False, "the model calls its unembedding 2 times in a forward pass"),
    ],
)
def test_the_embedding_and_its_logits_are_found(
    unembed: str, has_logits: bool, note: str, record: Any
) -> None:
    model = OwnModel(unembed)
    train_matrix(model, record, variables=("matrix", "hidden_mean"))
    ds = record.read()
    assert ("hidden_mean" in ds) == (unembed == "tied")
    assert ds.attrs["recording"]["parameter"] == "embedding.weight"
    assert record.noted(note)
    assert ("logits" in ds) == has_logits
    if has_logits:
        np.testing.assert_array_equal(ds.logits[-1], model.logits[0, -1])


def test_what_makes_no_logits_has_no_note_about_them(record: Any) -> None:
    train_matrix(Pairs(), record, is_dead=np.zeros(VOCAB, bool), strict=True)
    assert record.notes == ["no parameter= was given, so W is inputs.weight (17 × 8), and not "
                     "outputs.weight (17 × 8)"]  # fmt: skip
    assert {"W", "grad", "loss"} <= set(record.read())


@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.Adagrad])
def test_no_note_names_logits_of_an_inner_matrix_or_state_that_an_optimizer_lacks(
    kind: Any, record: Any
) -> None:
    train_matrix(OwnModel("functional"), record, kind, parameter="inner.0.weight")
    assert not {"logits", "exp_avg"} & {*record.read()}
    assert not record.noted("logits")
    assert not record.noted("exp_avg")


def test_only_an_embedding_that_is_trained_is_chosen(record: Any) -> None:
    model = OwnModel("untied")
    model.embedding.requires_grad_(False)
    train_matrix(model, record)
    assert record.noted("W is pos_emb.weight (34 × 8)")


def test_the_input_embedding_of_a_classifier(record: Any) -> None:
    model = OwnModel("functional")
    model.get_output_embeddings = lambda: None
    model.get_input_embeddings = lambda: model.pos_emb
    train_matrix(model, record)
    assert record.noted("W is pos_emb.weight")


def test_the_loop_of_the_readme(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    readme = (Path(__file__).parents[4] / "README.md").read_text()
    loop = re.search(r"^with capture\(.*?(?=^```$)", readme, re.DOTALL | re.MULTILINE)
    assert loop is not None
    monkeypatch.chdir(tmp_path)
    model = nn.Sequential(nn.Embedding(VOCAB, HIDDEN), nn.Linear(HIDDEN, VOCAB))
    exec(loop[0], {
        "capture": capture, "cross_entropy": cross_entropy, "model": model,
        "optimizer": torch.optim.AdamW(model.parameters()),
        "batches": [tuple(batch.values()) for batch in batches(2)],
    })  # fmt: skip
    assert {"W", "exp_avg", "grad", "logits", "loss"} <= set(open_run("run.zarr"))


WIDTH, HEAD = "blocks.0.mlp.weight", "head.weight"


@pytest.fixture
def model() -> Any:
    return SmallGPT()


def test_all_parameters_of_both(path: Path) -> None:
    loop, gradients = Pair(), list[Any]()
    rates = [group["lr"] for one in loop.optimizers for group in one.param_groups]
    weight = loop.model.blocks[1].mlp.weight
    weight.register_post_accumulate_grad_hook(lambda p: gradients.append(p.grad.clone()))
    loop.train(path, last=4, variables="everything,norms", parameter=HEAD)
    ds = open_run(path, chunks=None)
    groups = ds.attrs["optimizer"]["groups"]
    assert [each["name"] for each in groups] == ["Muon", "AdamW", "AdamW"]
    np.testing.assert_array_equal(ds.params_lr.values[1], rates)
    muon = ds.traj.parameter("blocks.1.mlp.weight")
    np.testing.assert_array_equal(muon.grad[1:], torch.stack(gradients).float())
    assert muon.lr.values[1] == rates[0]
    assert not {"skipped", "exp_avg", "exp_avg_sq"} & {*muon}
    assert {"params_momentum_buffer", "params_exp_avg"} <= set(ds.data_vars)
    updates = ds.param_update_norm.sel(parameter="blocks.1.mlp.weight").values
    changes = np.linalg.norm(np.diff(muon.W, axis=0).reshape(4, -1), axis=1)
    np.testing.assert_allclose(updates[1:], changes, rtol=2**-8)  # a difference of bfloat16
    assert np.isfinite(ds.param_update_lost.values[1:]).all()
    assert np.isfinite(ds.param_grad_norm.values[1:]).all()
    assert verify(path).clean


def test_the_optimizers_have_to_take_turns(model: Any, tmp_path: Path) -> None:
    muon, adamw = muon_and_adamw(model)
    model(**batches(1)[0])["loss"].backward()
    with capture(model, [muon, adamw], tmp_path / "run.zarr"):
        muon.step()
        with pytest.raises(RecordingError, match=r"Muon steps again before AdamW has .*ends_step"):
            muon.step()
    with capture(model, [muon, adamw], tmp_path / "run.zarr") as run:
        muon.step()
    assert "no step of AdamW was taken" in run.notes()[-1]


def test_a_run_continues_with_its_optimizers_in_their_order(path: Path) -> None:
    options: dict[str, Any] = {"variables": "everything", "parameter": WIDTH}
    loop = Pair()
    loop.train(path, last=1, **options)
    other = SmallGPT()
    other.blocks[0].norm.bias = nn.Parameter(torch.ones(3, dtype=torch.bfloat16))
    for wrong, given in ((loop.model, loop.optimizers[::-1]), (other, muon_and_adamw(other))):
        with (
            pytest.raises(InvalidArgument, match=r"parameter \d of the .* and the optimizers"),
            capture(wrong, given, path, **options, resume=True, first_step=1),
        ):
            pass
    loop.train(path, first=1, last=2, resume=True, **options)
    assert (replay(path).clean, replay(path).replayed) == (True, 2)


def test_what_cannot_be_joined(model: Any) -> None:
    muon, adamw = muon_and_adamw(model)
    third = torch.optim.AdamW(model.head.parameters())
    for message, given in {
        r"a parameter is in several of .* Muon and AdamW 1": ([muon, adamw, third],),
        r"ends_step: got Muon, expected .* AdamW": ([adamw], muon),
        r"got no optimizer": ([],),
        r"expected a torch\.optim\.Optimizer": ([adamw, "muon"],),
    }.items():
        with pytest.raises(RecordingError, match=message):
            JoinedOptimizer(*given)


def test_one_optimizer_ends_a_step(model: Any, path: Path, record: Any) -> None:
    muon, adamw = muon_and_adamw(model)
    head = Lists(model.head.weight)
    options = {"parameter": HEAD, "variables": "everything"}
    turns = [1, 0, 2, 1]  # of AdamW
    data = iter(batches(5))
    with record([muon, adamw], model, ends_step=muon, **options):
        for count in turns:
            for number in range(count or 1):
                model(**next(data))["loss"].backward()
                if number == 0:
                    head.add(grad=head.parameter.grad)
                if count:
                    adamw.step()
                    adamw.zero_grad()
            muon.step()
            model.zero_grad()
            head.after_step(adamw)
    ds = head.agree_with(path)
    np.testing.assert_array_equal(ds.skipped, [np.nan, 0, 1, np.nan, 0])
    np.testing.assert_array_equal(np.isnan(ds.lr), [True, False, False, True, False])
    assert ds.params_count.sel(parameter=HEAD).values.tolist() == [0, 1, 1, 3, 4]
    result = replay(path)
    assert result.clean
    assert result.replayed == 3, "all but two of several optimizer steps each"


def test_a_backward_pass_between_the_steps(model: Any, path: Path, record: Any) -> None:
    muon, adamw = muon_and_adamw(model)
    hidden, norm = model.blocks[0].qkv.weight, model.blocks[0].norm.weight
    consumed: dict[Any, list[Any]] = {hidden: [], norm: []}
    with record([muon, adamw], model, variables="everything,norms", parameter=HEAD):
        for batch in batches(3):
            for optimizer, matrix in ((muon, hidden), (adamw, norm)):
                model.zero_grad()
                model(**batch)["loss"].backward()
                consumed[matrix].append(matrix.grad.float().clone())
                optimizer.step()
    ds = open_run(path, chunks=None)
    for name, matrix in (("blocks.0.qkv.weight", hidden), ("blocks.0.norm.weight", norm)):
        gradients = torch.stack(consumed[matrix])
        np.testing.assert_array_equal(ds.traj.parameter(name).grad[1:].squeeze(), gradients)
        lengths = gradients.flatten(1).norm(dim=1)
        norms = ds.param_grad_norm.sel(parameter=name)[1:]
        np.testing.assert_allclose(norms, lengths, rtol=1e-5)
    assert np.isnan(ds.grad_norm).all()
    assert record.noted("between the steps of several", "grad_norm is NaN")


def test_one_scaler_for_both(tmp_path: Path, record: Any) -> None:
    model = SmallGPT().float()  # a scaler does not unscale gradients of 16 bits
    pair = muon_and_adamw(model)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
    lists = {name: Lists(model.get_parameter(name)) for name in (WIDTH, HEAD)}
    overflows = [(), (), (WIDTH, HEAD), (WIDTH,), (HEAD,), ()]
    momenta, epsilons = ([base * (1 + n) for n in range(6)] for base in (0.1, 1e-8))
    norms = []
    options = {"parameter": list(lists), "max_grad_norm": 0.5}  # the scaler is found
    with record(pair, model, **options):
        other = SimpleNamespace(step=lambda: norms.append(torch.ones(())))  # is none of torch's
        torch.amp.GradScaler("cpu", enabled=False).step(other)
        assert norms.pop() == 1
        for number, (batch, names) in enumerate(zip(batches(6), overflows, strict=True)):
            pair[0].param_groups[0]["momentum"] = momenta[number]
            pair[1].param_groups[0]["eps"] = epsilons[number]
            for optimizer in pair:
                optimizer.param_groups[0]["lr"] *= 0.9
            model.zero_grad()
            scaler.scale(model(**batch)["loss"]).backward()
            for name in names:
                model.get_parameter(name).grad[0] = float("inf")
            for optimizer in pair:
                scaler.unscale_(optimizer)
            for kept in lists.values():
                nan = torch.full_like(kept.parameter, float("nan"))
                kept.add(grad=nan if names else kept.parameter.grad)
            if not names:
                norms.append(torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5))
            for optimizer in pair:
                scaler.step(optimizer)
            scaler.update()
            for (name, kept), optimizer in zip(lists.items(), pair, strict=True):
                kept.add(W=kept.parameter, skipped=torch.tensor(float(name in names)))
                kept.add(lr=float(optimizer.param_groups[0]["lr"]))
    factors = torch.clamp(0.5 / (torch.stack(norms) + 1e-6), max=1.0)
    taken = [1, 2, 6]
    for name, kept in lists.items():
        path, gradients = tmp_path / f"run.{name}.zarr", torch.stack(kept.rows.pop("grad"))
        ds = kept.agree_with(path)
        np.testing.assert_array_equal(ds.clip_coef.sel(step=taken), factors)
        np.testing.assert_array_equal(ds.grad.sel(step=taken), gradients[taken])
        owner = pair[name == HEAD]
        assert ds.attrs["optimizer"]["class"].endswith(type(owner).__name__)
        assert ("momentum_buffer" in ds, "exp_avg" in ds) == (name == WIDTH, name == HEAD)
        assert (replay(path).clean, replay(path).replayed) == (True, 6)
        numbers = ds.hyperparameters.sel(hyperparameter="momentum" if name == WIDTH else "eps")[1:]
        assert numbers.values.tolist() == (momenta if name == WIDTH else epsilons)
    assert not record.noted("changed between steps")
    assert record.noted("skipped the step of Muon only")
    assert record.noted("skipped the step of AdamW only")


def test_a_pruned_matrix_is_followed(record: Any, tiny: Any) -> None:
    optimizer, W = adamw(tiny), tiny.embedding.weight
    lists = Lists(W)
    with record(optimizer, parameter="embedding.weight"):
        take_steps(tiny, optimizer, 2, lists=lists)
        prune.l1_unstructured(tiny.embedding, "weight", 0.3)
        take_steps(tiny, optimizer, 2, lists=lists)
    ds = lists.agree_with(record.path)
    np.testing.assert_array_equal(ds.exp_avg[-1], optimizer.state[W]["exp_avg"])
    assert record.noted("computes embedding.weight from embedding.weight_orig")
    assert replay(record.path).clean


def test_a_recording_does_not_read_a_parametrization(record: Any) -> None:
    """Spectral normalization changes its state whenever the weight is read."""
    states = []
    for is_recorded in (True, False):
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Embedding(29, 8), torch.nn.Linear(8, 29))
        parametrizations.spectral_norm(model[0])
        optimizer = adamw(model)
        run = record(optimizer, model, parameter="0.parametrizations.weight.original")
        with run if is_recorded else contextlib.nullcontext():
            for _ in range(3):
                model(torch.arange(29)).square().mean().backward()
                optimizer.step()
        states.append(model.state_dict())
    assert same(*states)


def test_a_new_optimizer(tiny: Any, record: Any) -> None:
    first, second = adamw(tiny), adamw(tiny)
    with record(first):
        take_steps(tiny, first, 3)
        take_steps(tiny, second, 3)
    ds = record.read()
    assert ds.sizes["step"] == 4
    assert any("after the last row" in entry["note"] for entry in ds.attrs["notes"])


@pytest.mark.parametrize(("through_data", "every"), [(False, 1), (True, 3)])
def test_weights_that_are_written_outside_the_step(
    through_data: bool, every: int, tiny: Any, record: Any
) -> None:
    optimizer, W = adamw(tiny), tiny.embedding.weight
    start = W.detach().clone()
    with record(optimizer, every=every):
        for number, _ in enumerate(steps(tiny, optimizer, 4)):
            if number:
                with torch.no_grad():
                    (W.data if through_data else W)[13:] = start[13:]
    (entry,) = [e for e in record.read().attrs["notes"] if "outside optimizer.step()" in e["note"]]
    assert (entry["first_step"], entry["count"], entry["unproven"]) == (2, 3, [[2, 4]])


def test_weights_loaded_before_the_first_step(tiny: Any, record: Any) -> None:
    optimizer = adamw(tiny)
    with record(optimizer, variables="everything"):
        tiny.load_state_dict({k: v + 1 for k, v in tiny.state_dict().items()})
        W, mix = (p.detach().clone() for p in (tiny.embedding.weight, tiny.mix.weight))
        take_steps(tiny, optimizer)
    ds = record.read()
    np.testing.assert_array_equal(ds.W[0], W)
    np.testing.assert_array_equal(ds.traj.parameter("mix.weight").W[0], mix)


def test_a_group_that_is_added_in_the_middle(tiny: Any, record: Any) -> None:
    optimizer = torch.optim.AdamW([tiny.embedding.weight], lr=0.01)
    with record(optimizer, variables="everything"):
        for number, _ in enumerate(steps(tiny, optimizer, 4)):
            if number == 1:
                optimizer.add_param_group({"params": list(tiny.mix.parameters()), "lr": 0.1})
    assert record.read().sizes["step"] == 5
    assert record.noted("params_lr", "shape (2,)")
