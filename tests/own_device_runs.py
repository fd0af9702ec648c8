"""Recordings on an accelerator of our own: one process for each branch of the recorder.

``python tests/own_device_runs.py`` prints a table of all configurations.
"""

from __future__ import annotations

import contextlib
import errno
import gc
import json
import os
import subprocess
import sys
import tempfile
import traceback
from collections import defaultdict
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import own_device
import pytest
import torch
import xarray as xr

STEPS, WARM, RESTORED = 6, 3, 4
SMALL_NORM = 0.05
BRANCHES = ("plain", "cuda", "mps")
CONFIGURATIONS: dict[str, dict[str, Any]] = {
    "capture": {},
    "tokens": {"options": {"tokens": [3, 16]}},
    "accumulation": {"parts": 2},
    "clipping": {"clip": SMALL_NORM},
    "bfloat16": {"dtype": torch.bfloat16},
    "side stream": {"stream": True},
    "everything": {"options": {"variables": "everything"}},
    "everything, fused": {"options": {"variables": "everything"}, "optimizer": {"fused": True}},
    "everything, clipping": {"options": {"variables": "everything"}, "clip": SMALL_NORM},
    "everything, scaler": {"options": {"variables": "everything"}, "scaled": True},
    "everything, rate as tensor": {
        "options": {"variables": "everything"},
        "optimizer": {"lr": torch.tensor(0.01), "foreach": False},
        "rate_on_device": True,
    },
    "everything, restored and resumed": {
        "options": {"variables": "everything"},
        "dropout": 0.1,
        "resumed": True,
    },
    "Trainer, everything": {"options": {"variables": "everything"}, "trainer": True},
}
MOST_OPERATIONS = {"capture": 20, "clipping": 30, "everything": 60}
"""Of torch that the recorder launches a step; to profile each configuration takes half a minute."""
Kept = dict[str, list[torch.Tensor]]


class Counts:
    """Waits for the device, and, where it is profiled, operations launched, a step.

    Parameters
    ----------
    waits : callable
        Returns the number of waits so far.
    """

    def __init__(self, waits: Callable[[], int]) -> None:
        self._waits = waits
        self.waits = self.operations = 0.0
        self.profiled = False

    def begin(self) -> None:
        """Start to count."""
        if self.profiled:
            cpu = torch.profiler.ProfilerActivity.CPU
            self._profile = torch.profiler.profile(activities=[cpu])
            self._profile.start()
        self._before = self._waits()

    def end(self, steps: int) -> None:
        """Count to here."""
        self.waits = (self._waits() - self._before) / steps
        from trainings import launched_in

        if self.profiled:
            self._profile.stop()
            self.operations = launched_in(self._profile).total() / steps


def train(
    path: Path | None,
    *,
    options: dict[str, Any] | None = None,
    optimizer: dict[str, Any] | None = None,
    dtype: torch.dtype = torch.float32,
    clip: float = 0.0,
    parts: int = 1,
    scaled: bool = False,
    stream: bool = False,
    rate_on_device: bool = False,
    dropout: float = 0.0,
    first: int = 0,
    counts: Counts,
) -> Kept:
    """Train, and record if there is a path; count the last steps; return copies of the test's own.

    With `first` the recorded state after that step is restored, and the recording resumed.
    """
    from trainings import batches

    from trajstore.trainers import capture, restore

    torch.manual_seed(first)
    model = on_device(dtype, dropout)
    settings: dict[str, Any] = {"lr": 0.01} | (optimizer or {})
    if rate_on_device:
        settings["lr"] = settings["lr"].to(own_device.NAME)
    adam = torch.optim.AdamW(model.parameters(), **settings)
    scaler = torch.amp.GradScaler(own_device.NAME, init_scale=2.0**10) if scaled else None
    options = {"variables": "matrix"} | (options or {})
    if first:
        restore(path, model, adam, step=first)
        options |= {"resume": True, "first_step": first}
    W, kept = model.embedding.weight, defaultdict(list)
    ids = [
        {name: tensor.to(own_device.NAME) for name, tensor in batch.items()}
        for batch in batches(STEPS * parts)
    ]
    recording: Any = contextlib.nullcontext()
    if path is not None:
        recording = capture(model, adam, path, max_grad_norm=clip, scaler=scaler, **options)
    chosen: Any = torch.Stream(device=own_device.NAME) if stream else None
    if chosen:
        chosen.wait_stream(torch.accelerator.current_stream())
    inside = torch.own.stream(chosen) if chosen else contextlib.nullcontext()
    with recording, inside:
        for step in range(first, STEPS):
            if step == max(WARM, first):
                counts.begin()
            losses = []
            for batch in ids[step * parts : (step + 1) * parts]:
                loss = model(**batch)["loss"] / parts
                losses.append(loss.detach().clone())
                (loss if scaler is None else scaler.scale(loss)).backward()
            if scaler is not None:
                scaler.unscale_(adam)
            kept["grad"].append(W.grad.clone())
            kept["loss"].append(sum(losses))
            kept["lr"].append(torch.as_tensor(settings["lr"]))
            kept["clip_coef"].append(torch.ones(()))
            if clip:
                norm = torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
                kept["clip_coef"][-1] = torch.clamp(clip / (norm + 1e-6), max=1.0)
            if scaler is None:
                adam.step()
            else:
                scaler.step(adam)
                scaler.update()
            keep_state(kept, model, adam)
            adam.zero_grad()
        counts.end(STEPS - max(WARM, first))
        torch.own.synchronize()
    return on_host(kept)


