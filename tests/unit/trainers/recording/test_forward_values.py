"""Values of forward passes: losses, logits and hidden states are those of the step, or noted.

Of loops and models that others wrote, of micro-batches, and of single examples.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from small_trainings import TEXT, small_config, tiny_gpt2
from torch.nn.functional import cross_entropy
from trainings import (
    CONTEXT,
    HIDDEN,
    VOCAB,
    Lists,
    TinyModel,
    adamw,
    batches,
    steps,
    take_steps,
)
from transformers import GPT2LMHeadModel

from trajstore import RunWriter, analysis, open_run
from trajstore.errors import InvalidArgument, RecordingError
from trajstore.trainers import capture
from trajstore.trainers import record as record_preset


def penalized(out: dict[str, Any], model: Any) -> Any:
    other = model(**batches(1, 1)[0])
    (slope,) = torch.autograd.grad(out["loss"], model.mix.weight, create_graph=True)
    return out["loss"] + 2 * other["loss"] + slope.square().sum()


LOSSES: dict[str, tuple[Callable[..., Any], Callable[[Any], Any] | None]] = {
    "divided in place": (lambda out, _: out["loss"].div_(2), lambda out: 2 * out["loss"]),
    "weighted": (lambda out, _: 0.5 * out["loss"] + 3 * out["logits"].mean(), None),
    "two passes and a penalty": (penalized, None),
    "of one node": (lambda out, _: out["total"], None),
}
"""What is differentiated, and its loss if that is another."""


@pytest.mark.parametrize("name", LOSSES)
def test_the_loss_is_what_is_differentiated(name: str, tiny: Any, record: Any) -> None:
    def two(_: Any, given: Any, out: Any) -> Any:
        both = torch.stack([out["logits"].mean(), out["logits"].square().mean()])
        return dict(zip(("loss", "total"), both.unbind(), strict=True))

    if name == "of one node":
        tiny.register_forward_hook(two)
    (loss_of, other), optimizer, losses, logits = LOSSES[name], adamw(tiny), [], []
    with record(optimizer):
        for batch in batches(3):
            optimizer.zero_grad()
            out = tiny(**batch)
            loss = loss_of(out, tiny)
            loss.backward(gradient=torch.ones_like(loss))
            losses.append((loss if other is None else other(out)).item())
            logits.append(out["logits"][0, -1].detach() if "logits" in out else None)
            optimizer.step()
    ds = record.read()
    assert ds.loss.values[1:].tolist() == losses
    if name == "two passes and a penalty":  # the logits are those of the first
        np.testing.assert_array_equal(ds.logits[1:], torch.stack(logits))


@pytest.mark.parametrize(
    ("dtype", "observed"),
    [
        (torch.bfloat16, ""), (torch.float64, ""), (torch.float16, "loss"),
        (torch.float64, "loss"), (torch.bfloat16, "quotient"),
    ],
)  # fmt: skip
def test_the_mean_loss_of_micro_batches_keeps_its_bits(
    dtype: Any, observed: str, tiny: Any, record: Any
) -> None:
    optimizer, expected = adamw(tiny), []
    tiny.register_forward_hook(lambda *call: call[-1] | {"loss": call[-1]["loss"].to(dtype)})
    with record(optimizer) as run:
        for _ in range(3):
            optimizer.zero_grad()
            losses = [tiny(**batch)["loss"] for batch in batches(3, len(expected))]
            parts = [loss / 3 for loss in losses]
            for loss, part in zip(losses, parts, strict=True):
                part.backward()
                if observed:
                    run.observe(loss=part if observed == "quotient" else loss)
            wide = torch.promote_types(dtype, torch.float32)
            values = parts if observed == "quotient" else losses
            expected.append(torch.stack(values).to(wide).mean().item())
            optimizer.step()
    loss = record.read().loss
    assert loss.attrs["native_dtype"] == str(wide).removeprefix("torch.")
    assert loss.values[1:].tolist() == expected
    assert record.noted("got several quotients") == (observed == "quotient")


def test_a_run_with_a_loss_of_16_bits_is_resumed(tiny: Any, record: Any) -> None:
    optimizer, options = adamw(tiny), {"variables": ("W", "loss")}
    with record(optimizer, **options):
        take_steps(tiny, optimizer)
    new, old = record.read().load(), {"W": "float32", "loss": "bfloat16"}
    kept = {"recording": new.attrs["recording"]}
    with RunWriter.create(record.path, token=np.arange(VOCAB), hidden=HIDDEN, variables=old,
                          attributes=kept, overwrite=True) as run:  # fmt: skip
        run.append(3, W=new.W[-1].values, loss=np.float32("nan"))
    with record(optimizer, **options, resume=True, first_step=3):
        outputs = [*steps(tiny, optimizer)]
    assert record.losses() == [output["loss"].bfloat16().item() for output in outputs]
    assert record.noted("loss is rounded to bfloat16")


@pytest.mark.parametrize("when", ["before the pass", "after the step"])
def test_a_loss_is_observed_without_its_graph_or_too_late(
    when: str, tiny: Any, record: Any
) -> None:
    """Tensors are freed at once, so that their addresses are used again."""
    optimizer, expected = adamw(tiny), []

    def take_step(batch: Any) -> None:
        loss = tiny(**batch)["loss"]
        penalty = 0.1 * tiny.mix.weight.square().mean()
        if when == "before the pass":
            run.observe(loss=loss.detach())
            expected.append(loss.item())
        optimizer.zero_grad()
        (loss + penalty).backward()
        optimizer.step()
        if when == "after the step":
            run.observe(loss=loss)
            expected.append((loss + penalty).item())

    with record(optimizer) as run:
        for batch in batches(12):
            take_step(batch)
    np.testing.assert_allclose(record.losses(), expected, rtol=1e-6)
    assert record.noted("observe", "after optimizer.step()") == (when == "after the step")


def test_other_passes_are_not_those_of_the_step(tiny: Any, record: Any) -> None:
    """Passes of a copy, and what another optimizer trains."""
    tiny.critic = torch.nn.Linear(1, 1)
    critic = torch.optim.SGD(tiny.critic.parameters(), lr=0.1)
    optimizer = torch.optim.AdamW([*tiny.embedding.parameters()])
    lists = Lists(tiny.embedding.weight)
    with record(optimizer):
        for _ in steps(tiny, optimizer, lists=lists):
            tiny(**batches(1, 9)[0])
            copy.deepcopy(tiny)(**batches(1, 9)[0])["loss"].backward()
            tiny.critic(torch.ones(1, 1)).sum().backward()
            critic.step()
    lists.agree_with(record.path)


class Checkpointed(TinyModel):
    reentrant = False

    def forward(self, input_ids: Any, labels: Any = None) -> dict[str, Any]:
        from torch.utils.checkpoint import checkpoint

        hidden = self.embedding(input_ids)
        hidden = checkpoint(lambda x: torch.tanh(self.mix(x)), hidden, use_reentrant=self.reentrant)
        logits = self.head(hidden).flatten(0, 1)
        return {"loss": cross_entropy(logits, labels.flatten())}


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointed_parts_count_once(reentrant: bool, record: Any) -> None:
    model = Checkpointed()
    model.reentrant = reentrant
    optimizer = adamw(model)
    variables = ("matrix", "hidden_states", "norms")
    with record(optimizer, model, hidden_from="mix", variables=variables):
        take_steps(model, optimizer)
    ds = record.read()
    assert ds.hidden_states.shape == (4, 3, 5, HIDDEN)
    assert np.isfinite(ds.hidden_states.values[1:]).all()
    whole = np.sqrt((ds.param_grad_norm.values[1:] ** 2).sum(1))
    np.testing.assert_allclose(whole, ds.grad_norm.values[1:], rtol=1e-5)


def test_a_pass_that_has_failed(tiny: Any, record: Any) -> None:
    """The loop then calls the modules itself."""
    optimizer = adamw(tiny)
    with record(optimizer):
        with pytest.raises(IndexError):
            tiny(torch.tensor([[10**6]]))
        for batch in batches(3):
            states = torch.tanh(tiny.mix(tiny.embedding(batch["input_ids"])))
            tiny.head(states).square().mean().backward()
            optimizer.step()
    assert np.isfinite(record.read().logits.values[1:]).all()


def test_gradients_of_single_examples(tiny: Any, record: Any) -> None:
    optimizer, lists = adamw(tiny), Lists(tiny.embedding.weight)

    def loss(parameters: Any, ids: Any, labels: Any) -> Any:
        given = (ids[None], labels[None])
        return torch.func.functional_call(tiny, parameters, given)["loss"]

    of_examples = torch.func.vmap(torch.func.grad(loss), in_dims=(None, 0, 0))
    with record(optimizer):
        for batch in batches(3):
            named = {name: p.detach() for name, p in tiny.named_parameters()}
            gradients = of_examples(named, batch["input_ids"], batch["labels"])
            for name, parameter in tiny.named_parameters():
                parameter.grad = gradients[name].mean(0)
            lists.add(grad=tiny.embedding.weight.grad)
            optimizer.step()
            lists.add(W=tiny.embedding.weight)
    lists.agree_with(record.path)


VARIABLES = ("W", "grad", "loss", "hidden_mean", "hidden_trace", "hidden_cosine", "hidden_states")


class OwnModel(torch.nn.Module):
    """A transformer with learned positions; its unembedding is the embedding's weight."""

    def __init__(self, *, batch_first: bool = True) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.embedding = torch.nn.Embedding(VOCAB, HIDDEN)
        self.position = torch.nn.Embedding(CONTEXT, HIDDEN)
        options = {"dropout": 0.0, "batch_first": batch_first}
        layer = torch.nn.TransformerEncoderLayer(HIDDEN, 2, 16, **options)
        self.encoder = torch.nn.TransformerEncoder(layer, 1, enable_nested_tensor=False)

    def forward(self, ids: Any) -> tuple[Any, Any]:
        x = self.embedding(ids) + self.position(torch.arange(ids.shape[1]))
        mask = torch.nn.Transformer.generate_square_subsequent_mask(ids.shape[1])
        hidden = self.encoder(x, mask=mask, is_causal=True)
        return hidden @ self.embedding.weight.T, hidden


