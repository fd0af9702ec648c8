"""What a step did to gradients, weights and loss: recorded as it was, or missing with a note."""

from __future__ import annotations

import contextlib
import functools
import gc
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from trajstore import open_run  # noqa: E402
from trajstore.trainers import capture, replay  # noqa: E402
from trajstore.trainers.recording.device_to_host import bit_sums  # noqa: E402
from trajstore.trainers.recording.passes import ForwardPass  # noqa: E402

pytestmark = pytest.mark.torch

TOKENS = 29


class Loop:
    """A tiny model, its optimizer, and what really happened in each step."""

    def __init__(self, make: Callable[..., Any] | None = None) -> None:
        torch.manual_seed(0)
        self.model = torch.nn.Sequential(torch.nn.Embedding(TOKENS, 8), torch.nn.Linear(8, TOKENS))
        self.weight = self.model[0].weight
        self.parameters = list(self.model.parameters())
        self.optimizer = (make or torch.optim.AdamW)(self.parameters, lr=0.01)
        self.losses: list[float] = []
        self.consumed: list[Any] = []

    def loss(self) -> Any:
        ids = torch.randint(TOKENS, (3, 6))
        loss = torch.nn.functional.cross_entropy(self.model(ids).flatten(0, 1), ids.flatten())
        self.losses.append(loss.item())
        return loss

    def backward(self) -> None:
        self.model.zero_grad()
        self.loss().backward()

    def step(self) -> None:
        self.consumed.append(self.weight.grad.clone())
        self.optimizer.step()


@pytest.fixture
def recorded(record: Any) -> Any:
    record.options["parameter"] = "0.weight"
    return record


def assert_consumed(ds: Any, consumed: list[Any]) -> None:
    """Check that grad · clip_coef, or grad without a factor, is what each step consumed."""
    assert ds.sizes["step"] == len(consumed) + 1
    for row, true in enumerate(consumed, 1):
        factor = ds.clip_coef.values[row]
        factor = np.float32(1) if np.isnan(factor) else factor
        np.testing.assert_array_equal(ds.grad.values[row] * factor, true)


def clamped(base: Any, change: Callable[[Any], None], used: list[Any]) -> Any:
    class Changed(base):  # type: ignore[misc]
        def step(self, closure: Any = None) -> Any:
            for group in self.param_groups:
                for parameter in group["params"]:
                    change(parameter)
            used.append(self.param_groups[0]["params"][0].grad.clone())
            return super().step(closure)

    return Changed


def replace_gradient(parameter: Any) -> None:
    parameter.grad = parameter.grad.clamp(-0.01, 0.01)


@pytest.mark.parametrize(
    "change",
    [
        lambda parameter: parameter.grad.clamp_(-0.01, 0.01),
        lambda parameter: parameter.grad.data.clamp_(-0.01, 0.01),
        replace_gradient,
    ],
    ids=["in place", "of data", "out of place"],
)
def test_a_step_that_changes_the_gradient_first(change: Any, recorded: Any) -> None:
    used: list[Any] = []
    loop = Loop(clamped(torch.optim.AdamW, change, used))
    with recorded(loop.optimizer, loop.model):
        for _ in range(2):
            loop.backward()
            loop.optimizer.step()
    ds = recorded.read()
    assert_consumed(ds, used)
    assert np.isnan(ds.clip_coef.values[1:]).all()
    assert recorded.noted("not by one factor")


def test_a_hook_before_the_step_that_changes_the_gradient(recorded: Any) -> None:
    def clip(*_: Any) -> None:
        torch.nn.utils.clip_grad_norm_(loop.parameters, 0.1)

    loop = Loop()
    with recorded(loop.optimizer, loop.model):
        for _ in range(2):
            loop.backward()
            hook = loop.optimizer.register_step_pre_hook(clip)
            loop.optimizer.step()
            hook.remove()
            loop.consumed.append(loop.weight.grad.clone())
    ds = recorded.read()
    assert_consumed(ds, loop.consumed)
    assert (ds.clip_coef.values[1:] < 1).all()
    assert replay(recorded.path).replayed == 2


class Virtual(torch.optim.AdamW):
    calls = 0

    def step(self, closure: Any = None) -> Any:
        self.calls += 1
        return None if self.calls % 2 else super().step(closure)


