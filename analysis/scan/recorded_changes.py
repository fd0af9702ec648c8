"""Questions of motion to a run that holds the changes of W and no W: what differences answer.

``delta`` of a row is the change of its step, so it is the way from the row before where every step
has a row. It says how far tokens move, not where they are.
"""

from __future__ import annotations

from typing import Any

import dask.array as da
import numpy as np
import numpy.typing as npt
import xarray as xr

from trajstore.errors import InvalidArgument

__all__ = ["check_every_step", "cumulated", "hold_only_changes", "moved_kernel"]

Array = npt.NDArray[Any]


def hold_only_changes(ds: xr.Dataset) -> bool:
    """Whether a Dataset holds ``delta`` and no W."""
    return "delta" in ds and "W" not in ds


def check_every_step(steps: npt.NDArray[np.int64]) -> None:
    """Check that the change of each row is the way from the row before.

    Raises
    ------
    InvalidArgument
        If a step has no row.
    """
    gaps = np.flatnonzero(np.diff(steps) != 1)
    if gaps.size:
        at = int(gaps[0])
        raise InvalidArgument(
            f"delta is the change of each step, and after step {steps[at]} comes step "
            f"{steps[at + 1]}; ask about rows of consecutive steps"
        )


def moved_kernel(block: Array) -> npt.NDArray[np.bool_]:
    """Whether each vector of changes is other than zero; a NaN is."""
    return np.asarray((block != 0).any(-1))


def cumulated(blocks: da.Array) -> da.Array:
    """Sum of the changes after the first row, in float64: where W is, seen from there."""
    steps, tokens, hidden = blocks.chunks
    # What led to the first row is no part of the way from it.
    begin = blocks.map_blocks(_without_first, dtype=np.float64, meta=np.empty((0, 0, 0)))
    assert begin.chunks == (steps, tokens, hidden)
    return da.cumsum(begin, axis=0, method="sequential")


def _without_first(block: Array, block_info: Any = None) -> Array:
    wide = block.astype(np.float64)
    if block_info and block_info[0]["chunk-location"][0] == 0:
        wide[:1] = 0
    return wide
