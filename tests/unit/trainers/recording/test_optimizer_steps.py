"""Steps of optimizers in loops that others wrote: each row is one step, or the run notes it."""

from __future__ import annotations

import gc
import weakref
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")
from loops.optimizers import Clamping, Lookahead, Scratch  # noqa: E402
from trainings import Lists, adamw, batches, steps, take_steps  # noqa: E402

from trajstore.trainers import replay  # noqa: E402
from trajstore.trainers.recording.gradient import clip_coefficient  # noqa: E402

pytestmark = pytest.mark.torch


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
                        loss, rate = torch.stack(losses).mean(), optimizer.param_groups[0]["lr"]
                        lists.add(loss=loss, grad=lists.parameter.grad, lr=rate)
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


def test_the_wrapper_of_an_optimizer(tiny: Any, record: Any) -> None:
    """A framework's object with the inner optimizer in an attribute; the loop steps both."""
    inner = adamw(tiny)

    class Wrapper(torch.optim.AdamW):
        def __init__(self) -> None:
            self.__dict__ = {**inner.__dict__, "held": inner}

        def step(self, closure: Any = None) -> Any:
            for parameter in tiny.parameters():
                parameter.grad.mul_(2)
            return inner.step(closure)

    wrapper = Wrapper()
    with record(wrapper):
        take_steps(tiny, wrapper, 1)
        take_steps(tiny, inner, 1)
    assert record.read().clip_coef.values[1:].tolist() == [2, 1]
    assert not record.noted("Wrapper")
    assert replay(record.path).replayed == 2


def test_what_holds_an_optimizer_and_steps_it_itself(tiny: Any, record: Any) -> None:
    schedule = SimpleNamespace(optimizer=adamw(tiny))
    with record(schedule):
        for number, _ in enumerate(steps(tiny, schedule.optimizer, 2)):
            schedule.optimizer.param_groups[0]["lr"] = 0.5 + number
    assert record.read().lr.values[1:].tolist() == [0.5, 1.5]


