"""Steps and hooks in loops that others wrote: each row is one step, or the run notes it.

Hooks stand beside those of other tools: they listen, keep little, and end with the recording.
"""

from __future__ import annotations

import copy
import functools
import gc
import io
import itertools
import os
import pickle
import subprocess
import sys
import weakref
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from loops.optimizers import Clamping
from trainings import Lists, TinyModel, adamw, batches, steps, take_steps

from trajstore import open_run
from trajstore.trainers import capture, replay
from trajstore.trainers.recording.forward_values import ForwardPass
from trajstore.trainers.recording.parameter_rows import ParameterRows


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
                    losses.append(model(**batch)["loss"])
                    accelerator.backward(losses[-1])
                    if accelerator.sync_gradients:
                        lists.add(loss=torch.stack(losses).mean(), grad=lists.parameter.grad)
                        losses.clear()
                        accelerator.clip_grad_norm_(model.parameters(), 0.3)
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
    assert replay(record.path).clean


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


class Normalizing(torch.optim.SGD):
    def step(self, closure: Any = None) -> None:
        super().step(closure)
        for parameter in self.param_groups[0]["params"]:
            parameter.data.clamp_(-1, 1)


@pytest.mark.parametrize("kind", [Odd, torch.optim.Adafactor, Normalizing])
def test_optimizers_of_other_kinds(kind: Any, tiny: Any, record: Any) -> None:
    optimizer, lists = kind(tiny.parameters()), Lists(tiny.embedding.weight)
    with record(optimizer, variables="everything"):
        take_steps(tiny, optimizer, lists=lists)
    lists.rows.pop("exp_avg", None)  # of another form
    lists.agree_with(record.path)
    assert record.noted("has no rate lr") == (kind is Odd)
    assert not record.noted("a hook after the step")


@pytest.mark.nightly  # 4 s, in which torch compiles
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
    optimizer, lists = adamw(tiny), Lists(tiny.embedding.weight)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    scaler.scale(torch.zeros(1))
    optimizer.register_step_pre_hook(lambda *_: lists.add(grad=lists.parameter.grad))
    with record(optimizer, scaler=scaler):
        for batch in batches(2):
            optimizer.zero_grad()
            loss = tiny(**batch)["loss"]
            loss.backward()
            lists.add(loss=loss)
            scaler.step(optimizer)
            scaler.update()
            lists.after_step(optimizer)
    ds = lists.agree_with(record.path)
    assert (ds.clip_coef.values[1:] == 1).all()


def test_one_of_several_optimizers_has_no_gradients(tiny: Any, record: Any) -> None:
    first = torch.optim.AdamW([tiny.embedding.weight])
    second = torch.optim.SGD(tiny.mix.parameters(), lr=0.1)
    tiny.mix.requires_grad_(False)
    with record([first, second]):
        for _ in range(3):
            take_steps(tiny, first, 1)
            second.step()
    assert record.read().sizes["step"] == 4


def test_what_holds_an_optimizer_or_binds_its_step_does_not_keep_the_recording(
    tiny: Any, record: Any
) -> None:
    optimizer = adamw(tiny)
    with record(SimpleNamespace(optimizer=optimizer)) as run:
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0 + step)
        take_steps(tiny, optimizer, 2, after=lambda *_: scheduler.step())
        alive = weakref.ref(run)
    del run
    gc.collect()
    assert alive() is None
    take_steps(tiny, optimizer, 2)
    assert record.read().lr.values[1:].tolist() == [0.01, 0.02]


