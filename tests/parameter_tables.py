"""The attribute ``parameters`` of runs that hold all parameters."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod
from typing import Any


def parameter_table(
    shapes: Mapping[str, Sequence[int]], of_W: str | None = None, dtype: str = "float32"
) -> list[dict[str, Any]]:
    """Entries of parameters of these shapes, one of which is W; others lie one after another."""
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
