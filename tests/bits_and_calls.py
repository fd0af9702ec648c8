"""What tests of every kind share besides fixtures: random bits, and the type of a command call."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from click.testing import Result

Cli = Callable[..., Result]


def random_bits(shape: tuple[int, ...], seed: int, width: int = 16) -> np.ndarray:
    """Any bit patterns: NaN payloads, infinities, subnormals and negative zeros among them."""
    rng = np.random.default_rng(seed)
    return rng.integers(0, 1 << width, shape, dtype=f"u{width // 8}")