def train(path: Path, *, observes: bool = False, **options: Any) -> Any:
    """Train with micro-batches, and return the hidden states of each step."""
    model = OwnModel()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    options = {"parameter": "embedding.weight", "variables": VARIABLES, "fsync": False, **options}
    states: list[list[Any]] = []
    with capture(model, optimizer, path, **options) as run:
        for step in range(3):
            optimizer.zero_grad()
            states.append([])
            for batch in batches(2, step):
                logits, hidden = model(batch["input_ids"])
                loss = cross_entropy(logits.flatten(0, 1), batch["labels"].flatten())
                (loss / 2).backward()
                run.observe(loss=loss)
                if observes:
                    run.observe(hidden=hidden)
                states[-1].append(hidden.detach())
            with torch.no_grad():
                model(batch["input_ids"])  # nobody trains on that
            optimizer.step()
    return states


@pytest.mark.parametrize(
    ("observes", "options"),
    [(True, {}), (False, {"hidden_from": "encoder"}), (True, {"hidden_from": "embedding"})],
    ids=["observed", "module", "observed instead"],
)
def test_states_are_what_the_loop_computes_itself(
    observes: bool, options: dict[str, str], path: Path
) -> None:
    states = train(path, observes=observes, **options)
    ds = open_run(path, chunks=None)
    for row, hidden in enumerate(states, start=1):
        np.testing.assert_array_equal(ds.hidden_states[row], torch.cat(hidden))
        first, second = (part.mean((0, 1)) for part in hidden)
        np.testing.assert_array_equal(ds.hidden_mean[row], first + (second - first) * 0.5)