@pytest.fixture
def wrap(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Wrap a function of torch, as another tool does."""
    return lambda owner, name, kind: monkeypatch.setattr(owner, name, kind(getattr(owner, name)))


@pytest.mark.parametrize("before", [True, False])
def test_another_tool_wraps_backward(before: bool, tiny: Any, record: Any, wrap: Any) -> None:
    optimizer, backward, lists = adamw(tiny), torch.autograd.backward, Lists(tiny.embedding.weight)
    if before:
        wrap(torch.autograd, "backward", functools.partial)
    with record(optimizer):
        for _ in steps(tiny, optimizer, lists=lists):
            kind = (lambda _: backward) if before else functools.partial  # taken off, or put on
            wrap(torch.autograd, "backward", kind)
    lists.agree_with(record.path)


def test_another_tool_wraps_the_step_of_the_scaler(
    tiny: Any, record: Any, tmp_path: Path, wrap: Any
) -> None:
    """Two recordings then replace the function, one inside the other."""
    scalers, optimizer, other = torch.amp.GradScaler, adamw(tiny), TinyModel()
    scaler = scalers("cpu")
    with record(optimizer, scaler=scaler):
        wrap(scalers, "step", functools.partialmethod)
        with capture(other, others := adamw(other), tmp_path / "b.zarr"):
            take_steps(other, others, 1)
            for batch, factor in zip(batches(3), (1.0, float("inf"), 1.0), strict=True):
                optimizer.zero_grad()
                scaler.scale(tiny(**batch)["loss"] * factor).backward()
                scaler.step(optimizer)
                scaler.update()
    assert record.read().skipped.values[1:].tolist() == [0, 1, 0]
    assert "step" not in vars(scaler)


def test_passes_without_a_step_keep_few_values_and_are_noted(tiny: Any, record: Any) -> None:
    """The loop may put back the gradients of the last ones."""

    def passes() -> int:
        gc.collect()
        return sum(type(thing) is ForwardPass for thing in gc.get_objects())

    optimizer, before = adamw(tiny), passes()
    with record(optimizer):
        for number, batch in enumerate(batches(70)):
            optimizer.zero_grad()
            loss = tiny(**batch)["loss"]
            if number % 8:
                loss.backward()
            else:
                torch.autograd.grad(loss, [*tiny.parameters()])
        assert passes() - before <= 10
    assert record.noted("64 backward passes have ended without a step of AdamW")
    assert record.notes[-1].startswith("no step of AdamW was taken")
    assert not record.path.exists()


def test_a_graph_that_is_differentiated_twice(tiny: Any, record: Any) -> None:
    optimizer, lists = adamw(tiny), Lists(tiny.embedding.weight)
    with record(optimizer):
        for output in steps(tiny, optimizer, lists=lists):
            with pytest.raises(RuntimeError, match="second time"):
                output["loss"].backward()
    lists.agree_with(record.path)


def test_clipping_inside_a_dispatch_mode(tiny: Any, record: Any) -> None:
    from torch.utils.flop_counter import FlopCounterMode

    optimizer = adamw(tiny)
    with FlopCounterMode(display=False), record(optimizer):
        for _ in steps(tiny, optimizer):
            torch.nn.utils.clip_grad_norm_(tiny.parameters(), 0.3, foreach=True)
    ds = record.read()
    expected = 0.3 / (ds.grad_norm.values[1:] + 1e-6)
    np.testing.assert_allclose(ds.clip_coef.values[1:], expected, rtol=1e-6)


def test_models_are_saved_and_copied_while_they_are_recorded(tiny: Any, record: Any) -> None:
    optimizer, file = adamw(tiny), io.BytesIO()
    with record(optimizer, variables=("everything", "hidden_mean")):
        take_steps(tiny, optimizer, 2)
        torch.save(tiny, file)
        copied = copy.deepcopy(tiny)
    assert b"trajstore.trainers" not in file.getvalue()
    file.seek(0)
    loaded = torch.load(file, weights_only=False)
    for other in (loaded, copied, pickle.loads(pickle.dumps(copied))):
        assert other(**batches(1)[0])["loss"].isfinite()


@pytest.mark.parametrize("at", range(1, 12))
def test_an_interruption_in_a_hook(at: int, tiny: Any, record: Any, monkeypatch: Any) -> None:
    """A row and its step are complete together, or the recording ends."""
    calls = itertools.count(1)

    def interrupted(original: Any) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            if next(calls) == 14 + at:
                raise KeyboardInterrupt
            return original(*args, **kwargs)

        return call

    for name in ("set", "complete", "_put", "_store_row"):
        monkeypatch.setattr(ParameterRows, name, interrupted(getattr(ParameterRows, name)))
    optimizer, lists = adamw(tiny), Lists(tiny.embedding.weight)
    with record(optimizer):
        for batch in batches(5):
            try:
                optimizer.zero_grad()
                tiny(**batch)["loss"].backward()
                optimizer.step()
            except KeyboardInterrupt:
                pass
            lists.add(W=lists.parameter)
    ds = record.read()
    assert ds.attrs["status"] == "interrupted"
    assert any("recording ended in step" in entry["note"] for entry in ds.attrs["notes"])
    kept = torch.stack(lists.rows["W"])[: ds.sizes["step"]]
    assert ds.step.values.tolist() == list(range(len(kept)))
    assert np.array_equal(ds.W.values, kept)


GENERATOR = """
import torch
from trajstore.trainers import attach, capture


model = torch.nn.Sequential(torch.nn.Embedding(7, 4), torch.nn.Linear(4, 7))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)


def losses():
    with capture(model, optimizer, "run.zarr", parameter="0.weight"):
        while True:
            yield model(torch.arange(7)).square().sum().backward()


attach(model, optimizer, "attached.zarr", parameter="0.weight")
left_open = losses()
for _ in range(4):
    next(left_open)
    optimizer.step()
"""


@pytest.mark.nightly  # 8 s, in which a process imports torch
def test_recorders_that_are_left_open(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", GENERATOR],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert (done.returncode, "Error" in done.stderr) == (0, False), done.stderr
    for name in ("run.zarr", "attached.zarr"):
        ds = open_run(tmp_path / name)
        assert (ds.attrs["status"], ds.step.values.tolist()) == ("interrupted", [0, 1, 2, 3, 4])
