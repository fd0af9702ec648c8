"""Runs for the tests of export and import, and how two runs are compared."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import ml_dtypes  # noqa: F401  (NumPy knows bfloat16 once it is imported)
import numpy as np
import xarray as xr

from trajstore import RunWriter

ALL = {
    "W": "bfloat16",
    "grad": "bfloat16",
    "exp_avg": "bfloat16",
    "exp_avg_sq": "bfloat16",
    "logits": "bfloat16",
    "loss": "float32",
}
"""Variables of a run as the notebooks recorded it."""

DIMS = {"W": 3, "grad": 3, "exp_avg": 3, "exp_avg_sq": 3, "logits": 2}
ZERO = ("exp_avg", "exp_avg_sq")


def write_run(
    path: Path,
    variables: dict[str, str],
    *,
    rows: int,
    tokens: int,
    hidden: int,
    seed: int = 0,
    block_rows: int = 4,
    any_bits: bool = False,
    ids: np.ndarray | None = None,
    steps: np.ndarray | None = None,
    attributes: dict[str, Any] | None = None,
    config: dict[str, Any] | None = None,
    still: Mapping[int, int] = {},
) -> dict[str, np.ndarray]:
    """Write a run and return its bits.

    With `any_bits` every bit pattern occurs anywhere; without it row 0 follows the timeline. Tokens
    that are `still` stay in their place from a row on.
    """
    rng = np.random.default_rng(seed)
    values = {}
    for name, dtype in variables.items():
        shape = (rows, tokens, hidden)[: DIMS.get(name, 1)]
        shape = (rows, hidden) if name == "hidden_mean" else shape
        kind = np.dtype(f"u{np.dtype(dtype).itemsize}")
        if any_bits:
            values[name] = rng.integers(0, 1 << (8 * kind.itemsize), shape, kind)
            continue
        floats = rng.normal(size=shape).astype("f4")
        if (steps is None or steps[0] == 0) and name != "W":
            floats[0] = 0 if name in ZERO else np.nan
        values[name] = floats.astype(dtype).view(kind)
    for place, row in still.items():
        values["W"][row:, place] = values["W"][row, place]
    token = np.arange(tokens) if ids is None else ids
    with RunWriter.create(
        path,
        token=token,
        hidden=hidden,
        variables=variables,
        is_dead=np.arange(tokens) % 3 == 0,
        token_count=np.arange(tokens) % 3 * np.arange(tokens),
        token_text=[f"é{number}\n" for number in range(tokens)],
        block_rows=block_rows,
        config=config,
        attributes=attributes,
    ) as run:
        for row in range(rows):
            for name, place in run.next_row().items():
                place[...] = values[name][row]
            run.commit_row(row if steps is None else int(steps[row]))
    return values


def stored_bits(ds: xr.Dataset, name: str) -> np.ndarray:
    values = ds[name].values
    return values.view(f"u{values.dtype.itemsize}")


def assert_same_run(a: Any, b: Any, *, besides: tuple[str, ...] = ()) -> None:
    """Two runs, or Datasets of them, hold the same bits, coordinates and native types."""
    one, other = (x if isinstance(x, xr.Dataset) else xr.open_zarr(x) for x in (a, b))
    assert set(one.variables) - set(besides) == set(other.variables) - set(besides)
    for name in set(one.variables) - set(besides):
        assert one[name].dims == other[name].dims
        if one[name].dtype.kind == "f":
            assert one[name].attrs["native_dtype"] == other[name].attrs["native_dtype"], name
            assert (stored_bits(one, name) == stored_bits(other, name)).all(), name
        else:
            assert (one[name].values == other[name].values).all(), name