def train_with_trainer(
    path: Path | None, *, options: dict[str, Any] | None = None, counts: Counts
) -> Kept:
    """Train with a Trainer, its fused AdamW and its clipping; as `train`."""
    from accelerate import PartialState
    from trainings import BATCH, batches
    from transformers import Trainer, TrainerCallback, TrainingArguments

    from trajstore.trainers import TrajectoryCallback

    kept: Kept = defaultdict(list)

    class Keeping(TrainerCallback):
        def on_pre_optimizer_step(self, *_: Any, optimizer: Any, **__: Any) -> None:
            kept["lr"].append(torch.as_tensor(optimizer.param_groups[0]["lr"]))

        def on_optimizer_step(self, *_: Any, model: Any, optimizer: Any, **__: Any) -> None:
            keep_state(kept, model, optimizer)

        def on_step_end(self, args: Any, state: Any, *_: Any, **__: Any) -> None:
            if state.global_step == WARM:
                counts.begin()
            elif state.global_step == STEPS:
                counts.end(STEPS - WARM)

    with tempfile.TemporaryDirectory() as scratch:
        arguments = TrainingArguments(
            scratch, max_steps=STEPS, per_device_train_batch_size=BATCH, use_cpu=True, seed=0,
            max_grad_norm=SMALL_NORM, save_strategy="no", logging_strategy="no", report_to="none",
            disable_tqdm=True, dataloader_pin_memory=False, optim="adamw_torch_fused",
        )  # fmt: skip
        # There is no public way to train on a device that accelerate does not know.
        vars(arguments)["_setup_devices"] = PartialState().device = torch.device(own_device.NAME)
        texts = [
            {name: ids[number] for name, ids in batch.items()}
            for batch in batches(STEPS)
            for number in range(BATCH)
        ]
        torch.manual_seed(0)
        model = on_device()
        model.register_forward_hook(
            lambda model, args, output: kept["loss"].append(output["loss"].detach().clone())
        )
        trainer = Trainer(model, arguments, train_dataset=texts, callbacks=[Keeping()])
        if path is not None:
            trainer.add_callback(
                TrajectoryCallback(path, **({"variables": "matrix"} | (options or {})))
            )
        trainer.train()
    return on_host(kept)


def on_device(dtype: torch.dtype = torch.float32, dropout: float = 0.0) -> Any:
    from trainings import TinyModel

    model = TinyModel(dtype)
    model.mix = torch.nn.Sequential(model.mix, torch.nn.Dropout(dropout))
    model.to(own_device.NAME)
    model.head.weight = model.embedding.weight  # to() makes new parameters on this device
    return model


def keep_state(kept: Kept, model: Any, optimizer: Any) -> None:
    """Copy weights and moments after a step."""
    W = model.embedding.weight
    others = [tensor.detach().flatten() for tensor in model.parameters() if tensor is not W]
    state = getattr(optimizer, "optimizer", optimizer).state[W]
    for name, value in (("W", W), *state.items(), ("params", torch.cat(others))):
        if name != "step":
            kept[name].append(value.detach().clone())


def on_host(kept: Kept) -> Kept:
    return {name: [tensor.cpu() for tensor in rows] for name, rows in kept.items()}


def same(path: Path, kept: Kept) -> list[str]:
    """Return the variables that differ in a bit from the copies of the test."""
    ds, differing = xr.open_zarr(path), []
    for name, rows in kept.items():
        if name not in ds:
            if name != "params":
                differing.append(f"{name} is absent")
            continue
        stored = ds[name].values[-STEPS:].astype(np.float32)
        whole = torch.stack(rows).float().numpy()
        if "token" in ds[name].dims:
            whole = whole[:, ds.token.values]
        if stored.shape != whole.shape or stored.tobytes() != whole.tobytes():
            differing.append(name)
    return differing


class FullDisk(OSError):
    """The disk has no room."""


