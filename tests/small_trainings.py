"""Configurations of trainings that take seconds."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch
import xarray as xr

pytest.importorskip("torch")
from trajstore.store.storage.remote_path import checkpoint_folder
from trajstore.trainers import RunConfig, preset
from trajstore.trainers.states.checkpoints import load_state
from trajstore.trainers.states.state import State

Straight = Callable[[RunConfig], Path]
BLOCK = 4
TEXT = b"It was a bright cold day in April. " * 2
"""54 examples of 16 tokens: 6 batches of 9."""


def small_config(variant: Sequence[str], *assignments: str, steps: int) -> RunConfig:
    """A preset and what is changed of it, so small that a step takes milliseconds."""
    named, *changes = variant
    small = (
        "model.context=16", "model.hidden=8", "model.layers=1", "training.batch_size=9",
        "training.device=cpu", f"training.steps={steps}", f"recording.block_rows={BLOCK}",
    )  # fmt: skip
    return preset(named).with_values([*small, *changes, *assignments])


def stop_after(step: int) -> Callable[[], bool]:
    """Ask to stop when so many steps have been taken."""
    steps = iter(range(1, step + 1))
    return lambda: next(steps) == step


def contents(run: Path) -> dict[str, bytes]:
    """Bytes of every file."""
    return {
        str(file.relative_to(run)): file.read_bytes() for file in run.rglob("*") if file.is_file()
    }


def last_checkpoint(run: Path) -> State:
    """The newest one beside a run."""
    return load_state(max(checkpoint_folder(run).iterdir()))


def same_values(one: Path, other: Path) -> xr.Dataset:
    """The second run, all of whose variables are, bit for bit, those of the first."""
    a, b = (xr.open_zarr(path, chunks=None).load() for path in (one, other))
    assert list(a.variables) == list(b.variables)
    for name in a.variables:
        if a[name].dtype.kind in "fi":
            assert a[name].values.tobytes() == b[name].values.tobytes(), name
    return b


def tensors_of(state: State) -> dict[str, torch.Tensor]:
    """All tensors of a state by their names in a checkpoint."""
    kept = {f"{name}.{key}": v for name, values in state.kept.items() for key, v in values.items()}
    return {f"model.{name}": v for name, v in state.weights.items()} | {
        f"optimizer.{name}": v for name, v in kept.items()
    }