@pytest.mark.parametrize("name", VARIABLES[3:])
def test_missing_states_are_an_error_that_names_the_fix(name: str, tmp_path: Path) -> None:
    match = rf"{name} not recorded.*observe\(hidden=…\).*hidden_from=…"
    with pytest.raises(RecordingError, match=match):
        train(tmp_path / "run.zarr", variables=("W", "grad", name), strict=True)


class OwnMatrix(torch.nn.Module):
    """Has the matrix as a parameter of its own, so its inputs are ids and no hidden states."""

    def __init__(self) -> None:
        super().__init__()
        self.W = torch.nn.Parameter(torch.randn(VOCAB, CONTEXT))

    def forward(self, ids: Any) -> tuple[Any]:
        return (self.W[ids],)


def step_of(model: Any, path: Path, *, passed: Any = None, **options: Any) -> None:
    optimizer = torch.optim.SGD(model.parameters())
    with capture(model, optimizer, path, variables=("W", "hidden_mean"), **options) as run:
        model(batches(1)[0]["input_ids"])[0].sum().backward()
        if passed is not None:
            run.observe(hidden=passed)
        optimizer.step()


class NamedInput(TinyModel):
    """Passes the hidden states to its head by name."""

    def forward(self, input_ids: Any, labels: Any = None) -> dict[str, Any]:
        self.last = torch.tanh(self.mix(self.embedding(input_ids)))
        return {"loss": self.head(input=self.last).square().mean()}