class VirtualData(torch.optim.Optimizer):
    """It changes the data of the parameters, which does not count the changes."""

    calls = 0

    def __init__(self, parameters: Any, lr: float) -> None:
        super().__init__(parameters, {"lr": lr})

    def step(self) -> None:
        self.calls += 1
        for parameter in self.param_groups[0]["params"]:
            if self.calls % 2 == 0:
                parameter.data.sub_(parameter.grad.data, alpha=self.param_groups[0]["lr"])


@pytest.mark.parametrize("optimizer", [Virtual, VirtualData])
def test_a_call_that_changes_nothing_is_no_step(optimizer: Any, recorded: Any) -> None:
    loop = Loop(optimizer)
    weights = []
    with recorded(loop.optimizer, loop.model):
        for number in range(6):
            loop.loss().backward()
            loop.optimizer.step()
            if number % 2:
                loop.consumed.append(loop.weight.grad.clone())
                weights.append(loop.weight.detach().clone())
                loop.model.zero_grad()
    ds = recorded.read()
    assert_consumed(ds, loop.consumed)
    np.testing.assert_array_equal(ds.W.values[1:], torch.stack(weights))
    assert ("exp_avg" in ds) == (optimizer is Virtual)


class OfData(VirtualData):
    def step(self) -> None:
        self.calls = 1
        super().step()


class Momentum(OfData):
    def step(self) -> None:
        super().step()
        for parameter in self.param_groups[0]["params"]:
            self.state[parameter]["held"] = parameter.grad.clone()


class Sub(torch.optim.AdamW):
    def step(self, closure: Any = None) -> Any:
        return super().step(closure)


