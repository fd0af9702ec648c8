"""Configurations of trainings that take seconds."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest

pytest.importorskip("torch")
from trajstore.trainers import RunConfig, preset

__all__ = ["BLOCK", "TEXT", "small_config", "stop_after"]

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
