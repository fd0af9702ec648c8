"""Steps of optimizers in loops that others wrote: each row is one step, or the run notes it."""

from __future__ import annotations

import copy
import io
import os
import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")
from list_recorder import HIDDEN, VOCAB, Lists, batches  # noqa: E402
from loops_of_others import adamw, steps, take_steps  # noqa: E402

from trajstore import open_run  # noqa: E402

pytestmark = pytest.mark.torch


def test_the_rate_of_a_loaded_optimizer(tiny: Any, record: Any) -> None:
    optimizer = adamw(tiny, lr=0.005)
    with record(optimizer, variables=("matrix", "norms")):
        optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: step / 4)
        for batch in batches(4):
            optimizer.zero_grad()
            tiny(**batch)["loss"].backward()
            optimizer.step()
            scheduler.step()
    ds = record.read()
    assert ds.lr.values[1:].tolist() == [0.0, 0.00125, 0.0025, 0.00375]
    assert np.isfinite(ds.param_update_lost.values[2:]).all()


def test_a_group_that_is_added_in_the_middle(tiny: Any, record: Any) -> None:
    optimizer = torch.optim.AdamW([tiny.embedding.weight], lr=0.01)
    with record(optimizer, variables="everything"):
        for number, _ in enumerate(steps(tiny, optimizer, 4)):
            if number == 1:
                optimizer.add_param_group({"params": list(tiny.mix.parameters()), "lr": 0.1})
    ds = record.read()
    assert ds.sizes["step"] == 5
    assert record.noted("params_lr", "shape (2,)")
    assert np.isfinite(ds.lr.values[1:]).all()


def test_a_rate_that_is_a_tensor_or_a_list_of_one(tiny: Any, record: Any) -> None:
    optimizer = adamw(tiny, lr=torch.tensor([0.01]))
    with record(optimizer, variables=("matrix", "everything")):
        for _ in steps(tiny, optimizer):
            optimizer.param_groups[0]["lr"].mul_(0.5)
    expected = [np.float32(0.01) / 2**n for n in (1, 2, 3)]
    np.testing.assert_allclose(record.read().lr.values[1:], expected)


def test_a_parameter_that_is_replaced(tiny: Any, record: Any) -> None:
    optimizer = adamw(tiny)
    lists = Lists(tiny.embedding.weight)
    with record(optimizer):
        for number, batch in enumerate(batches(4)):
            if number == 2:
                new = torch.nn.Parameter(tiny.embedding.weight.detach().clone() * 2)
                tiny.embedding.weight = tiny.head.weight = lists.parameter = new
                optimizer.param_groups[0]["params"][0] = new
            optimizer.zero_grad()
            tiny(**batch)["loss"].backward()
            lists.add(grad=lists.parameter.grad)
            optimizer.step()
            lists.add(W=lists.parameter)
    lists.agree_with(record.path)
    assert record.noted("another tensor")


def test_a_model_that_changes_its_type(tiny: Any, record: Any) -> None:
    optimizer = torch.optim.SGD(tiny.parameters(), lr=0.1)
    with record(optimizer):
        for number, _ in enumerate(steps(tiny, optimizer, 4)):
            if number == 1:
                tiny.double()
                optimizer.zero_grad()
    assert number == 3, "the training was ended"
    assert record.noted("recording ended in step 2", "float64")
    ds = record.read()
    assert ds.attrs["status"] == "interrupted"
    assert ds.sizes["step"] == 2


def test_models_are_saved_and_copied_while_they_are_recorded(tiny: Any, record: Any) -> None:
    optimizer = adamw(tiny)
    with record(optimizer, variables=("everything", "hidden_mean")):
        for _ in steps(tiny, optimizer):
            file = io.BytesIO()
            torch.save(tiny, file)
            copied = copy.deepcopy(tiny)
    assert b"trajstore.trainers" not in file.getvalue()
    file.seek(0)
    loaded = torch.load(file, weights_only=False)
    for other in (loaded, copied, pickle.loads(pickle.dumps(copied))):
        assert other(**batches(1)[0])["loss"].isfinite()


