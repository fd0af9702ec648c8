"""Recordings on an accelerator of our own, one process for each branch of the recorder.

``python tests/own_device_runs.py FOLDER BRANCH …`` compares the rows with copies of the training.
BRANCH.json in the folder then tells how often each configuration waited for the device in a step,
more than without the recorder, and the bytes of the device and of pinned memory that are left.
"""

from __future__ import annotations

import contextlib
import gc
import json
import multiprocessing
import sys
from pathlib import Path
from typing import Any

import own_device
import pytest
import torch
from disk import failing_moves

from trajstore.errors import RecordingError

STEPS, WARM, RESTORED = 6, 3, 4
SMALL_NORM = 0.05
EVERYTHING = {"variables": "everything"}
CONFIGURATIONS: dict[str, dict[str, Any]] = {
    "matrix": {},
    "tokens, accumulation, clipping": {
        "options": {"tokens": [3, 16]},
        "parts": 2,
        "clip": SMALL_NORM,
    },
    "bfloat16, side stream": {"dtype": torch.bfloat16, "stream": True},
    "everything, clipping": {"options": EVERYTHING, "clip": SMALL_NORM},
    "everything, fused": {"options": EVERYTHING, "optimizer": {"fused": True}},
    "everything, scaler": {"options": EVERYTHING, "scaled": True},
    "everything, rate as tensor": {
        "options": EVERYTHING,
        "optimizer": {"lr": torch.tensor(0.01), "foreach": False},
        "rate_on_device": True,
    },
    "everything, restored and resumed": {
        "options": EVERYTHING,
        "dropout": 0.1,
        "resumed": True,
    },
    "Trainer, everything": {"options": EVERYTHING, "trainer": True},
    "disk that fails": {"options": {"block_rows": 2}, "fails": True},
}
Trained = tuple[Any, float]
"""Lists of the rows, and the waits of a step after the first ones."""


def train(
    device: Any,
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
) -> Trained:
    """Train, and record if there is a path.

    With `first` the recorded state after that step is restored, and the recording resumed.
    """
    from trainings import Lists, batches

    from trajstore.trainers import capture, restore

    torch.manual_seed(first)
    model = on_device(dtype, dropout)
    settings: dict[str, Any] = {"lr": 0.01} | (optimizer or {})
    if rate_on_device:
        settings["lr"] = settings["lr"].to(own_device.NAME)
    adam = torch.optim.AdamW(model.parameters(), **settings)
    scaler = torch.amp.GradScaler(own_device.NAME, init_scale=2.0**10) if scaled else None
    options = {**(options or {})}
    if first:
        restore(path, model, adam, step=first)
        options |= {"resume": True, "first_step": first}
    W, before = model.embedding.weight, 0
    lists = Lists(W)
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
            if step == WARM:
                before = device.waits()
            losses = []
            for batch in ids[step * parts : (step + 1) * parts]:
                loss = model(**batch)["loss"] / parts
                losses.append(loss.detach().clone())
                (loss if scaler is None else scaler.scale(loss)).backward()
            if scaler is not None:
                scaler.unscale_(adam)
            lists.add(grad=W.grad, loss=sum(losses), lr=float(settings["lr"]))
            factor = torch.ones((), dtype=dtype)
            if clip:
                norm = torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
                factor = torch.clamp(clip / (norm + 1e-6), max=1.0)
            lists.add(clip_coef=factor)
            if scaler is None:
                adam.step()
            else:
                scaler.step(adam)
                scaler.update()
            keep_state(lists, model, adam, options)
            adam.zero_grad()
        waits = (device.waits() - before) / (STEPS - WARM)
        torch.own.synchronize()
    tokens = options.get("tokens", slice(None))
    for name in ("W", "grad", "exp_avg", "exp_avg_sq"):
        lists.rows[name] = [row[tokens] for row in lists.rows[name]]
    return lists, waits