def fail(path: Path, counts: Counts) -> str:
    """Record to a disk that fails at the fourth row; return the error."""
    from trajstore import RunWriter

    commit, rows = RunWriter.commit_row, 0

    def commit_some(writer: Any, step: int) -> None:
        nonlocal rows
        rows += 1
        if rows == 4:
            raise FullDisk(errno.ENOSPC, "no room")
        commit(writer, step)

    RunWriter.commit_row = commit_some  # type: ignore[method-assign]
    try:
        train(path, counts=counts)
    except Exception as error:
        return str(error)
    finally:
        RunWriter.commit_row = commit  # type: ignore[method-assign]
    return "no error"


def main(branch: str, folder: Path) -> None:
    device = own_device.load()
    if branch != "plain":
        own_device.run_branch(branch)
    device.refuse_float64(branch == "mps")
    counts = Counts(device.waits)
    results: dict[str, dict[str, Any]] = {}

    def measure(name: str, work: Callable[[], dict[str, Any]]) -> None:
        gc.collect()
        before = device.device_bytes(), device.pinned_bytes()
        try:
            results[name] = work()
        except Exception as error:
            where = traceback.extract_tb(error.__traceback__)[-1]
            place = f"{Path(where.filename).name}:{where.lineno}"
            results[name] = {"error": f"{type(error).__name__}: {error}"[:200], "place": place}
            del error
        gc.collect()
        results[name]["device_bytes"] = device.device_bytes() - before[0]
        results[name]["pinned_bytes"] = device.pinned_bytes() - before[1]

    def compared(
        name: str, *, trainer: bool = False, resumed: bool = False, **settings: Any
    ) -> dict[str, Any]:
        path = folder / f"{branch} {name}.zarr"
        counts.profiled, counts.operations = name in MOST_OPERATIONS, 0.0
        run = train_with_trainer if trainer else train
        run(None, counts=counts, **settings)
        alone = counts.waits, counts.operations
        kept = run(path, counts=counts, **settings)
        more = counts.waits - alone[0], counts.operations - alone[1]
        if resumed:
            train(path, first=RESTORED, counts=counts, **settings)
        results = dict(
            zip(("waits", "operations"), (round(number, 3) for number in more), strict=True)
        )
        return {"differing": same(path, kept), **results}

    def without_wait_event() -> dict[str, Any]:
        """Record while the stream that copies to the host is late, and again as a mutant."""
        from trajstore.trainers.recording.device_to_host import DeferredTransfer

        put = DeferredTransfer.put

        def put_at_once(transfer: Any, values: Any) -> Any:
            transfer._carried = None
            return put(transfer, values)

        device.longest_delay_of_others(50_000)
        sound = compared("late copies")
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(DeferredTransfer, "put", put_at_once)
            # A busy machine may hide the delay.
            tries = (compared(f"without wait_event {n}")["differing"] for n in range(5))
            mutant = next(filter(None, tries), [])
        return {"sound": sound["differing"], "mutant": mutant}

    for name, settings in CONFIGURATIONS.items():
        measure(name, lambda name=name, settings=settings: compared(name, **settings))
    path = folder / f"{branch} failing.zarr"
    measure("failing disk", lambda: {"raised": fail(path, counts)})
    if branch == "cuda":
        measure("without wait_event", without_wait_event)
    print(json.dumps(results))


def measured(folder: Path) -> dict[str, Any]:
    """Run each branch in a process, which can have one such device only."""
    environment = {"TORCH_EXTENSIONS_DIR": str(folder / "built"), **os.environ}

    def run(branch: str) -> dict[str, Any]:
        command = [sys.executable, __file__, branch, str(folder)]
        ran = subprocess.run(command, env=environment, capture_output=True, text=True)
        assert ran.returncode == 0, ran.stderr[-2000:]
        return dict(json.loads(ran.stdout.splitlines()[-1]))

    with ThreadPoolExecutor() as pool:  # the first builds the device, and the others wait for it
        return dict(zip(BRANCHES, pool.map(run, BRANCHES), strict=True))


def table(results: dict[str, Any]) -> str:
    """Return what each configuration left, for each branch, as a table of Markdown."""
    lines = [f"| configuration | {' | '.join(BRANCHES)} |", "| --- |" + " --- |" * len(BRANCHES)]
    for name in CONFIGURATIONS:
        cells = []
        for branch in BRANCHES:
            result = results[branch][name]
            left = result["device_bytes"] + result["pinned_bytes"]
            rows = ", ".join(result.get("differing", [])) or "equal"
            cells.append(
                result.get("error")
                or f"{rows}, {result['waits']:g}, {result['operations']:g}, {left} B"
            )
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join(lines)


if __name__ == "__main__":
    if len(sys.argv) > 1:
        main(sys.argv[1], Path(sys.argv[2]))
    else:
        with tempfile.TemporaryDirectory() as scratch:
            print(table(measured(Path(scratch))))