def test_a_new_optimizer(tiny: Any, record: Any) -> None:
    first = adamw(tiny)
    with record(first):
        take_steps(tiny, first, 3)
        second = adamw(tiny)
        take_steps(tiny, second, 3)
    ds = record.read()
    assert ds.sizes["step"] == 4
    assert record.noted("changed", "after the last row")
    assert any("after the last row" in entry["note"] for entry in ds.attrs["notes"])


@pytest.mark.parametrize(("through_data", "every"), [(False, 1), (True, 3)])
def test_weights_that_are_written_after_the_step(
    through_data: bool, every: int, tiny: Any, record: Any
) -> None:
    optimizer = adamw(tiny)
    W = tiny.embedding.weight
    start = W.detach().clone()
    with record(optimizer, every=every):
        for number, _ in enumerate(steps(tiny, optimizer, 4)):
            if number:
                with torch.no_grad():
                    (W.data if through_data else W)[13:] = start[13:]
    assert record.noted("code outside optimizer.step() changed")
    (entry,) = [note for note in record.read().attrs["notes"] if "outside" in note["note"]]
    assert (entry["first_step"], entry["count"]) == (2, 3)


def test_usual_loops_have_no_such_note(tiny: Any, record: Any) -> None:
    optimizer = adamw(tiny)
    with record(optimizer, every=2, is_dead=np.arange(VOCAB) >= 13):
        for batch in batches(3):
            for _ in range(2):
                (tiny(**batch)["loss"] / 2).backward()
            with torch.no_grad():
                tiny(**batch)
            torch.nn.utils.clip_grad_norm_(tiny.parameters(), 0.1)
            optimizer.step()
            optimizer.zero_grad()
    assert record.notes == []


class Lookahead(torch.optim.Optimizer):
    """Wraps an optimizer, and does not call the constructor of its base class."""

    def __init__(self, inner: Any) -> None:
        self.inner, self.param_groups, self.state = inner, inner.param_groups, inner.state

    def step(self, closure: Any = None) -> None:
        self.inner.step()
        with torch.no_grad():
            for group in self.param_groups:
                for parameter in group["params"]:
                    parameter.mul_(0.99)

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.inner.zero_grad(set_to_none)


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


def test_optimizers_that_wrap_or_have_no_rate(tiny: Any, record: Any) -> None:
    for optimizer in (Lookahead(adamw(tiny)), Odd(tiny.parameters()),
                      torch.optim.Adafactor(tiny.parameters())):  # fmt: skip
        lists = Lists(tiny.embedding.weight)
        record.notes.clear()
        with record(optimizer, overwrite=True, variables="everything"):
            take_steps(tiny, optimizer, lists=lists)
        lists.agree_with(record.path)
        assert record.noted("has no rate lr") == isinstance(optimizer, Odd)
        assert not record.noted("outside optimizer.step()")


def test_weights_loaded_before_the_first_step(tiny: Any, record: Any) -> None:
    optimizer = adamw(tiny)
    with record(optimizer, variables="everything"):
        tiny.load_state_dict({k: v + 1 for k, v in tiny.state_dict().items()})
        lists = Lists(tiny.embedding.weight)
        mix = tiny.mix.weight.detach().clone()
        take_steps(tiny, optimizer)
    ds = record.read()
    assert np.array_equal(ds.W.values[0], lists.rows["W"][0])
    np.testing.assert_array_equal(ds.traj.parameter("mix.weight").W[0], mix)


