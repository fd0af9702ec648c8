"""What tests of every kind share besides fixtures."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import pytest
from click.testing import Result

Cli = Callable[..., Result]


def random_bits(shape: tuple[int, ...], seed: int, width: int = 16) -> np.ndarray:
    """Any bit patterns: NaN payloads, infinities, subnormals and negative zeros among them."""
    rng = np.random.default_rng(seed)
    return rng.integers(0, 1 << width, shape, dtype=f"u{width // 8}")


def nightly_but(values: Iterable[Any], *quick: Any) -> list[Any]:
    """Parameters of which only some are in the short tier."""
    return [
        pytest.param(value, marks=() if value in quick else pytest.mark.nightly) for value in values
    ]
