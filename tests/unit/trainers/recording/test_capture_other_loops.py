"""Losses, logits and gradients in loops that others wrote: each is that of the step, or noted."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")
from list_recorder import HIDDEN, Lists, TinyModel, batches  # noqa: E402
from loops_of_others import adamw, steps, take_steps  # noqa: E402

from trajstore import RunWriter  # noqa: E402
from trajstore.trainers.recording.step_gradients import clip_coefficient  # noqa: E402

pytestmark = pytest.mark.torch


def test_flags_of_accelerate_do_not_concern_others(tiny: Any, record: Any) -> None:
    from accelerate.state import GradientState

    optimizer = adamw(tiny)
    state = GradientState()
    state._set_sync_gradients(False)
    try:
        with record(optimizer):
            take_steps(tiny, optimizer)
    finally:
        GradientState._reset_state()
    ds = record.read()
    assert np.isfinite(ds.grad.values[1:]).all()
    assert np.isfinite(ds.clip_coef.values[1:]).all()


def test_a_loop_of_accelerate(tiny: Any, record: Any) -> None:
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState, GradientState

    AcceleratorState._reset_state(reset_partial_state=True)  # of a Trainer in this process
    try:
        accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
        data = torch.utils.data.DataLoader(batches(7), batch_size=None)
        model, optimizer, data = accelerator.prepare(tiny, adamw(tiny), data)
        lists, losses = Lists(tiny.embedding.weight), []
        with record(optimizer, model, max_grad_norm=0.3):
            for batch in data:
                with accelerator.accumulate(model):
                    output = model(**batch)
                    accelerator.backward(output["loss"])
                    losses.append(output["loss"].detach())
                    if len(losses) == 1:
                        lists.add(logits=output["logits"][0, -1])
                    if accelerator.sync_gradients:
                        lists.add(
                            loss=torch.stack(losses).mean(),
                            grad=lists.parameter.grad,
                            lr=optimizer.param_groups[0]["lr"],
                        )
                        losses.clear()
                        norm = accelerator.clip_grad_norm_(model.parameters(), 0.3)
                        lists.add(clip_coef=clip_coefficient(norm, 0.3))
                    optimizer.step()
                    if accelerator.sync_gradients:
                        lists.after_step(optimizer.optimizer)
                    optimizer.zero_grad()
    finally:
        AcceleratorState._reset_state(reset_partial_state=True)
        GradientState._reset_state()
    ds = lists.agree_with(record.path)
    assert ds.sizes["step"] == 5  # the last step has one micro-batch
    assert (ds.clip_coef.values[1:] < 1).any()


def test_masked_gradients(tiny: Any, record: Any) -> None:
    optimizer = adamw(tiny)
    lists = Lists(tiny.embedding.weight)
    with record(optimizer, variables=("matrix", "grad_token_norm")):
        for _ in steps(tiny, optimizer, lists=lists):
            lists.parameter.grad[::2] = 0
    ds = lists.agree_with(record.path)
    assert np.isnan(ds.clip_coef.values[1:]).all()
    assert (ds.grad_token_norm.values[1:, ::2] == 0).all()
    assert record.noted("not by one factor")
    assert not record.noted("max_grad_norm")


def test_a_gradient_that_is_discarded(tiny: Any, record: Any) -> None:
    for set_to_none in (True, False):
        optimizer = torch.optim.SGD(tiny.parameters(), lr=0.1)
        with record(optimizer, overwrite=True):
            for number, output in enumerate(steps(tiny, optimizer)):  # noqa: B007
                if number == 1:
                    optimizer.zero_grad(set_to_none=set_to_none)
        ds = record.read()
        if set_to_none:  # a step without a gradient changes nothing
            assert ds.step.values.tolist() == [0, 1, 2]
        else:
            assert np.isnan(ds.loss.values[2]), "the loss of a discarded gradient"
            assert not ds.grad.values[2].any()
            assert np.array_equal(ds.W.values[2], ds.W.values[1])
        assert ds.loss.values[-1] == output["loss"].item()


def test_other_passes_are_not_those_of_the_step(tiny: Any, record: Any) -> None:
    """Probes, passes of a copy, and what another optimizer trains."""
    tiny.critic = torch.nn.Linear(1, 1)
    critic = torch.optim.SGD(tiny.critic.parameters(), lr=0.1)
    optimizer = torch.optim.AdamW([*tiny.embedding.parameters(), *tiny.mix.parameters()])
    losses, logits = [], []
    probe, *_ = batches(1, 9)
    with record(optimizer):
        for output in steps(tiny, optimizer):
            losses.append(output["loss"].item())
            logits.append(output["logits"][0, -1].detach())
            torch.autograd.grad(tiny(**probe)["loss"], tiny.mix.weight)
            tiny(**probe)
            with torch.no_grad():
                tiny.eval()(**probe)
            tiny.train()
            copy.deepcopy(tiny)(**probe)["loss"].backward()
            critic.zero_grad()
            tiny.critic(torch.ones(1, 1)).sum().backward()
            critic.step()
    ds = record.read()
    assert ds.loss.values[1:].tolist() == losses
    assert np.array_equal(ds.logits.values[1:], torch.stack(logits))


def test_a_closure_at_the_perturbed_weights_of_sam(tiny: Any, record: Any) -> None:
    optimizer = torch.optim.SGD(tiny.parameters(), lr=0.1)
    lists = Lists(tiny.embedding.weight)
    with record(optimizer):
        for batch in batches(3):
            tiny(**batch)["loss"].backward()
            before = [p.detach().clone() for p in tiny.parameters()]
            for p in tiny.parameters():
                p.data.add_(p.grad, alpha=0.05)
            optimizer.zero_grad()
            loss = tiny(**batch)["loss"]
            loss.backward()
            for p, value in zip(tiny.parameters(), before, strict=True):
                p.data.copy_(value)
            lists.add(grad=lists.parameter.grad, loss=loss)
            optimizer.step()
            lists.add(W=lists.parameter)
            optimizer.zero_grad()
    lists.agree_with(record.path)


def test_closures_of_lbfgs(tiny: Any, record: Any) -> None:
    optimizer = torch.optim.LBFGS(tiny.parameters(), lr=0.1, max_iter=4)
    firsts: list[Any] = []
    with record(optimizer):
        for batch in batches(2):
            losses = []

            def closure(batch: Any = batch, losses: Any = losses) -> Any:
                optimizer.zero_grad()
                loss = tiny(**batch)["loss"]
                loss.backward()
                losses.append((loss.item(), tiny.embedding.weight.grad.clone()))
                return loss

            optimizer.step(closure)
            assert len(losses) > 1
            firsts.append(losses[0])
    ds = record.read()
    assert ds.loss.values[1:].tolist() == [loss for loss, _ in firsts]
    assert np.array_equal(ds.grad.values[1:], torch.stack([gradient for _, gradient in firsts]))
    assert record.noted("several times")


@pytest.mark.parametrize(
    ("loss_of", "expected"),
    [
        (lambda out: out["loss"] + 10, lambda out: out["loss"] + 10),
        (lambda out: out["logits"].square().mean(), lambda out: out["logits"].square().mean()),
        (lambda out: out["loss"] / 2, lambda out: out["loss"]),
        (lambda out: out["loss"].div_(2), lambda out: out["loss"] * 2),
        (lambda out: 0.5 * out["loss"] + 3 * out["logits"].mean(),
         lambda out: 0.5 * out["loss"] + 3 * out["logits"].mean()),
    ],
    ids=["term", "other", "divided", "divided in place", "weighted"],
)  # fmt: skip
def test_the_loss_is_what_is_differentiated(
    loss_of: Any, expected: Any, tiny: Any, record: Any
) -> None:
    optimizer = adamw(tiny)
    losses = []
    with record(optimizer):
        for output in steps(tiny, optimizer, loss=loss_of):
            losses.append(expected(output).item())
    np.testing.assert_array_equal(record.read().loss.values[1:], np.float32(losses))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("observed", [True, False])
def test_the_mean_loss_of_micro_batches_keeps_its_bits(
    dtype: Any, observed: bool, tiny: Any, record: Any
) -> None:
    optimizer, expected = adamw(tiny), []
    tiny.register_forward_hook(lambda *call: call[-1] | {"loss": call[-1]["loss"].to(dtype)})
    with record(optimizer) as run:
        for _ in range(3):
            optimizer.zero_grad()
            losses = [tiny(**batch)["loss"] for batch in batches(3, len(expected))]
            for loss in losses:
                (loss / 3).backward()
                if observed:
                    run.observe(loss=loss)
            wide = torch.promote_types(dtype, torch.float32)
            expected.append(torch.stack(losses).to(wide).mean().item())
            optimizer.step()
    loss = record.read().loss
    assert loss.attrs["native_dtype"] == str(wide).removeprefix("torch.")
    assert loss.values[1:].tolist() == expected


def test_a_run_with_a_loss_of_16_bits_is_resumed(tiny: Any, record: Any) -> None:
    optimizer, losses, options = adamw(tiny), [], {"variables": ("W", "loss")}
    with record(optimizer, **options):
        take_steps(tiny, optimizer)
    new, old = record.read().load(), {"W": "float32", "loss": "bfloat16"}
    kept = {"recording": new.attrs["recording"]}
    with RunWriter.create(record.path, token=np.arange(17), hidden=8, variables=old,
                          attributes=kept, overwrite=True) as run:  # fmt: skip
        run.append(3, W=new.W[-1].values, loss=np.float32("nan"))
    with record(optimizer, **options, resume=True, first_step=3):
        for output in steps(tiny, optimizer):
            losses.append(output["loss"].bfloat16().item())
    assert record.read().loss.values[1:].tolist() == losses
    assert record.noted("loss is rounded to bfloat16")


def test_a_loss_from_two_passes_and_a_gradient_penalty(tiny: Any, record: Any) -> None:
    optimizer = adamw(tiny)
    lists = Lists(tiny.embedding.weight)
    with record(optimizer):
        for batch, other in zip(batches(3), batches(3, 1), strict=True):
            first, second = tiny(**batch), tiny(**other)
            (slope,) = torch.autograd.grad(first["loss"], tiny.mix.weight, create_graph=True)
            loss = first["loss"] + 2 * second["loss"] + slope.square().sum()
            loss.backward()
            lists.add(loss=loss, grad=lists.parameter.grad, logits=first["logits"][0, -1])
            optimizer.step()
            lists.add(W=lists.parameter)
            optimizer.zero_grad()
    lists.agree_with(record.path)


def test_a_loss_observed_after_the_step(tiny: Any, record: Any) -> None:
    optimizer = adamw(tiny)
    losses = []
    with record(optimizer) as run:
        for batch in batches(3):
            optimizer.zero_grad()
            loss = tiny(**batch)["loss"]
            loss.backward()
            optimizer.step()
            run.observe(loss=loss)
            losses.append(loss.item())
    assert record.read().loss.values[1:].tolist() == losses
    assert record.noted("after optimizer.step()")


class Checkpointed(TinyModel):
    reentrant = False

    def forward(self, input_ids: Any, labels: Any = None) -> dict[str, Any]:
        from torch.utils.checkpoint import checkpoint

        hidden = self.embedding(input_ids)
        hidden = checkpoint(lambda x: torch.tanh(self.mix(x)), hidden, use_reentrant=self.reentrant)
        logits = self.head(hidden)
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())
        return {"loss": loss, "logits": logits}


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointed_parts_count_once(reentrant: bool, record: Any) -> None:
    torch.manual_seed(1)
    model = Checkpointed()
    model.reentrant = reentrant
    optimizer = adamw(model)
    norms = []
    options = {"hidden_from": "mix", "variables": ("matrix", "hidden_states", "norms")}
    with record(optimizer, model, **options):
        for _ in steps(model, optimizer):
            norms.append(torch.nn.utils.get_total_norm([p.grad for p in model.parameters()]))
    ds = record.read()
    assert ds.hidden_states.shape == (4, 3, 5, HIDDEN)
    assert np.isfinite(ds.hidden_states.values[1:]).all()
    np.testing.assert_allclose(ds.grad_norm.values[1:], torch.stack(norms), rtol=1e-6)
    whole = np.sqrt((ds.param_grad_norm.values[1:] ** 2).sum(1))
    np.testing.assert_allclose(whole, ds.grad_norm.values[1:], rtol=1e-5)


def test_a_second_backward_pass_without_the_matrix(tiny: Any, record: Any) -> None:
    tiny.extra = torch.nn.Linear(2, 1)
    optimizer = adamw(tiny)
    norms = []
    with record(optimizer, variables=("matrix", "norms")):
        for _ in steps(tiny, optimizer):
            (100 * tiny.extra(torch.ones(2))).sum().backward()
            norms.append(torch.nn.utils.get_total_norm([p.grad for p in tiny.parameters()]))
    ds = record.read()
    np.testing.assert_allclose(ds.grad_norm.values[1:], torch.stack(norms), rtol=1e-6)
    assert np.isfinite(ds.param_grad_norm.values[1:]).all()


def test_clipping_and_a_rate_inside_a_closure(tiny: Any, record: Any) -> None:
    optimizer = adamw(tiny)
    lists = Lists(tiny.embedding.weight)
    factors = []
    with record(optimizer):
        for number, batch in enumerate(batches(3)):

            def closure(batch: Any = batch, number: int = number) -> Any:
                optimizer.zero_grad()
                loss = tiny(**batch)["loss"]
                loss.backward()
                lists.add(grad=lists.parameter.grad, loss=loss)
                norm = torch.nn.utils.clip_grad_norm_(tiny.parameters(), 0.3)
                factors.append((0.3 / (norm + 1e-6)).item())
                optimizer.param_groups[0]["lr"] = 0.01 * (number + 1)
                return loss

            optimizer.step(closure)
            lists.add(W=lists.parameter)
    ds = lists.agree_with(record.path)
    np.testing.assert_allclose(ds.clip_coef.values[1:], factors, rtol=1e-6)
    assert ds.lr.values[1:].tolist() == [0.01, 0.02, 0.03]


def test_clipping_inside_a_dispatch_mode(tiny: Any, record: Any) -> None:
    from torch.utils.flop_counter import FlopCounterMode

    optimizer = adamw(tiny)
    with FlopCounterMode(display=False), record(optimizer):
        for _ in steps(tiny, optimizer):
            torch.nn.utils.clip_grad_norm_(tiny.parameters(), 0.3, foreach=True)
    ds = record.read()
    expected = 0.3 / (ds.grad_norm.values[1:] + 1e-6)
    np.testing.assert_allclose(ds.clip_coef.values[1:], expected, rtol=1e-6)


def test_a_loss_observed_before_backward(tiny: Any, record: Any) -> None:
    """Tensors are freed at once, so that their addresses are used again."""
    optimizer, expected = adamw(tiny), []

    def take_steps(batch: Any) -> None:
        logits = tiny(batch["input_ids"])["logits"]
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten())
        run.observe(loss=loss.detach())
        expected.append(loss.item())
        optimizer.zero_grad()
        (loss + 0.1 * logits.square().mean()).backward()
        optimizer.step()

    with record(optimizer) as run:
        for batch in batches(12):
            take_steps(batch)
    assert record.losses() == expected
    assert not record.noted("observe")


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


class WithTotal(TinyModel):
    def forward(self, input_ids: Any, labels: Any = None) -> dict[str, Any]:
        loss, total = TwoLosses.apply(super().forward(input_ids)["logits"])
        return {"loss": loss, "total": total}


def test_another_loss_of_the_same_node(record: Any) -> None:
    model, expected = WithTotal(), []
    optimizer = adamw(model)
    with record(optimizer, model=model):
        for batch in batches(3):
            total = model(**batch)["total"]
            optimizer.zero_grad()
            total.backward(gradient=torch.ones_like(total))
            optimizer.step()
            expected.append(total.item())
    assert record.losses() == expected


@pytest.mark.parametrize("zeroed", [False, True])
def test_the_gradient_of_the_matrix_is_discarded(zeroed: bool, tiny: Any, record: Any) -> None:
    optimizer, expected = adamw(tiny), []
    with record(optimizer):
        for output in steps(tiny, optimizer):
            expected.append(output["loss"].item())
            if zeroed:
                tiny.embedding.weight.grad.zero_()
            else:
                tiny.embedding.weight.grad = None
    ds = record.read()
    assert record.losses() == expected
    assert np.nan_to_num(ds.grad.values[1:]).any() == 0
    assert "clip_coef" not in ds or np.isnan(ds.clip_coef.values[1:]).all()


def test_a_pass_that_has_failed(tiny: Any, record: Any) -> None:
    """The loop then calls the modules itself."""
    optimizer = adamw(tiny)
    with record(optimizer):
        with pytest.raises(IndexError):
            tiny(torch.tensor([[10**6]]))
        for batch in batches(3):
            optimizer.zero_grad()
            states = torch.tanh(tiny.mix(tiny.embedding(batch["input_ids"])))
            loss = tiny.head(states).flatten(0, 1)
            torch.nn.functional.cross_entropy(loss, batch["labels"].flatten()).backward()
            optimizer.step()
    assert np.isfinite(record.read().logits.values[1:]).all()


def test_gradients_of_single_examples(tiny: Any, record: Any) -> None:
    optimizer, lists = adamw(tiny), Lists(tiny.embedding.weight)

    def loss(parameters: Any, ids: Any, labels: Any) -> Any:
        given = (ids[None], labels[None])
        return torch.func.functional_call(tiny, parameters, given)["loss"]

    with record(optimizer):
        for batch in batches(3):
            named = {name: p.detach() for name, p in tiny.named_parameters()}
            of_examples = torch.func.vmap(torch.func.grad(loss), in_dims=(None, 0, 0))
            gradients = of_examples(named, batch["input_ids"], batch["labels"])
            for name, parameter in tiny.named_parameters():
                parameter.grad = gradients[name].mean(0)
            lists.add(grad=tiny.embedding.weight.grad)
            optimizer.step()
            lists.add(W=tiny.embedding.weight)
    lists.agree_with(record.path)


def test_a_probe_beside_an_assigned_gradient(tiny: Any, record: Any) -> None:
    optimizer, parameters = adamw(tiny), list(tiny.parameters())
    with record(optimizer):
        for probe, batch in zip(batches(2, seed=1), batches(2), strict=True):
            torch.autograd.grad(tiny(**probe)["loss"], parameters)
            gradients = torch.autograd.grad(tiny(**batch)["loss"], parameters)
            for parameter, gradient in zip(parameters, gradients, strict=True):
                parameter.grad = gradient
            optimizer.step()
    assert "logits" not in record.read()
    assert record.noted("several forward passes")