@pytest.mark.parametrize("without", ["matrix", "backward"])
def test_a_first_step_without_a_gradient(without: str, tiny: Any, record: Any) -> None:
    optimizer = adamw(tiny)
    lists = Lists(tiny.embedding.weight)
    with record(optimizer):
        for number, batch in enumerate(batches(3)):
            optimizer.zero_grad()
            if number:
                tiny(**batch)["loss"].backward()
            elif without == "matrix":
                tiny.mix(torch.ones(HIDDEN)).sum().backward()
            if without == "backward" and not number:
                optimizer.step()  # it changes nothing, so it is no step
                continue
            gradient = lists.parameter.grad
            nan = torch.full_like(lists.parameter, float("nan"))
            lists.add(grad=nan if gradient is None else gradient)
            optimizer.step()
            lists.add(W=lists.parameter)
            state = optimizer.state.get(lists.parameter, {})
            zero = torch.zeros_like(lists.parameter)
            lists.add(exp_avg=state.get("exp_avg", zero))
    ds = lists.agree_with(record.path)
    assert np.isfinite(ds.loss.values[2:]).all()
    assert ds.sizes["step"] == (3 if without == "backward" else 4)


@pytest.mark.parametrize("fused", [False, True])
def test_a_scaler_that_is_not_passed(fused: bool, tiny: Any, record: Any) -> None:
    optimizer = adamw(tiny, fused=fused)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**14)
    lists = Lists(tiny.embedding.weight)
    with record(optimizer):
        for batch in batches(3):
            optimizer.zero_grad()
            loss = tiny(**batch)["loss"]
            scaler.scale(loss).backward()
            lists.add(grad=lists.parameter.grad / scaler.get_scale(), loss=loss)
            scaler.step(optimizer)
            scaler.update()
            lists.add(W=lists.parameter)
    ds = lists.agree_with(record.path)
    assert ds.skipped.values[1:].tolist() == [0, 0, 0]
    assert not record.noted("GradScaler")


@pytest.mark.filterwarnings("ignore")
def test_a_compiled_step_of_the_optimizer(tiny: Any, record: Any) -> None:
    """Its step calls that of torch, where the recorder listens inside the compiled function."""

    class Clamping(torch.optim.AdamW):
        def step(self, closure: Any = None) -> Any:
            for parameter in tiny.parameters():
                parameter.grad.clamp_(-1e-3, 1e-3)
            return super().step(closure)

    torch._dynamo.reset()
    optimizer = Clamping(tiny.parameters(), lr=0.01)
    step = torch.compile(optimizer.step, backend="eager")
    lists = Lists(tiny.embedding.weight)
    with record(optimizer):
        for batch in batches(3):
            optimizer.zero_grad()
            tiny(**batch)["loss"].backward()
            step()
            lists.add(W=lists.parameter)
    del lists.rows["grad"]
    lists.agree_with(record.path)


@pytest.mark.parametrize("at", range(1, 12))
def test_an_interruption_in_a_hook(at: int, tiny: Any, record: Any, monkeypatch: Any) -> None:
    """A row and its step are complete together, or the recording ends."""
    from trajstore.trainers.recording.parameter_rows import ParameterRows

    calls = {"count": 0}

    def interrupted(original: Any) -> Any:
        def call(self: Any, *args: Any, **kwargs: Any) -> Any:
            calls["count"] += 1
            if calls["count"] == 22 + at:
                raise KeyboardInterrupt
            return original(self, *args, **kwargs)

        return call

    for name in ("set", "complete", "_put", "_store_row"):
        monkeypatch.setattr(ParameterRows, name, interrupted(getattr(ParameterRows, name)))
    optimizer = adamw(tiny)
    lists = Lists(tiny.embedding.weight)
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


def built():
    model = torch.nn.Sequential(torch.nn.Embedding(7, 4), torch.nn.Linear(4, 7))
    return model, torch.optim.SGD(model.parameters(), lr=0.1)


def take_step(model, optimizer):
    model(torch.arange(7)).square().sum().backward()
    optimizer.step()


def losses(model, optimizer):
    with capture(model, optimizer, "run.zarr", parameter="0.weight"):
        while True:
            yield take_step(model, optimizer)


