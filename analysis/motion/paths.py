"""Paths of tokens: straightness, radial and tangential motion, and autocorrelation."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import dask.array as da
import numpy as np
import numpy.typing as npt
import xarray as xr

from trajstore.analysis.motion.collective import centroid
from trajstore.analysis.scan.block_tasks import Array, Wide, along, fold, in_parts, measure
from trajstore.analysis.scan.quantity import quantity
from trajstore.analysis.scan.result_variables import ResultVariable, dataset
from trajstore.analysis.scan.scan import Scan
from trajstore.errors import InvalidArgument
from trajstore.populations import chosen_populations, populations
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
    """First row of the current window, and four numbers of each window, (4, token).

    They are displacement, path, sum of the squared lengths, and change of the norm.
    """
    start, done = state or (segment.ends[0], [])
    done = list(done)
    for row, length in enumerate(segment.lengths, segment.first):
        if row == 0:
            continue
        if (row - 1) % window == 0:
            done.append(np.zeros((4, len(length))))
        moved, path, squares, outward = done[-1]
        if row in segment.ends:
            end = segment.ends[row]
            moved = vector_norm(np.subtract(end, start, dtype=np.float64))
            outward = vector_norm(end) - vector_norm(start)
            start = end
        done[-1] = np.stack([moved, path + length, squares + length**2, outward])
    return start, done


def _walked(state: tuple[Array, list[Wide]]) -> Wide:
    """The numbers of each window, (4, window, token)."""
    start, done = state
    return np.stack(done, 1) if done else np.empty((4, 0, len(start)))


@quantity(of_window=True)
def path_efficiency(scan: Scan, window: int | None = None) -> xr.Dataset:
    """Straightness of each token's path, per window, also compared with a random walk.

    With ``vectors(ds, "centroid")``, the path is that of each population's centroid.

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
        1 for a straight line, NaN for a token that does not move. ``path_length``: the sum.
        ``walk_ratio``, ‖W_b − W_a‖₂/√Σ‖ΔW_t‖₂²: the displacement over its root mean square in a
        random walk with steps of the same lengths (Rayleigh, Nature 72, 318, 1905). It is about 1
        for a random walk, larger for a drift, and smaller for motion to and fro. ``norm_change``,
        ‖W_b‖₂ − ‖W_a‖₂, positive outward. The coordinates ``window_start`` and ``window`` are the
        steps of a and b.

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
    moved, path, squares, outward = fold(
        functools.partial(_walk, window=length),
        scan.rows_of("W").blocks,
        scan.rows_of("W").boundaries,
        np.arange(scan.rows),
        finish=_walked,
        sizes=(4, len(starts)),
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
    ratios = [
        measure(ratio, along(moved, *dims), along(below, *dims), dims=dims, dtype=np.float64)
        for ratio, below in ((_straight, path), (_against_walk, squares))
    ]
    texts = ("displacement over length of the path", "displacement over that of a random walk")
    efficiency, walk = (ResultVariable("f8", text) for text in texts)
    variables = {
        "path_efficiency": (dims, ratios[0], efficiency),
        "path_length": (dims, path, ResultVariable("f8", "length of the path", scan.units)),
        "walk_ratio": (dims, ratios[1], walk),
        "norm_change": (dims, outward, ResultVariable("f8", "change of the norm", scan.units)),
    }
    return dataset(variables, coords)


def _straight(moved: Wide, path: Wide) -> Wide:
    # Rounding can make a straight displacement longer than its path.
    return np.minimum(moved / path, 1.0)


def _against_walk(moved: Wide, squares: Wide) -> Wide:
    return np.asarray(moved / np.sqrt(squares))


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
        earlier = earlier.rechunk((points.blocks.chunks[0], -1))
        sources.append(along(earlier, "step", "hidden"))
    kind, unit = result_dtype(points.blocks.dtype).str, f"{scan.units} per step"
    variables = {
        "radial_speed": ResultVariable(kind, f"velocity away from the {about}", unit),
        "tangential_speed": ResultVariable(
            kind, f"velocity across the direction to the {about}", unit
        ),
    }
    speeds = measure(_split_motion, *sources, dims=("step", "token"), dtype=variables, by_row=True)
    return scan.of_tokens(speeds[1:], variables, "W", rows=slice(1, None))


LAGS = (1, 2, 5, 10, 20)

# Maximum tokens per task, which holds as many rows as the largest lag, and minimum number of tasks
# per block.
_TOKENS = 4096
_CHAINS = 8


@dataclass(eq=False)
class _Sums:
    """Sums over some rows for some tokens.

    `products` and `ends` are sums over the pairs of each lag: Σ x_t·x_{t+τ}, and Σ x_t + x_{t+τ}.
    `ends` and `total` are computed only for deviations from the mean.
    """

    first: Wide
    rows: int = 0
    before: Array | None = None
    recent: list[Wide] = field(default_factory=list)
    total: Wide | None = None
    products: Wide | None = None
    ends: Wide | None = None


def _take(sums: _Sums, x: Wide, lags: Sequence[int], centered: bool) -> None:
    """Add one row of vectors."""
    if sums.products is None:
        sums.products = np.zeros((len(lags), len(x)))
        sums.total = np.zeros_like(x) if centered else None
        sums.ends = np.zeros((len(lags), *x.shape)) if centered else None
    sums.recent.append(x)
    sums.recent = sums.recent[-(max(lags) + 1) :]
    if sums.total is not None:
        sums.total += x
    sums.rows += 1
    for number, lag in enumerate(lags):
        if lag < len(sums.recent):
            other = sums.recent[-1 - lag]
            sums.products[number] += np.vecdot(x, other)
            if sums.ends is not None:
                sums.ends[number] += x + other


def _copy(sums: _Sums) -> _Sums:
    """A copy to add to, because dask may run a task twice."""
    arrays = {name: getattr(sums, name) for name in ("total", "products", "ends")}
    copies = {name: values.copy() for name, values in arrays.items() if values is not None}
    return replace(sums, recent=list(sums.recent), **copies)


def _follow(state: _Sums | None, block: Array, lags: Sequence[int], of: str) -> _Sums:
    """Sums after one more block of rows."""
    sums = _copy(state) if state else _Sums(first=block[0].astype(np.float64))
    for row in block:
        wide = row.astype(np.float64)
        if of == "position":
            _take(sums, wide - sums.first, lags, centered=True)
        elif sums.before is not None:
            _take(sums, wide - sums.before, lags, centered=False)
        sums.before = wide
    return sums


def _means(sums: _Sums, lags: Sequence[int]) -> Wide:
    """Mean product of each lag, or of deviations from the mean, (lag, token)."""
    if sums.products is None:
        return np.full((len(lags), len(sums.first)), np.nan)
    result = np.full(sums.products.shape, np.nan)
    mean = None if sums.total is None else sums.total / sums.rows
    for number, lag in enumerate(lags):
        pairs = sums.rows - lag
        if pairs <= 0:
            continue
        products = sums.products[number]
        if sums.ends is not None and mean is not None:
            products = products - hidden_sum(sums.ends[number] * mean)
            products = products + pairs * hidden_sum(mean * mean)
        result[number] = products / pairs
    return result


@quantity(of_window=True)
def autocorrelation(
    scan: Scan,
    lags: Sequence[int] | int = LAGS,
    of: Literal["velocity", "position"] = "velocity",
) -> xr.Dataset:
    """Autocorrelation of the velocity or the position of each token over a number of rows.

    C(τ) = ⟨x_t·x_{t+τ}⟩ / ⟨x_t·x_t⟩, with scalar products over hidden and means over the rows. For
    the velocity, x is the change between rows, ΔW, without subtracting its mean, so a constant
    drift gives 1. For the position, x is W minus its mean over the rows. For a population, C is the
    ratio of the means over its tokens, so tokens that move most have the largest weight.

    Parameters
    ----------
    ds : Dataset
        With ``W`` (step, token, hidden), rows evenly spaced in steps.
    lags : int or sequence of int
        τ in rows, from 1 to the number of rows minus one (for velocity: minus two). The computation
        holds as many rows as the largest lag.
    of : {'velocity', 'position'}
        Quantity to correlate.

    Returns
    -------
    Dataset, float64
        ``token_autocorrelation`` (lag, token) and ``autocorrelation`` (lag, population); the
        coordinate ``lag_steps`` holds the lags in optimizer steps. NaN if nothing moves, W is not
        finite, or a default lag is longer than the run.

    Raises
    ------
    InvalidArgument
        If the rows are not evenly spaced, a lag is below 1 or longer than the run, or `of` is
        unknown.

    Examples
    --------
    >>> found = autocorrelation(ds, lags=[1, 5])
    >>> found.autocorrelation.sel(population="dead").values.round(2)
    array([0.92, 0.83])
    """
    chosen = tuple(np.atleast_1d(lags).tolist())
    if not chosen or not all(isinstance(lag, int) and lag > 0 for lag in chosen):
        raise InvalidArgument(f"got lags={lags!r}, expected numbers of rows, at least 1")
    scan.require_rows(1, "autocorrelation")
    if chosen != LAGS:  # default lags are also computed for short runs
        _check_lags(chosen, scan.rows, of)
    spacing = _even_spacing(scan)
    every = (0, *chosen)
    blocks = _in_pieces(scan.blocks("W"))
    finish = functools.partial(_means, lags=every)
    means = fold(_follow, blocks, finish=finish, sizes=(len(every),), lags=every, of=of)
    names, groups = populations(scan.ds)
    whole = along(means.rechunk({1: -1}), "lag", "token")
    together = measure(
        _over_populations,
        whole,
        dims=("lag", "population"),
        groups=groups,
        dtype=np.float64,
        sizes={"population": len(groups)},
    )
    coords = {
        **scan.coords("W", ("token",)),
        "population": names,
        "lag": list(chosen),
        "lag_steps": ("lag", np.array(chosen) * spacing),
    }
    text = f"autocorrelation of the {of}"
    variables = {
        "token_autocorrelation": (
            ("lag", "token"),
            _ratio(means),
            ResultVariable("f8", f"{text} of a token"),
        ),
        "autocorrelation": (("lag", "population"), _ratio(together), ResultVariable("f8", text)),
    }
    return dataset(variables, coords)


def _check_lags(lags: Sequence[int], rows: int, of: str) -> None:
    """Raise for lags that are longer than the run."""
    largest = rows - 1 if of == "position" else rows - 2
    if max(lags) > largest:
        raise InvalidArgument(
            f"got a lag of {max(lags)}, expected at most {max(largest, 0)}, because the {of} is "
            f"known in {max(largest + 1, 0)} rows"
        )


def _even_spacing(scan: Scan) -> int:
    """Optimizer steps between consecutive rows."""
    spacings = np.unique(np.diff(scan.steps))
    if spacings.size > 1:
        raise InvalidArgument(
            f"autocorrelation requires evenly spaced rows, got spacings of "
            f"{', '.join(map(str, spacings[:4]))} steps; select rows, such as "
            f"ds.sel(step=ds.step % {spacings.max()} == 0)"
        )
    return int(spacings[0]) if spacings.size else 1


def _in_pieces(blocks: da.Array) -> da.Array:
    """Chunks of at most `_TOKENS` tokens, and at least `_CHAINS` chunks.

    Each chunk is one chain of tasks. With fewer chains, idle workers would read blocks ahead and
    hold them in memory.
    """
    most = max(1, min(_TOKENS, -(-blocks.shape[1] // _CHAINS)))
    return in_parts(blocks, most, axis=1)


def _ratio(means: da.Array) -> da.Array:
    """Mean product of each lag as a fraction of that of lag 0."""
    return measure(
        _divide,
        along(means[1:], "lag", "token"),
        along(means[:1], "lag", "token"),
        dims=("lag", "token"),
        dtype=np.float64,
    )


def _divide(above: Wide, below: Wide) -> Wide:
    return np.where(below > 0, above / below, np.nan)


def _over_populations(means: Wide, groups: npt.NDArray[np.bool_]) -> Wide:
    """Mean over the tokens of each population, (lag, population)."""
    sums = [np.ascontiguousarray(means[:, group]).sum(1) for group in groups]
    return np.asarray(np.stack(sums, -1) / groups.sum(1))
