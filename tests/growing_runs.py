"""Small runs that grow: every row is made from its step alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from trajstore import RunWriter

TOKENS, HIDDEN, BLOCK = 6, 3, 4
DEAD = np.arange(TOKENS) >= 4
STEPS = 40
HOSTILE = ["<script>alert(1)</script>", "\x1b[31mred\x1b]0;title\x07", "\u202elft", "a\r", "b", "c"]


def begin(path: Path | str, **options: Any) -> RunWriter:
    """Writer of an empty run, whose blocks of 4 rows are committed when they are full."""
    chosen: dict[str, Any] = {
        "token": np.arange(TOKENS) * 3,
        "hidden": HIDDEN,
        "variables": {"W": "float32", "grad": "float32", "loss": "float32", "lr": "float64"},
        "is_dead": DEAD,
        "token_text": HOSTILE,
        "config": {"training": {"steps": STEPS}},
        "block_rows": BLOCK,
        "commit_every": None,
    }
    return RunWriter.create(path, **chosen | options)


def values(step: int, seed: int = 0) -> dict[str, Any]:
    """A row: of the tokens only 0 and 1 move, and from step 6 on none of them."""
    made = np.random.default_rng([step, seed]).standard_normal((TOKENS, HIDDEN)).astype("f4")
    W = np.zeros((TOKENS, HIDDEN), "f4")
    W[:2] = min(step, 5) + seed
    return {"W": W, "grad": made, "loss": np.float32(5 - step / 10 + seed), "lr": 0.1}


def extend(run: RunWriter, steps: range, seed: int = 0) -> None:
    """Append rows, and wait until those of whole blocks are committed."""
    for step in steps:
        run.append(step=step, **values(step, seed))
    pending = run._blocks._last
    if pending is not None:
        pending.result()
