"""Paths of tokens: straightness, and radial and tangential motion."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any, Literal

import dask.array as da
import numpy as np
import xarray as xr

from trajstore.analysis.motion.collective import centroid
from trajstore.analysis.scan.block_tasks import Array, Wide, measure
from trajstore.analysis.scan.input_checks import Fact, dataset
from trajstore.analysis.scan.quantity import quantity
from trajstore.analysis.scan.rows import fold
from trajstore.analysis.scan.scan import Scan
from trajstore.errors import InvalidArgument
from trajstore.populations import chosen_populations
from trajstore.values.norms import hidden_sum, result_dtype, vector_norm


@dataclass(frozen=True)
class _Segment:
    """A block of rows: length of each change, (row, token), and rows at ends of windows."""

    first: int
    lengths: Wide
    ends: dict[int, Array]


def _measure_lengths(
    block: Array, boundary: Array, rows: Array, window: int, last: int
) -> _Segment:
    lengths = np.empty(block.shape[:2])
    first, ends = int(rows[0, 0, 0]), {}
    before = boundary[0]
    for row, vectors in enumerate(block, first):
        lengths[row - first] = vector_norm(np.subtract(vectors, before, dtype=np.float64))
        if row % window == 0 or row == last:
            ends[row] = vectors.copy()
        before = vectors
    return _Segment(first, lengths, ends)


def _walk(state: Any, segment: _Segment, window: int) -> tuple[Array, list[Wide]]:
    """First row of the current window, and displacement and path of each window, (2, token)."""
    start, done = state or (segment.ends[0], [])
    done = list(done)
    for row, length in enumerate(segment.lengths, segment.first):
        if row == 0:
            continue
        if (row - 1) % window == 0:
            done.append(np.zeros((2, len(length))))
        moved, path = done[-1]
        if row in segment.ends:
            end = segment.ends[row]
            moved = vector_norm(np.subtract(end, start, dtype=np.float64))
            start = end
        done[-1] = np.stack([moved, path + length])
    return start, done


def _walked(state: tuple[Array, list[Wide]]) -> Wide:
    """Displacement and path of each window, (2, window, token)."""
    start, done = state
    return np.stack(done, 1) if done else np.empty((2, 0, len(start)))


@quantity(of_window=True)
def path_efficiency(scan: Scan, window: int | None = None) -> xr.Dataset:
    """Straightness of each token's path: displacement over path length, per window.

    Parameters
    ----------
    ds : Dataset
        With ``W`` (step, token, hidden).
    window : int, optional
        Number of changes between rows in a window; the last window may have fewer. Default: one
        window of all rows.

    Returns
    -------
    Dataset, float64 (window, token)
        ``path_efficiency``, ‖W_b − W_a‖₂/Σ‖ΔW_t‖₂ from the first row a of a window to its last b:
        1 for a straight line, NaN for a token that does not move. ``path_length``: the sum. The
        coordinates ``window_start`` and ``window`` are the steps of a and b.

    Raises
    ------
    InvalidArgument
        If `window` is below 1 or above the number of changes between rows.

    Examples
    --------
    >>> path_efficiency(ds, window=10).path_efficiency.sel(token=ord("e")).values.round(3)
    array([1., 1.])
    """
    scan.require_rows(1, "path_efficiency")
    steps, changes = scan.steps, max(scan.rows - 1, 1)
    if window is not None and not 1 <= window <= changes:
        raise InvalidArgument(
            f"got window={window}, expected 1 to {changes}, the number of changes between "
            "rows; leave it out for one window of all rows"
        )
    length = window or changes
    starts = np.arange(0, scan.rows - 1, length)
    both = fold(
        functools.partial(_walk, window=length),
        scan.rows_of("W").blocks,
        scan.rows_of("W").boundaries,
        np.arange(scan.rows),
        finish=_walked,
        sizes=(2, len(starts)),
        prepare=_measure_lengths,
        window=length,
        last=scan.rows - 1,
    )
    ends = np.minimum(starts + length, scan.rows - 1)
    coords = {
        **scan.coords("W", ("token",)),
        "window": steps[ends],
        "window_start": ("window", steps[starts]),
    }
    dims = ("window", "token")
    efficiency = measure(_straight, "wt", (both[0], "wt"), (both[1], "wt"), dtype=np.float64)
    found = {
        "path_efficiency": (dims, efficiency, Fact("f8", "displacement over length of the path")),
        "path_length": (dims, both[1], Fact("f8", "length of the path", scan.units)),
    }
    return dataset(found, coords)


def _straight(moved: Wide, path: Wide) -> Wide:
    # Rounding can make a straight displacement longer than its path.
    return np.minimum(moved / path, 1.0)


def _split_motion(now: Array, before: Array, spacing: float, *center: Wide) -> dict[str, Array]:
    """Motion of each token along the outward direction, and across it."""
    change = np.subtract(now, before, dtype=np.float64) / spacing
    place = before.astype(np.float64)
    for earlier in center:
        place -= earlier
    outward = place / vector_norm(place)[:, None]
    along = hidden_sum(change * outward)
    across = vector_norm(change - along[:, None] * outward)
    return {"radial_speed": along, "tangential_speed": across}


@quantity()
def radial_tangential(
    scan: Scan, about: Literal["origin", "centroid"] = "origin", population: str = "all"
) -> xr.Dataset:
    """Radial and tangential motion relative to a center.

    Parameters
    ----------
    ds : Dataset
        With ``W`` (step, token, hidden).
    about : {'origin', 'centroid'}
        The center: zero, or the centroid of a population in the previous row.
    population : str
        Population of the centroid.

    Returns
    -------
    Dataset, float32 (step, token), one row fewer than `ds`
        With v = ΔW_t/Δs and r the unit vector from the center to W_{t−1}: ``radial_speed``, v·r,
        positive outward; ``tangential_speed``, ‖v − (v·r)r‖₂. Units of W per step; NaN for a token
        at the center. The motion of the center itself is not subtracted.

    Raises
    ------
    InvalidArgument
        For an unknown center or population.

    Examples
    --------
    >>> found = radial_tangential(ds)
    >>> print(found.radial_speed.sel(step=1, token=ord("e")).values.round(4))
    0.0078
    """
    chosen_populations(scan.ds, population)
    scan.require_rows(1, "radial_tangential")
    points = scan.rows_of("W")
    spacing = np.diff(scan.steps, prepend=scan.steps[:1] - 1).astype(np.float64)
    sources: list[Any] = [points, spacing]
    if about == "centroid":
        center = centroid(scan, population)["centroid"].data
        earlier = da.concatenate([center[:1], center[:-1]])
        sources.append((earlier.rechunk((points.blocks.chunks[0], -1)), "sh"))
    kind, unit = result_dtype(points.blocks.dtype).str, f"{scan.units} per step"
    facts = {
        "radial_speed": Fact(kind, f"velocity away from the {about}", unit),
        "tangential_speed": Fact(kind, f"velocity across the direction to the {about}", unit),
    }
    found = measure(_split_motion, "st", *sources, dtype=facts, by_row=True)
    return scan.of_tokens(found[1:], facts, "W", rows=slice(1, None))