left_open = losses(*built())
attached = built()
attach(*attached, "attached.zarr", parameter="0.weight")
for _ in range(4):
    next(left_open)
    take_step(*attached)
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


class OwnStep(torch.optim.AdamW):
    """Clips, and clears the gradients, in its own step."""

    def step(self, closure: Any = None) -> Any:
        parameters = self.param_groups[0]["params"]
        torch.nn.utils.clip_grad_norm_(parameters, 0.1)
        super().step(closure)
        for parameter in parameters:
            parameter.grad = None


def test_a_step_that_calls_that_of_its_base_class(tiny: Any, record: Any) -> None:
    adamw(torch.nn.Linear(1, 1))  # torch adds hooks to the base class when it is first used
    optimizer, expected = OwnStep(tiny.parameters(), lr=0.01), []
    with record(optimizer):
        for output in steps(tiny, optimizer):
            expected.append(output["loss"].item())
    assert record.losses() == expected
    assert (record.read().clip_coef.values[1:] < 0.2).all()


def test_a_step_that_has_failed(tiny: Any, record: Any) -> None:
    optimizer, calls, expected = adamw(tiny), [0], []

    def fails_once(*_: Any) -> None:
        calls[0] += 1
        if calls[0] == 2:
            raise KeyboardInterrupt

    with record(optimizer):
        optimizer.register_step_pre_hook(fails_once)
        for batch in batches(4):
            try:
                optimizer.zero_grad(set_to_none=False)
                loss = tiny(**batch)["loss"]
                loss.backward()
                norm = torch.nn.utils.get_total_norm([p.grad for p in tiny.parameters()])
                optimizer.step()
            except KeyboardInterrupt:
                continue
            expected.append((loss.item(), float(norm)))
    ds = record.read()
    assert record.losses() == [loss for loss, _ in expected]
    np.testing.assert_allclose(ds.grad_norm[1:], [norm for _, norm in expected], rtol=1e-6)


def test_a_scheduler_that_a_hook_of_the_step_calls(tiny: Any, record: Any) -> None:
    optimizer = adamw(tiny)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (step + 1))
    optimizer.register_step_post_hook(lambda *_: scheduler.step())
    with record(optimizer, variables=("matrix", "everything")):
        take_steps(tiny, optimizer)
    ds = record.read()
    assert np.isnan(ds.lr.values[1:]).all()
    assert np.isnan(ds.params_lr.values[1:]).all()
    assert record.noted("lr is NaN", "scheduler")


def test_a_scheduler_of_an_optimizer_without_hooks(tiny: Any, record: Any) -> None:
    optimizer = Lookahead(adamw(tiny))
    with record(optimizer):
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (step + 1))
        take_steps(tiny, optimizer)
        scheduler.step()
    assert record.read().sizes["step"] == 4


class Scratch(torch.optim.Optimizer):
    """Uses the gradient as scratch memory after it has read it, as schedulefree does."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for p in self.param_groups[0]["params"]:
            p.sub_(p.grad, alpha=self.param_groups[0]["lr"])
            p.grad.div_(p.grad.square().sqrt() + p.abs())


def test_a_closure_of_none_is_no_closure(tiny: Any, record: Any, tmp_path: Path) -> None:
    """Accelerate passes it to each step; the gradient is looked at before the step, as without."""
    optimizer, kept = Scratch(tiny.parameters(), {"lr": 0.1}), []
    with record(optimizer):
        for batch in batches(3):
            optimizer.zero_grad()
            tiny(**batch)["loss"].backward()
            kept.append(tiny.embedding.weight.grad.clone())
            torch.nn.utils.clip_grad_norm_(tiny.parameters(), 0.1)
            optimizer.step(None)
    ds = record.read()
    np.testing.assert_array_equal(ds.grad[1:], torch.stack(kept))
    assert not any("between the backward pass" in note for note in record.notes)
