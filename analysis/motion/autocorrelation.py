"""Autocorrelation of the velocity and position of tokens."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

import dask.array as da
import numpy as np
import numpy.typing as npt
import xarray as xr

from trajstore.analysis.scan.block_tasks import Array, Wide, in_parts, measure
from trajstore.analysis.scan.input_checks import Fact, dataset
from trajstore.analysis.scan.quantity import quantity
from trajstore.analysis.scan.rows import fold
from trajstore.analysis.scan.scan import Scan
from trajstore.errors import InvalidArgument
from trajstore.populations import populations
from trajstore.values.norms import hidden_sum

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
    whole = (means.rechunk({1: -1}), "lt")
    together = measure(
        _over_populations, "lp", whole, groups=groups, dtype=np.float64, sizes={"p": len(groups)}
    )
    coords = {
        **scan.coords("W", ("token",)),
        "population": names,
        "lag": list(chosen),
        "lag_steps": ("lag", np.array(chosen) * spacing),
    }
    text = f"autocorrelation of the {of}"
    found = {
        "token_autocorrelation": (
            ("lag", "token"),
            _ratio(means),
            Fact("f8", f"{text} of a token"),
        ),
        "autocorrelation": (("lag", "population"), _ratio(together), Fact("f8", text)),
    }
    return dataset(found, coords)


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
    return measure(_divide, "lt", (means[1:], "lt"), (means[:1], "lt"), dtype=np.float64)


def _divide(above: Wide, below: Wide) -> Wide:
    return np.where(below > 0, above / below, np.nan)


def _over_populations(means: Wide, groups: npt.NDArray[np.bool_]) -> Wide:
    """Mean over the tokens of each population, (lag, population)."""
    sums = [np.ascontiguousarray(means[:, group]).sum(1) for group in groups]
    return np.asarray(np.stack(sums, -1) / groups.sum(1))