def train_with_trainer(device: Any, path: Path | None, options: dict[str, Any]) -> Trained:
    """Train with a Trainer, its fused AdamW and its clipping; as `train`."""
    from accelerate import PartialState
    from small_trainings import examples, trainer_of
    from trainings import BATCH, Lists
    from transformers import Trainer, TrainerCallback

    from trajstore.trainers import TrajectoryCallback

    torch.manual_seed(0)
    model = on_device()
    lists, waits = Lists(model.embedding.weight), []
    del lists.rows["grad"]
    model.register_forward_hook(lambda model, args, output: lists.add(loss=output["loss"]))

    class Keeping(TrainerCallback):
        def on_pre_optimizer_step(self, *_: Any, optimizer: Any, **__: Any) -> None:
            lists.add(lr=float(optimizer.param_groups[0]["lr"]))

        def on_optimizer_step(self, *_: Any, model: Any, optimizer: Any, **__: Any) -> None:
            keep_state(lists, model, optimizer.optimizer, options)

        def on_step_end(self, args: Any, state: Any, *_: Any, **__: Any) -> None:
            if state.global_step in (WARM, STEPS):
                waits.append(device.waits())

    def on_own_device(args: Any, **given: Any) -> Any:
        # There is no public way to train on a device that accelerate does not know.
        vars(args)["_setup_devices"] = PartialState().device = torch.device(own_device.NAME)
        return Trainer(args=args, **given)

    recording = [TrajectoryCallback(path, **options)] if path is not None else []
    trainer_of(
        model, Path(), Keeping(), *recording, max_steps=STEPS, max_grad_norm=SMALL_NORM, seed=0,
        optim="adamw_torch_fused", data=examples(STEPS * BATCH), kind=on_own_device,
    ).train()  # fmt: skip
    return lists, (waits[1] - waits[0]) / (STEPS - WARM)


def on_device(dtype: torch.dtype = torch.float32, dropout: float = 0.0) -> Any:
    from trainings import TinyModel

    model = TinyModel(dtype)
    model.mix = torch.nn.Sequential(model.mix, torch.nn.Dropout(dropout))
    model.to(own_device.NAME)
    model.head.weight = model.embedding.weight  # to() makes new parameters on this device
    return model


def keep_state(lists: Any, model: Any, optimizer: Any, options: dict[str, Any]) -> None:
    """Keep weights and moments after a step, and the other parameters if they are recorded."""
    lists.after_step(optimizer)
    if "variables" in options:
        others = [p.flatten() for p in model.parameters() if p is not lists.parameter]
        lists.add(params=torch.cat(others))


def measure(branch: str, folder: Path) -> None:
    device = own_device.load()
    if branch != "plain":
        own_device.run_branch(branch)
    device.refuse_float64(branch == "mps")

    def waits_of(
        path: Path,
        *,
        trainer: bool = False,
        resumed: bool = False,
        fails: bool = False,
        **settings: Any,
    ) -> float:
        run = train_with_trainer if trainer else train
        if fails:
            with failing_moves(50), pytest.raises(RecordingError):  # in the second block
                run(device, path, **settings)
            return 0
        alone = run(device, None, **settings)[1]
        lists, waits = run(device, path, **settings)
        if resumed:
            train(device, path, first=RESTORED, **settings)
        lists.agree_with(path)
        return round(waits - alone, 3)

    results = {}
    for name, settings in CONFIGURATIONS.items():
        if branch == "mps" and "scaled" in settings:
            continue  # torch's GradScaler itself needs float64
        print(branch, name, file=sys.stderr)
        gc.collect()
        before = device.device_bytes(), device.pinned_bytes()
        waits = waits_of(folder / f"{branch} {name}.zarr", **settings)
        gc.collect()
        left = device.device_bytes() - before[0], device.pinned_bytes() - before[1]
        results[name] = [waits, *left]
    (folder / f"{branch}.json").write_text(json.dumps(results))


def main(folder: Path, branches: list[str]) -> None:
    """Measure the branches: a process can have one such device, and one of these recorders."""
    from transformers import Trainer  # noqa: F401 – for seconds, and once

    fork = multiprocessing.get_context("fork")
    processes = [fork.Process(target=measure, args=(branch, folder)) for branch in branches]
    for process in processes:  # the first builds the device, and the others wait for it
        process.start()
    for process in processes:
        process.join()
    sys.exit(any(process.exitcode for process in processes))


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