class Odd(torch.optim.Optimizer):
    """Without a rate; with moments of another shape and type, and an infinite setting."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"d": float("inf")})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                self.state[p].setdefault("exp_avg", torch.zeros(3, dtype=torch.int8))
                p.add_(p.grad, alpha=-0.1)


@pytest.mark.parametrize("kind", [Odd, torch.optim.Adafactor])
def test_optimizers_that_have_no_rate_or_no_moments(kind: Any, tiny: Any, record: Any) -> None:
    optimizer, lists = kind(tiny.parameters()), Lists(tiny.embedding.weight)
    with record(optimizer, variables="everything"):
        take_steps(tiny, optimizer, lists=lists)
    lists.rows.pop("exp_avg", None)  # of another form
    lists.agree_with(record.path)
    assert record.noted("has no rate lr") == (kind is Odd)


def test_a_scheduler_of_an_optimizer_without_hooks(tiny: Any, record: Any) -> None:
    optimizer = Lookahead(adamw(tiny))
    with record(optimizer):
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (step + 1))
        take_steps(tiny, optimizer)
        scheduler.step()
    assert record.read().sizes["step"] == 4


def test_a_closure_of_none_is_no_closure(tiny: Any, record: Any) -> None:
    """Accelerate passes it to each step."""
    optimizer, kept = Scratch(tiny.parameters()), []
    optimizer.look = lambda _: None
    with record(optimizer):
        for batch in batches(3):
            optimizer.zero_grad()
            tiny(**batch)["loss"].backward()
            kept.append(tiny.embedding.weight.grad.clone())
            optimizer.step(None)
    ds = record.read()
    np.testing.assert_array_equal(ds.grad[1:], torch.stack(kept))
    assert np.isnan(ds.clip_coef).all()
    assert record.noted("while optimizer.step() ran")


@pytest.mark.filterwarnings("ignore")
def test_a_compiled_step_of_the_optimizer(tiny: Any, record: Any) -> None:
    """Its step calls that of torch, where the recorder listens inside the compiled function."""
    torch._dynamo.reset()
    optimizer = Clamping(tiny.parameters(), lr=0.01)
    step = torch.compile(optimizer.step, backend="eager")
    parts = {"zero_grad": optimizer.zero_grad, "state": optimizer.state}
    compiled = SimpleNamespace(step=step, **parts)
    lists = Lists(tiny.embedding.weight)
    with record(optimizer):
        take_steps(tiny, compiled, lists=lists)
    del lists.rows["grad"]
    lists.agree_with(record.path)


def test_a_scaler_that_steps_what_it_has_not_scaled(tiny: Any, record: Any) -> None:
    """The loss is that of the loop, and the gradient that of the step."""
    optimizer, losses, used = adamw(tiny), [], []
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    scaler.scale(torch.zeros(1))
    optimizer.register_step_pre_hook(lambda *_: used.append(tiny.embedding.weight.grad.clone()))
    with record(optimizer, scaler=scaler):
        for batch in batches(2):
            optimizer.zero_grad()
            loss = tiny(**batch)["loss"]
            loss.backward()
            losses.append(loss.item())
            scaler.step(optimizer)
            scaler.update()
    ds = record.read()
    np.testing.assert_array_equal(ds.grad[1:], torch.stack(used))
    assert ds.loss.values[1:].tolist() == losses
    assert (ds.clip_coef.values[1:] == 1).all()


def test_a_closure_that_assigns_its_gradients(tiny: Any, record: Any) -> None:
    optimizer, parameters = torch.optim.SGD(tiny.parameters(), lr=0.1), list(tiny.parameters())
    with record(optimizer):
        for batch in batches(3):

            def closure(batch: Any = batch) -> Any:
                loss = tiny(**batch)["loss"]
                for parameter, gradient in zip(
                    parameters, torch.autograd.grad(loss, parameters), strict=True
                ):
                    parameter.grad = gradient
                return loss

            optimizer.step(closure)
    ds = record.read()
    assert ds.sizes["step"] == 4
    assert np.isfinite(ds.loss.values[1:]).all()
    assert replay(record.path).clean


def test_one_of_several_optimizers_has_no_gradients(tiny: Any, record: Any) -> None:
    first = torch.optim.AdamW([tiny.embedding.weight])
    second = torch.optim.SGD(tiny.mix.parameters(), lr=0.1)
    tiny.mix.requires_grad_(False)
    with record([first, second]):
        for batch in batches(3):
            first.zero_grad()
            tiny(**batch)["loss"].backward()
            first.step()
            second.step()
    assert record.read().sizes["step"] == 4


def test_a_step_bound_by_a_scheduler_does_not_keep_the_recording(tiny: Any, record: Any) -> None:
    optimizer = adamw(tiny)
    with record(optimizer) as run:
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)
        take_steps(tiny, optimizer, 2)
        scheduler.step()
        alive = weakref.ref(run)
    del run
    gc.collect()
    assert alive() is None
    take_steps(tiny, optimizer, 2)


def test_a_subclass_that_changes_weights_has_no_note(tiny: Any, record: Any) -> None:
    class Normalizing(torch.optim.SGD):
        def step(self, closure: Any = None) -> None:
            super().step(closure)
            for parameter in self.param_groups[0]["params"]:
                parameter.data.clamp_(-1, 1)

    with record(optimizer := Normalizing(tiny.parameters(), lr=0.1)):
        take_steps(tiny, optimizer)
    assert not record.noted("a hook after the step")


def test_the_gradient_of_the_other_parameters_before_clipping(tiny: Any, record: Any) -> None:
    optimizer, expected = adamw(tiny), []
    with record(optimizer, variables="everything"):
        for batch in batches(3):
            optimizer.zero_grad()
            tiny(**batch)["loss"].backward()
            expected.append(tiny.mix.weight.grad.clone())
            tiny.mix.bias.grad = None
            torch.nn.utils.clip_grad_norm_(tiny.parameters(), 0.1)
            optimizer.step()
    got = record.read().traj.parameter("mix.weight").grad[1:]
    np.testing.assert_array_equal(got, torch.stack(expected))