def test_the_head_takes_the_states_by_name(record: Any) -> None:
    model = NamedInput()
    with record(optimizer := adamw(model), model, variables=("W", "hidden_mean")):
        take_steps(model, optimizer, 1)
    expected = model.last.detach().mean((0, 1))
    np.testing.assert_array_equal(record.read().hidden_mean[1], expected)


def test_what_is_no_hidden_state_is_refused(path: Path) -> None:
    def refused(
        message: str, model: Any, parameter: str = "embedding.weight", **given: Any
    ) -> None:
        with pytest.raises((InvalidArgument, RecordingError), match=message):
            step_of(model, path, parameter=parameter, **given)

    model = OwnModel()
    refused(r"hidden: got float32 of shape \(5, 8\), expected f", model, passed=torch.ones(5, 8))
    refused(r"no such module \(did you mean 'encoder'\?\)", model, hidden_from="encode")
    words = r"hidden_from='position': got float32 of shape \(5"
    refused(words, model, hidden_from="position", strict=True)
    words = r"batch_first=False.*observe\(hidden=output\.trans"
    refused(words, OwnModel(batch_first=False), hidden_from="encoder")
    # Its inputs are as many ids as W is wide.
    refused("hidden_mean not recorded", OwnMatrix(), "W", strict=True)
    assert not path.exists()


SEEN = ("W", "hidden_mean", "hidden_trace", "hidden_cosine", "batch", "example_loss")
ALL = (*SEEN, "hidden_states")


def test_micro_batches_stand_behind_one_another(tiny: Any, optimizer: Any, record: Any) -> None:
    states, told = list[Any](), list[tuple[Any, Any]]()
    tiny.bfloat16().head.register_forward_pre_hook(
        lambda _, args: states.append(args[0].detach().float())
    )
    with record(optimizer, variables=ALL) as run:
        for step in range(4):
            optimizer.zero_grad()
            for number, whole in enumerate(batches(2, step)):
                part = slice(1 if step == 2 and number == 1 else 3), slice(4 if number else 5)
                batch = {name: values[part] for name, values in whole.items()}
                tiny(**batch)["loss"].backward()
                count = len(batch["labels"])
                index = torch.arange(count) + 100 * step + 10 * number
                losses = torch.rand(count)
                told.append((index, losses))
                run.observe(batch=index, example_loss=losses.tolist())
            optimizer.step()
    ds = record.read()
    assert ds.hidden_states.attrs["native_dtype"] == "bfloat16"
    assert ds.isel(step=0)[list(ALL[1:])].isnull().all()
    for step in range(4):
        row, these = ds.isel(step=step + 1), slice(2 * step, 2 * step + 2)
        index, losses = (torch.cat(both) for both in zip(*told[these], strict=True))
        expected = np.full((6, 5, HIDDEN), np.nan, np.float32)
        expected[:3], second = states[these][0].numpy(), states[these][1].numpy()
        expected[3 : 3 + len(second), : second.shape[1]] = second
        np.testing.assert_array_equal(row.hidden_states, expected)
        filler = [np.nan] * (6 - len(index))
        np.testing.assert_array_equal(row.batch, [*index.tolist(), *filler])
        np.testing.assert_array_equal(row.example_loss, np.float32([*losses.tolist(), *filler]))
        flat = expected.reshape(-1, HIDDEN).astype("f8")
        flat = flat[~np.isnan(flat).any(1)]
        mean = flat.mean(0)
        np.testing.assert_allclose(row.hidden_mean, mean, rtol=1e-4, atol=1e-6)
        np.testing.assert_allclose(row.hidden_trace, flat.var(0).sum(), rtol=1e-5)
        cosines = flat @ mean / np.linalg.norm(flat, axis=1) / np.linalg.norm(mean)
        np.testing.assert_allclose(row.hidden_cosine, cosines.mean(), rtol=1e-5)


