"""Runs of a tiny model, recorded by `capture`."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
from list_recorder import TinyModel, batches  # noqa: E402
from list_recorder import steps as taken  # noqa: E402

from trajstore.trainers import capture  # noqa: E402


def tiny_run(
    path: Path,
    optimizer: Callable[[Any], Any] = lambda p: torch.optim.AdamW(p, lr=0.01),
    *,
    dtype: Any = torch.float32,
    steps: int = 9,
    clip: float = 0.3,
    accumulate: int = 1,
    change: Callable[[Any], None] = lambda model: None,
    between: Callable[[Any, int], None] = lambda model, number: None,
    **options: Any,
) -> Path:
    """Train `TinyModel` in a plain loop that names its clipping; in blocks of 4 rows.

    `change` may change the gradients before the step, and `between` the model after it.
    """
    torch.manual_seed(1)
    model = TinyModel(dtype)
    made = optimizer(model.parameters())
    options = {"max_grad_norm": clip, "block_rows": 4, "fsync": False} | options
    with capture(model, made, path, **options):
        for _ in taken(model, made, steps, clip=clip, accumulate=accumulate, after=between):
            change(model)
    return path


def scaled_run(path: Path, *, fused: bool, steps: int = 14, **options: Any) -> Path:
    """A float16 loop whose scaler skips several steps, the first among them."""
    torch.manual_seed(1)
    model = TinyModel()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, fused=fused)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**20, growth_interval=4)
    with capture(model, optimizer, path, scaler=scaler, max_grad_norm=0.3, fsync=False, **options):
        for batch in batches(steps):
            optimizer.zero_grad()
            with torch.autocast("cpu", torch.float16):
                loss = model(**batch)["loss"]
            scaler.scale(loss).backward()
            if not fused:
                scaler.unscale_(optimizer)
                torch.nn.utils.clip_grad_norm_(model.parameters(), 0.3)
            scaler.step(optimizer)
            scaler.update()
    return path
