"""The matrix and its logits, of models that do not name them as those of transformers do."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")
from torch import nn  # noqa: E402
from torch.nn.functional import cross_entropy  # noqa: E402
from torch.optim.lr_scheduler import CosineAnnealingLR  # noqa: E402
from trainings import (  # noqa: E402  # noqa: E402
    HIDDEN,
    VOCAB,
    Lists,
    SmallGPT,
    batches,
    muon_and_adamw,
    train_pair,
)

from trajstore import open_run, verify  # noqa: E402
from trajstore.errors import (  # noqa: E402
    InvalidArgument,
    RecordingError,
)
from trajstore.trainers import (  # noqa: E402
    capture,
    replay,
)
from trajstore.trainers.recording.parameters import JoinedOptimizer  # noqa: E402

pytestmark = pytest.mark.torch


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


def test_an_inner_matrix_has_no_logits(record: Any) -> None:
    train_matrix(OwnModel("functional"), record, parameter="inner.0.weight")
    assert "logits" not in record.read()
    assert not record.noted("logits")


def test_only_an_embedding_that_is_trained_is_chosen(record: Any) -> None:
    model = OwnModel("untied")
    model.embedding.requires_grad_(False)
    train_matrix(model, record)
    assert record.noted("W is pos_emb.weight (34 × 8)")
    model.pos_emb.requires_grad_(False)
    with pytest.raises(
        RecordingError, match=r"no embedding that the optimizer trains.*head\.weight"
    ):
        train_matrix(model, record, overwrite=True)


def test_the_input_embedding_of_a_classifier(record: Any) -> None:
    model = OwnModel("functional")
    model.get_output_embeddings = lambda: None
    model.get_input_embeddings = lambda: model.pos_emb
    train_matrix(model, record)
    assert record.noted("W is pos_emb.weight")


def test_state_that_an_optimizer_lacks_is_no_news(record: Any) -> None:
    for kind in (torch.optim.SGD, torch.optim.Adagrad):
        train_matrix(OwnModel("untied"), record, kind, overwrite=True)
    assert not record.noted("exp_avg")


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


@pytest.mark.parametrize("first", ["Muon", "AdamW"])
def test_each_matrix_has_the_values_of_its_own_optimizer(
    first: str, model: Any, tmp_path: Path, notes: list[str]
) -> None:
    pair = muon_and_adamw(model)
    ordered = pair if first == "Muon" else pair[::-1]
    plans = {optimizer: CosineAnnealingLR(optimizer, 8) for optimizer in pair}
    lists = {name: Lists(model.get_parameter(name)) for name in (WIDTH, HEAD)}
    owned = dict(zip(lists.values(), pair, strict=True))
    options = {"parameter": list(lists), "max_grad_norm": 0.5, "on_note": notes.append}
    with capture(model, iter(pair), tmp_path / "run.zarr", **options):
        for batch in batches(5):
            output = model(**batch)
            output["loss"].backward()
            for kept in owned:
                kept.add(grad=kept.parameter.grad, loss=output["loss"])
            norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            for kept in owned:
                kept.add(grad_norm=norm, clip_coef=torch.clamp(0.5 / (norm + 1e-6), max=1.0))
            for optimizer in ordered:
                optimizer.step()
                optimizer.zero_grad()
                for kept in (kept for kept in owned if owned[kept] is optimizer):
                    kept.add(lr=float(optimizer.param_groups[0]["lr"]))
                plans[optimizer].step()
            for kept, optimizer in owned.items():
                kept.after_step(optimizer)
    for name, kept in lists.items():
        ds = kept.agree_with(tmp_path / f"run.{name}.zarr")
        assert ds.attrs["optimizer"]["class"].endswith(type(owned[kept]).__name__)
    muon = open_run(tmp_path / f"run.{WIDTH}.zarr")
    assert "momentum_buffer" in muon
    assert "exp_avg" not in muon
    replays = [replay(tmp_path / f"run.{name}.zarr") for name in lists]
    assert [(result.clean, result.replayed) for result in replays] == [(True, 5)] * 2
    expected = ("never decay", "weight decay", "labels", "logits")
    assert [note for note in notes if not any(words in note for words in expected)] == []


def test_all_parameters_of_both(model: Any, path: Path) -> None:
    pair = muon_and_adamw(model)
    gradients: list[Any] = []
    weight = model.blocks[1].mlp.weight
    weight.register_post_accumulate_grad_hook(lambda p: gradients.append(p.grad.clone()))
    with capture(model, pair, path, variables="everything,norms", parameter=HEAD):
        train_pair(model, pair, batches(4))
    ds = open_run(path, chunks=None)
    groups = ds.attrs["optimizer"]["groups"]
    assert [each["name"] for each in groups] == ["Muon", "AdamW", "AdamW"]
    highest = [group["highest"] for group in (*pair[0].param_groups, *pair[1].param_groups)]
    np.testing.assert_array_equal(ds.params_lr.values[1], highest)
    muon = ds.traj.parameter("blocks.1.mlp.weight")
    np.testing.assert_array_equal(muon.grad[1:], torch.stack(gradients).float())
    assert muon.lr.values[1] == highest[0]
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
    norms = []
    options = {"parameter": list(lists), "max_grad_norm": 0.5}  # the scaler is found
    with record(pair, model, **options):
        for batch, names in zip(batches(6), overflows, strict=True):
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
            for name, kept in lists.items():
                kept.add(W=kept.parameter, skipped=torch.tensor(float(name in names)))
    factors = torch.clamp(0.5 / (torch.stack(norms) + 1e-6), max=1.0)
    steps = [1, 2, 6]
    for name, kept in lists.items():
        path, gradients = tmp_path / f"run.{name}.zarr", torch.stack(kept.rows.pop("grad"))
        ds = kept.agree_with(path)
        np.testing.assert_array_equal(ds.clip_coef.sel(step=steps), factors)
        np.testing.assert_array_equal(ds.grad.sel(step=steps), gradients[steps])
        assert name == WIDTH or replay(path).replayed == 6
    assert record.noted("skipped the step of Muon only")
    assert record.noted("skipped the step of AdamW only")


def test_resumed_with_the_same_bits(tmp_path: Path) -> None:
    options: dict[str, Any] = {"variables": "everything", "parameter": WIDTH}
    data = batches(6)
    for stop in (6, 3):
        model = SmallGPT()
        pair = muon_and_adamw(model)
        with capture(model, pair, tmp_path / f"{stop}.zarr", **options):
            train_pair(model, pair, data[:stop])
    options |= {"resume": True, "first_step": 3}
    with (
        pytest.raises(InvalidArgument, match="resume with the model and the optimizers"),
        capture(model, pair[::-1], tmp_path / "3.zarr", **options),
    ):
        pass
    with capture(model, pair, tmp_path / "3.zarr", **options):
        train_pair(model, pair, data[3:], first=3)
    whole, resumed = (open_run(tmp_path / f"{stop}.zarr", chunks=None) for stop in (6, 3))
    assert whole.equals(resumed)


def test_hyperparameters_are_those_of_the_own_optimizer(model: Any, record: Any) -> None:
    pair = muon_and_adamw(model)
    with record(pair, model, parameter=WIDTH):
        for number, batch in enumerate(batches(3)):
            pair[1].param_groups[0]["eps"] = 1e-8 + number
            pair[0].param_groups[0]["momentum"] = 0.85 + 0.02 * number
            model(**batch)["loss"].backward()
            for optimizer in pair:
                optimizer.step()
                optimizer.zero_grad()
    numbers = record.read().hyperparameters
    assert numbers.sel(hyperparameter="momentum")[1:].values.tolist() == [0.85, 0.87, 0.89]
    assert not record.noted("changed")


def test_a_scaler_may_step_what_is_no_optimizer_of_torch(model: Any, record: Any) -> None:
    class Other:
        steps = 0

        def step(self) -> None:
            self.steps += 1

    other, pair = Other(), muon_and_adamw(model)
    with record(pair, model, parameter=WIDTH):
        torch.amp.GradScaler("cpu", enabled=False).step(other)
        model(**batches(1)[0])["loss"].backward()
        for optimizer in pair:
            optimizer.step()
    assert other.steps == 1
    assert record.read().sizes["step"] == 2