def test_losses_of_a_causal_language_model(tmp_path: Path) -> None:
    model = tiny_gpt2()
    optimizer = adamw(model)
    expected, losses = [], []
    with capture(model, optimizer, tmp_path / "run.zarr", variables=("W", "loss", *ALL)):
        for number, batch in enumerate(batches(3)):
            labels = batch["labels"].clone()
            labels[0, :3] = -100  # targets that do not count
            optimizer.zero_grad()
            index = torch.arange(3) + number
            output = model(batch["input_ids"], labels=labels, example_index=index)
            output.loss.backward()
            each = cross_entropy(
                output.logits.detach()[:, :-1].transpose(1, 2), labels[:, 1:], reduction="none"
            )
            expected.append([float(e[t != -100].mean())
                             for e, t in zip(each, labels[:, 1:], strict=True)])  # fmt: skip
            losses.append(output.loss.item())
            optimizer.step()
    ds = open_run(tmp_path / "run.zarr", chunks=None)
    np.testing.assert_allclose(ds.example_loss[1:], expected, rtol=1e-6)
    np.testing.assert_allclose(ds.example_loss.values[1:] @ [0.2, 0.4, 0.4], losses, rtol=1e-6)
    assert ds.batch.values[1:].tolist() == [[0, 1, 2], [1, 2, 3], [2, 3, 4]]


class Sharper(GPT2LMHeadModel):
    """Returns another loss than the one whose name it has."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        output = super().forward(*args, **kwargs)
        output.loss = 1.2 * output.loss
        return output


@pytest.mark.parametrize(
    ("made", "why"),
    [(TinyModel, "not a causal language model"), (partial(tiny_gpt2, Sharper), "other terms")],
)
def test_losses_that_were_not_observed_are_not_guessed(made: Any, why: str, path: Path) -> None:
    model = made()
    optimizer = adamw(model)
    message = rf"example_loss .*{why}.* observe\(example_loss=…\)"
    with (
        pytest.raises(RecordingError, match=message),
        capture(model, optimizer, path, variables=("W", "example_loss"), strict=True),
    ):
        take_steps(model, optimizer, 1)
    assert not path.exists()


def test_observed_values_of_a_wrong_form_are_errors(tiny: Any, optimizer: Any, path: Path) -> None:
    notes: list[str] = []
    variables = ("W", "batch", "example_loss")
    with capture(tiny, optimizer, path, variables=variables, on_note=notes.append) as run:
        with pytest.raises(InvalidArgument, match=r"example_loss: got .* of shape \(1, 1\)"):
            run.observe(example_loss=[[0.5]])
        wrong = {
            "loss": [0.5, torch.ones(2), torch.ones((), dtype=torch.int64)],
            "logits": [[[0.5]]],
            "batch": [torch.rand(3), [True, False], [1.5, 2], ["1", "2"], [2**53 + 1]],
            "example_loss": [[0.1], torch.tensor([0.1], dtype=torch.float64), [1, 2], ["0.5"]],
        }
        for name, given in ((name, value) for name, values in wrong.items() for value in values):
            with pytest.raises(InvalidArgument, match=f"{name}: got"):
                run.observe(**{name: given})
        tiny(**batches(1)[0])["loss"].backward()
        run.observe(batch=[1, 2, 3], example_loss=[0.25, 0.5, 0.75])
        optimizer.step()
        for given in ({"batch": [1, 2, 3], "example_loss": [0.25, 0.5]},
                      {"batch": [1, 2, 3, 4], "example_loss": [0.0] * 4}):  # fmt: skip
            run.observe(**given)
            tiny(**batches(1)[0])["loss"].backward()
            optimizer.step()
    ds = open_run(path, chunks=None)
    assert ds.example_loss.values[1].tolist() == [0.25, 0.5, 0.75]
    assert np.isnan(ds.example_loss.values[2:]).all()
    assert any("numbers differ: batch 3, example_loss 2" in note for note in notes)
    assert any("has 4 examples, but" in note and "room for 3" in note for note in notes)


def test_the_gradient_of_dead_tokens_is_that_of_the_recorded_states(tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_bytes(TEXT)
    config = small_config(
        ["gatsby"], "model.dtype=float32", "training.autocast=none",
        "training.accumulation=2", "initialization.kind=normal", "initialization.sigma=0.3",
        f"recording.variables={[*ALL, 'grad']}", steps=5,
    )  # fmt: skip
    ds = open_run(record_preset(config, tmp_path / "run.zarr", corpus=text))
    dead = ds.token.values[ds.is_dead.values][::30]
    shares = analysis.explain_gradient(ds, [1, 3, 5], dead).compute()
    assert shares.relative_error.max() < 1e-5
    assert shares.cosine.min() > 1 - 1e-9
    np.testing.assert_allclose(shares.share.sum("example"), 1)
    assert set(shares.batch.values.ravel()) <= set(range(len(TEXT)))
