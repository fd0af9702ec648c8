"""Recordings on an accelerator of our own: one process for each branch of the recorder.

``python own_device_runs.py BRANCH FOLDER`` prints what each configuration left, as JSON. BRANCH is
plain, cuda or mps.
"""

from __future__ import annotations

import contextlib
import gc
import json
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import own_device
import pytest
import xarray as xr

torch = pytest.importorskip("torch")

STEPS, WARM = 8, 3
SMALL_NORM = 0.05
CONFIGURATIONS: dict[str, dict[str, Any]] = {
    "capture": {},
    "tokens": {"options": {"tokens": [3, 16]}},
    "clipping": {"clip": SMALL_NORM},
    "accumulation": {"parts": 2},
    "bfloat16": {"dtype": torch.bfloat16},
    "fused": {"optimizer": {"fused": True}},
    "scaler": {"scaled": True},
    "side stream": {"stream": True},
    "everything": {"options": {"record": "everything"}},
    "everything, fused": {"options": {"record": "everything"}, "optimizer": {"fused": True}},
    "everything, clipping": {"options": {"record": "everything"}, "clip": SMALL_NORM},
    "everything, scaler": {"options": {"record": "everything"}, "scaled": True},
    "everything, rate as tensor": {
        "options": {"record": "everything"},
        "optimizer": {"lr": torch.tensor(0.01), "foreach": False},
        "rate_on_device": True,
    },
}


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
    waits: Callable[[], int],
) -> tuple[float, dict[str, list[torch.Tensor]]]:
    """Train, and record if there is a path; return waits a step and copies of the test's own."""
    from list_recorder import TinyModel, batches

    from trajstore.trainers import capture

    torch.manual_seed(0)
    model = TinyModel(dtype).to(own_device.NAME)
    model.head.weight = model.embedding.weight  # to() makes new parameters on this device
    settings: dict[str, Any] = {"lr": 0.01} | (optimizer or {})
    if rate_on_device:
        settings["lr"] = settings["lr"].to(own_device.NAME)
    adam = torch.optim.AdamW(model.parameters(), **settings)
    scaler = torch.amp.GradScaler(own_device.NAME, init_scale=2.0**10) if scaled else None
    W, kept = model.embedding.weight, {name: [] for name in ("W", "grad", "exp_avg", "params")}
    others = [tensor for tensor in model.parameters() if tensor is not W]
    ids = [
        {name: tensor.to(own_device.NAME) for name, tensor in batch.items()}
        for batch in batches(STEPS * parts)
    ]
    recording: Any = contextlib.nullcontext()
    if path is not None:
        recording = capture(
            model,
            adam,
            path,
            max_grad_norm=clip,
            scaler=scaler,
            **({"record": "all"} | (options or {})),
        )
    chosen: Any = torch.Stream(device=own_device.NAME) if stream else None
    if chosen:
        chosen.wait_stream(torch.accelerator.current_stream())
    inside = torch.own.stream(chosen) if chosen else contextlib.nullcontext()
    with recording, inside:
        for step in range(STEPS):
            if step == WARM:
                before = waits()
            for batch in ids[step * parts : (step + 1) * parts]:
                loss = model(**batch)["loss"] / parts
                (loss if scaler is None else scaler.scale(loss)).backward()
            if scaler is not None:
                scaler.unscale_(adam)
            kept["grad"].append(W.grad.clone())
            if clip:
                torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
            if scaler is None:
                adam.step()
            else:
                scaler.step(adam)
                scaler.update()
            kept["W"].append(W.detach().clone())
            kept["exp_avg"].append(adam.state[W]["exp_avg"].clone())
            kept["params"].append(torch.cat([tensor.detach().flatten() for tensor in others]))
            adam.zero_grad()
        count = (waits() - before) / (STEPS - WARM)
        torch.own.synchronize()
    return count, {name: [one.cpu() for one in rows] for name, rows in kept.items()}


def same(path: Path, kept: dict[str, list[torch.Tensor]]) -> list[str]:
    """Return the variables that differ in a bit from the copies of the test."""
    ds, differing = xr.open_zarr(path), []
    for name, rows in kept.items():
        if name not in ds:
            if name != "params":
                differing.append(f"{name} is absent")
            continue
        stored = ds[name].values[-STEPS:].astype(np.float32)
        whole = torch.stack(rows).float().numpy()
        if name != "params":
            whole = whole[:, ds.token.values]
        if stored.shape != whole.shape or stored.tobytes() != whole.tobytes():
            differing.append(name)
    return differing


class FullDisk(OSError):
    """The disk has no room."""


def fail(path: Path, waits: Callable[[], int]) -> str:
    """Record to a disk that fails at the fourth row; return the error."""
    from trajstore import RunWriter

    commit, rows = RunWriter.commit_row, 0

    def commit_some(writer: Any, step: int) -> None:
        nonlocal rows
        rows += 1
        if rows == 4:
            raise FullDisk("no room")
        commit(writer, step)

    RunWriter.commit_row = commit_some  # type: ignore[method-assign]
    try:
        train(path, waits=waits)
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
    found: dict[str, dict[str, Any]] = {}

    def measure(name: str, work: Callable[[], dict[str, Any]]) -> None:
        gc.collect()
        before = device.device_bytes(), device.pinned_bytes()
        try:
            found[name] = work()
        except Exception as error:
            where = traceback.extract_tb(error.__traceback__)[-1]
            place = f"{Path(where.filename).name}:{where.lineno}"
            found[name] = {"error": f"{type(error).__name__}: {error}"[:200], "place": place}
            del error
        gc.collect()
        found[name]["device_bytes"] = device.device_bytes() - before[0]
        found[name]["pinned_bytes"] = device.pinned_bytes() - before[1]

    def compared(name: str, settings: dict[str, Any]) -> dict[str, Any]:
        path = folder / f"{branch} {name}.zarr"
        alone, _ = train(None, waits=device.waits, **settings)
        count, kept = train(path, waits=device.waits, **settings)
        return {"differing": same(path, kept), "waits": count - alone}

    for name, settings in CONFIGURATIONS.items():
        measure(name, lambda name=name, settings=settings: compared(name, settings))
    path = folder / f"{branch} failing.zarr"
    measure("failing disk", lambda: {"raised": fail(path, device.waits)})
    print(json.dumps(found))


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
