"""Hooks beside those of other tools: they listen, keep little, and end with the recording."""

from __future__ import annotations

import copy
import functools
import gc
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
from trainings import Lists, TinyModel, adamw, batches, steps, take_steps  # noqa: E402

from trajstore import open_run  # noqa: E402
from trajstore.trainers import capture  # noqa: E402
from trajstore.trainers.recording.forward_values import ForwardPass  # noqa: E402

pytestmark = pytest.mark.torch


@pytest.mark.parametrize("before", [True, False])
def test_another_tool_wraps_backward(
    before: bool, tiny: Any, record: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    optimizer, backward, losses = adamw(tiny), torch.autograd.backward, []
    if before:
        monkeypatch.setattr(torch.autograd, "backward", functools.partial(backward))
    with record(optimizer):
        for output in steps(tiny, optimizer):
            losses.append(output["loss"].item())
            wrapped = backward if before else functools.partial(backward)
            monkeypatch.setattr(torch.autograd, "backward", wrapped)
    assert record.losses() == losses


def test_another_tool_wraps_the_step_of_the_scaler(
    tiny: Any, record: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two recordings then replace the function, one inside the other."""
    scalers, optimizer, other = torch.amp.GradScaler, adamw(tiny), TinyModel()
    scaler = scalers("cpu")
    with record(optimizer, scaler=scaler):
        original = scalers.step
        monkeypatch.setattr(scalers, "step", functools.partialmethod(original))
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
    from trajstore.trainers.recording.parameter_rows import ParameterRows

    calls = {"count": 0}

    def interrupted(original: Any) -> Any:
        def call(self: Any, *args: Any, **kwargs: Any) -> Any:
            calls["count"] += 1
            if calls["count"] == 14 + at:
                raise KeyboardInterrupt
            return original(self, *args, **kwargs)

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
