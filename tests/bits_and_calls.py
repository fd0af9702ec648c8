"""What tests of every kind share besides fixtures: bits, parameters, calls."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from math import prod
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


def parameter_table(
    shapes: Mapping[str, Sequence[int]], of_W: str | None = None, dtype: str = "float32"
) -> list[dict[str, Any]]:
    """The attribute ``parameters``: of these one may be W, and others lie one after another."""
    table: list[dict[str, Any]] = []
    offset = 0
    for name, shape in shapes.items():
        entry = {"name": name, "shape": list(shape), "dtype": dtype, "group": 0}
        if name == of_W:
            table.append(entry | {"variable": "W"})
        else:
            table.append(entry | {"variable": "params", "offset": offset})
            offset += prod(shape)
    return table