@pytest.mark.parametrize("optimizer", [OfData, Momentum, Sub])
def test_a_step_is_seen_without_a_read_of_all_parameters(
    optimizer: Any, recorded: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    from trajstore.trainers.recording import step_end

    read_elements = []

    def counted(tensors: Any) -> Any:
        read_elements.append(sum(tensor.numel() for tensor in tensors))
        return bit_sums(tensors)

    monkeypatch.setattr(step_end, "bit_sums", counted)
    loop = Loop()
    large = torch.nn.Parameter(torch.ones(512, 512))
    loop.model.register_parameter("large", large)
    loop.optimizer = optimizer([*loop.parameters, large], lr=0.01)
    with recorded(loop.optimizer, loop.model):
        for number in range(4):
            loop.model.zero_grad()
            (loop.loss() + large.square().mean()).backward()
            if number == 1:
                read_elements.clear()
            loop.step()
    assert max(read_elements) < large.numel()
    assert_consumed(recorded.read(), loop.consumed)


@pytest.mark.parametrize("is_scaled", [True, False])
@pytest.mark.parametrize("steps", ["scaler", "plain"])
def test_each_scaler_by_what_it_does(is_scaled: bool, steps: str, recorded: Any) -> None:
    """The loss is that of the loop, and the gradient that of the step, in each combination."""
    loop = Loop()
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    scaler.scale(torch.zeros(1))
    loop.optimizer.register_step_pre_hook(lambda *_: loop.consumed.append(loop.weight.grad.clone()))
    with recorded(loop.optimizer, loop.model, scaler=scaler):
        for _ in range(2):
            loop.model.zero_grad()
            loss = loop.loss()
            (scaler.scale(loss) if is_scaled else loss).backward()
            if steps == "scaler":
                scaler.step(loop.optimizer)
                scaler.update()
            else:
                loop.optimizer.step()
    ds = recorded.read()
    assert_consumed(ds, loop.consumed)
    np.testing.assert_allclose(ds.loss.values[1:], loop.losses, rtol=1e-6)
    assert not [note for note in recorded.notes if "labels" not in note]


def test_assigned_gradients_are_clipped_as_those_of_backward(recorded: Any) -> None:
    from torch.nn.utils import clip_grad_norm_

    loop, norms = Loop(), []
    with recorded(loop.optimizer, loop.model, max_grad_norm=0.1) as run:
        for _ in range(2):
            loss = loop.loss()
            gradients = torch.autograd.grad(loss, loop.parameters)
            for parameter, gradient in zip(loop.parameters, gradients, strict=True):
                parameter.grad = gradient
            norms.append(clip_grad_norm_(loop.parameters, 0.1))
            run.observe(loss=loss)
            loop.step()
    ds = recorded.read()
    assert_consumed(ds, loop.consumed)
    np.testing.assert_array_equal(ds.grad_norm.values[1:], torch.stack(norms))
    assert (ds.clip_coef.values[1:] < 1).all()
    assert not recorded.noted("gradient")


def test_assigned_gradients_that_were_changed(recorded: Any) -> None:
    loop = Loop()
    with recorded(loop.optimizer, loop.model) as run:
        for _ in range(2):
            loss = loop.loss()
            for parameter, gradient in zip(
                loop.parameters, torch.autograd.grad(loss, loop.parameters), strict=True
            ):
                parameter.grad = gradient.mul_(0.5)
            run.observe(loss=loss)
            loop.step()
    ds = recorded.read()
    assert_consumed(ds, loop.consumed)
    assert np.isnan(ds.clip_coef.values[1:]).all()
    assert np.isnan(ds.grad_norm.values[1:]).all()
    np.testing.assert_allclose(ds.loss.values[1:], loop.losses, rtol=1e-6)
    assert recorded.noted("not that of a backward pass", "clipping before cannot be seen")


def test_another_tool_wraps_backward(recorded: Any) -> None:
    backward = torch.autograd.backward
    for number in range(2):
        loop = Loop()
        if number == 0:
            torch.autograd.backward = functools.partial(backward)
        try:
            with recorded(loop.optimizer, loop.model, overwrite=True):
                for step in range(3):
                    if step == 1:
                        torch.autograd.backward = backward
                    loop.backward()
                    loop.step()
        finally:
            torch.autograd.backward = backward
        ds = recorded.read()
        np.testing.assert_allclose(ds.loss.values[1:], loop.losses, rtol=1e-6)
    assert not [note for note in recorded.notes if "labels" not in note]


def test_a_pruned_matrix_is_followed(recorded: Any) -> None:
    import torch.nn.utils.prune as prune

    loop, weights = Loop(), []
    with recorded(loop.optimizer, loop.model):
        for number in range(4):
            if number == 2:
                prune.l1_unstructured(loop.model[0], "weight", 0.3)
            loop.backward()
            loop.step()
            weights.append(loop.weight.detach().clone())
    ds = recorded.read()
    np.testing.assert_array_equal(ds.W.values[1:], torch.stack(weights))
    np.testing.assert_array_equal(
        ds.exp_avg.values[-1], loop.optimizer.state[loop.weight]["exp_avg"]
    )
    assert recorded.noted("computes 0.weight from 0.weight_orig")
    assert replay(recorded.path).clean


def test_a_recording_does_not_read_a_parametrization(tmp_path: Path) -> None:
    """Spectral normalization changes its state whenever the weight is read."""
    states = []
    for recording in (True, False):
        loop = Loop()
        torch.nn.utils.parametrizations.spectral_norm(loop.model[0])
        loop.optimizer = torch.optim.AdamW(loop.model.parameters(), lr=0.01)
        name = "0.parametrizations.weight.original"
        if recording:
            run = capture(loop.model, loop.optimizer, tmp_path / "run.zarr", parameter=name)
            with run:
                for _ in range(3):
                    loop.backward()
                    loop.optimizer.step()
        else:
            for _ in range(3):
                loop.backward()
                loop.optimizer.step()
        states.append(loop.model.state_dict())
    for name, value in states[0].items():
        assert torch.equal(value, states[1][name]), name


def test_moments_of_a_matrix_that_the_optimizer_lacks_are_missing(recorded: Any) -> None:
    loop = Loop()
    with recorded(loop.optimizer, loop.model):
        for number in range(3):
            if number == 2:
                loop.model.load_state_dict(loop.model.state_dict(), assign=True)
                copy = torch.nn.Parameter(loop.weight.detach().clone())
                loop.model[0].weight = copy
            loop.backward()
            loop.optimizer.step()
    ds = recorded.read()
    assert np.isfinite(ds.exp_avg.values[2]).all()
    assert np.isnan(ds.exp_avg.values[-1]).all()
    assert recorded.noted("not in the optimizer")


def test_one_loss_that_is_differentiated_for_each_part(recorded: Any) -> None:
    loop = Loop()
    with recorded(loop.optimizer, loop.model):
        for _ in range(2):
            loop.model.zero_grad()
            loss = loop.loss()
            loss.backward(retain_graph=True, inputs=[loop.weight])
            (loss * 1.0).backward(inputs=list(loop.model[1].parameters()))
            loop.step()
    ds = recorded.read()
    np.testing.assert_allclose(ds.loss.values[1:], loop.losses, rtol=1e-6)


def test_values_observed_in_a_dropped_step(recorded: Any) -> None:
    loop, kept = Loop(), []
    with recorded(loop.optimizer, loop.model, variables="matrix,batch") as run:
        for number in range(4):
            loop.model.zero_grad()
            loss = loop.loss() * (float("nan") if number == 1 else 1.0)
            run.observe(loss=loss, batch=[number])
            if torch.isfinite(loss):
                loss.backward()
                if number != 2:
                    kept.append(number)
                    loop.step()
    ds = recorded.read()
    losses = [loop.losses[number] for number in kept]
    np.testing.assert_allclose(ds.loss.values[1:], losses, rtol=1e-6)
    assert ds.batch.values[1:, 0].tolist() == kept


def test_a_divided_gradient_is_recorded_as_it_is(recorded: Any) -> None:
    loop = Loop()
    with recorded(loop.optimizer, loop.model):
        for _ in range(2):
            loop.model.zero_grad()
            for _ in range(3):
                loop.loss().backward()
            for parameter in loop.parameters:
                parameter.grad /= 3
            loop.step()
    assert_consumed(recorded.read(), loop.consumed)
    assert recorded.noted("sum of what 3 backward passes")
    result = replay(recorded.path)
    assert (result.clean, result.replayed) == (True, 2)


def test_weights_written_outside_the_step_are_not_proven(recorded: Any) -> None:
    loop = Loop(torch.optim.SGD)
    weights = [loop.weight.detach().clone()]
    with recorded(loop.optimizer, loop.model):
        for _ in range(3):
            loop.backward()
            with torch.no_grad():
                for parameter in loop.parameters:
                    parameter.sub_(parameter.grad, alpha=0.5)
            loop.optimizer.step()
            weights.append(loop.weight.detach().clone())
    np.testing.assert_array_equal(recorded.read().W.values, torch.stack(weights))
    result = replay(recorded.path)
    assert result.clean
    assert [(span.first, span.last) for span in result.unreplayed] == [(1, 3)]
    assert "outside optimizer.step()" in result.unreplayed[0].reason


def test_a_loop_without_steps_has_a_note(recorded: Any) -> None:
    loop = Loop()
    with recorded(loop.optimizer, loop.model):
        for _ in range(25):
            loop.backward()
    assert recorded.noted("without a step of AdamW")


def test_the_wrapper_of_an_optimizer(recorded: Any) -> None:
    """A framework's object with the inner optimizer in an attribute, whose step the loop calls."""
    loop = Loop()
    inner = loop.optimizer

    class Wrapper(type(inner)):  # type: ignore[misc]
        def __init__(self) -> None:
            self.__dict__ = {**inner.__dict__, "held": inner}

        def step(self, closure: Any = None) -> Any:
            for parameter in loop.parameters:
                parameter.grad.mul_(2)
            return inner.step(closure)

    loop.optimizer = wrapper = Wrapper()
    with recorded(loop.optimizer, loop.model):
        for caller in (wrapper, inner):
            loop.backward()
            caller.step()
            loop.consumed.append(loop.weight.grad.clone())
    ds = recorded.read()
    assert_consumed(ds, loop.consumed)
    assert ds.clip_coef.values[1:].tolist() == [2, 1]
    assert not recorded.noted("Wrapper")
    assert replay(recorded.path).replayed == 2


def test_a_schedule_that_steps_the_optimizer_in_a_method_of_another_name(recorded: Any) -> None:
    loop = Loop()
    schedule = SimpleNamespace(optimizer=loop.optimizer)
    with recorded(schedule, loop.model):
        for rate in (0.5, 0.25):
            loop.backward()
            loop.optimizer.param_groups[0]["lr"] = rate
            schedule.optimizer.step()
    assert recorded.read().lr.values[1:].tolist() == [0.5, 0.25]


def test_a_wrapper_that_catches_an_error_of_the_inner_step(recorded: Any) -> None:
    class Retries:
        def __init__(self, inner: Any) -> None:
            self.inner, self.param_groups = inner, inner.param_groups

        def step(self) -> None:
            with contextlib.suppress(ZeroDivisionError):
                self.inner.step(lambda: 1 / 0)
            self.inner.step()

    loop = Loop()
    loop.optimizer = Retries(loop.optimizer)
    with recorded(loop.optimizer, loop.model):
        for _ in range(2):
            loop.backward()
            loop.step()
    assert_consumed(recorded.read(), loop.consumed)


def test_another_tool_wraps_the_step_of_the_scaler(
    recorded: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two recordings then replace the function, one inside the other."""
    scalers, loop, other = torch.amp.GradScaler, Loop(), Loop()

    def wrapper(*given: Any, **named: Any) -> Any:
        return original(*given, **named)

    scaler = scalers("cpu")
    with recorded(loop.optimizer, loop.model, scaler=scaler):
        original = scalers.step
        monkeypatch.setattr(scalers, "step", wrapper)
        with capture(other.model, other.optimizer, tmp_path / "b.zarr", parameter="0.weight"):
            other.backward()
            other.step()
            for factor in (1.0, float("inf"), 1.0):
                loop.model.zero_grad()
                scaler.scale(loop.loss() * factor).backward()
                scaler.step(loop.optimizer)
                scaler.update()
    assert recorded.read().skipped.values[1:].tolist() == [0, 1, 0]
    assert "step" not in vars(scaler)


def test_passes_without_a_step_keep_no_values(recorded: Any) -> None:
    def passes() -> int:
        gc.collect()
        return sum(type(thing) is ForwardPass for thing in gc.get_objects())

    loop, before = Loop(), passes()
    with recorded(loop.optimizer, loop.model):
        for number in range(8):
            loop.model.zero_grad()
            if number < 4:
                loop.loss().backward()
            else:
                torch.autograd.grad(loop.loss(), loop.parameters)
            if number in (3, 7):
                assert passes() - before <= 1
        loop.backward()
        loop.step()


def test_the_mean_of_the_tokens_of_a_pass_is_no_mean_of_passes(recorded: Any) -> None:
    loop = Loop()
    with recorded(loop.optimizer, loop.model):
        loop.optimizer.zero_grad()
        for count in (5, 7):
            ids = torch.arange(count)
            losses = torch.nn.functional.cross_entropy(loop.model(ids), ids, reduction="none")
            (losses.sum() / torch.ones(count).sum()).backward()
        loop.step()
    assert recorded.noted("sum of what 2 backward passes")


def test_a_graph_that_is_differentiated_twice(recorded: Any) -> None:
    loop = Loop()
    with recorded(loop.optimizer, loop.model):
        loss = loop.loss() / 2
        loss.backward()
        with pytest.raises(RuntimeError, match="second time"):
            loss.backward()
        loop.step()
    assert_consumed(recorded.read(), loop.consumed)


def test_a_gradient_that_is_removed_before_the_step(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Embedding(7, 4), torch.nn.Linear(4, 4, bias=False))
    optimizer = torch.optim.AdamW(model.parameters())
    norms = []
    with capture(model, optimizer, tmp_path / "run.zarr", variables="everything"):
        for step in range(4):
            optimizer.zero_grad()
            model(torch.arange(7)).square().sum().backward()
            if step >= 2:
                model[1].weight.grad = None
            left = [p.grad for p in model.parameters() if p.grad is not None]
            norms.append(float(torch.nn.utils.get_total_norm(left)))
            optimizer.step()
    ds = open_run(tmp_path / "run.zarr", chunks=None)
    assert ds.grad_norm.values[1:].tolist() == norms
    assert np.isnan(ds.params_grad.values[1:]).all(axis=1).tolist() == [False, False, True, True]
