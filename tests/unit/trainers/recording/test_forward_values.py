"""Losses and logits in loops that others wrote: each is that of the step, or noted."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")
from trainings import (  # noqa: E402
    HIDDEN,
    VOCAB,
    Lists,
    TinyModel,
    adamw,
    batches,
    steps,
    take_steps,
)

from trajstore import RunWriter  # noqa: E402

pytestmark = pytest.mark.torch


class TwoLosses(torch.autograd.Function):
    """Two losses from one node, as of a fused kernel."""

    @staticmethod
    def forward(ctx: Any, logits: Any) -> Any:
        ctx.save_for_backward(logits)
        return logits.mean(), logits.square().mean()

    @staticmethod
    def backward(ctx: Any, *given: Any) -> Any:
        (logits,) = ctx.saved_tensors
        return (given[0] + 2 * given[1] * logits) / logits.numel()


def penalized(out: dict[str, Any], model: Any) -> Any:
    other = model(**batches(1, 1)[0])
    (slope,) = torch.autograd.grad(out["loss"], model.mix.weight, create_graph=True)
    return out["loss"] + 2 * other["loss"] + slope.square().sum()


LOSSES: dict[str, tuple[Callable[..., Any], Callable[[Any], Any] | None]] = {
    "term": (lambda out, _: out["loss"] + 10, None),
    "other": (lambda out, _: out["logits"].square().mean(), None),
    "divided": (lambda out, _: out["loss"] / 2, lambda out: out["loss"]),
    "divided in place": (lambda out, _: out["loss"].div_(2), lambda out: 2 * out["loss"]),
    "weighted": (lambda out, _: 0.5 * out["loss"] + 3 * out["logits"].mean(), None),
    "two passes and a penalty": (penalized, None),
    "of one node": (lambda out, _: out["total"], None),
}
"""What is differentiated, and its loss if that is another."""


@pytest.mark.parametrize("name", LOSSES)
def test_the_loss_is_what_is_differentiated(name: str, tiny: Any, record: Any) -> None:
    def two(_: Any, given: Any, out: Any) -> Any:
        return dict(zip(("loss", "total"), TwoLosses.apply(out["logits"]), strict=True))

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


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("observed", ["", "loss", "quotient"])
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


def test_values_observed_in_a_dropped_step(tiny: Any, record: Any) -> None:
    optimizer, kept = adamw(tiny), {}
    with record(optimizer, variables="matrix,batch") as run:
        for number, batch in enumerate(batches(4)):
            optimizer.zero_grad()
            loss = tiny(**batch)["loss"]
            run.observe(loss=loss, batch=[number])
            if number != 1:  # as for a loss of NaN
                loss.backward()
                if number != 2:
                    kept[number] = loss.item()
                    optimizer.step()
    assert record.losses() == [*kept.values()]
    assert record.read().batch.values[1:, 0].tolist() == [*kept]


def test_other_passes_are_not_those_of_the_step(tiny: Any, record: Any) -> None:
    """Passes of a copy, and what another optimizer trains."""
    tiny.critic = torch.nn.Linear(1, 1)
    critic = torch.optim.SGD(tiny.critic.parameters(), lr=0.1)
    optimizer, losses, logits = torch.optim.AdamW([*tiny.embedding.parameters()]), [], []
    with record(optimizer):
        for output in steps(tiny, optimizer):
            losses.append(output["loss"].item())
            logits.append(output["logits"][0, -1].detach())
            tiny(**batches(1, 9)[0])
            copy.deepcopy(tiny)(**batches(1, 9)[0])["loss"].backward()
            tiny.critic(torch.ones(1, 1)).sum().backward()
            critic.step()
    assert record.losses() == losses
    np.testing.assert_array_equal(record.read().logits[1:], torch.stack(logits))


def test_a_probe_beside_an_assigned_gradient(tiny: Any, record: Any) -> None:
    optimizer, parameters, logits = adamw(tiny), list(tiny.parameters()), []
    with record(optimizer):
        for probe, batch in zip(batches(2, seed=1), batches(2), strict=True):
            torch.autograd.grad(tiny(**probe)["loss"], parameters)
            output = tiny(**batch)
            gradients = torch.autograd.grad(output["loss"], parameters)
            for parameter, gradient in zip(parameters, gradients, strict=True):
                parameter.grad = gradient
            logits.append(output["logits"][0, -1].detach())
            optimizer.step()
    np.testing.assert_array_equal(record.read().logits[1:], torch.stack(logits))


class Checkpointed(TinyModel):
    reentrant = False

    def forward(self, input_ids: Any, labels: Any = None) -> dict[str, Any]:
        from torch.utils.checkpoint import checkpoint

        hidden = self.embedding(input_ids)
        hidden = checkpoint(lambda x: torch.tanh(self.mix(x)), hidden, use_reentrant=self.reentrant)
        logits = self.head(hidden).flatten(0, 1)
        return {"loss": torch.nn.functional.cross_entropy(logits, labels.flatten())}


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
