"""Distance to the nearest other vector of each token, and the entropy of the cloud.

Identical tokens count as one vector and have the same nearest vector.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import xarray as xr

from trajstore.analysis.cloud.identical_vectors import divide
from trajstore.analysis.scan import input_checks
from trajstore.analysis.scan.block_tasks import Array, Groups, Numbers, Wide, measure, whole_rows
from trajstore.analysis.scan.input_checks import Fact, dataset
from trajstore.analysis.scan.quantity import quantity
from trajstore.analysis.scan.scan import Scan
from trajstore.populations import one_population

# Maximum distances in memory.
_DISTANCES = 1 << 23


def _nearest(vectors: Wide) -> Wide:
    """Distance of each vector to the nearest other one, for finite, distinct vectors.

    |y|² − 2x·y selects the candidates for the nearest vector, up to rounding. Their distances are
    then computed from differences.
    """
    count = len(vectors)
    if count < 2:
        return np.full(count, np.nan)
    about = vectors - vectors.mean(0)
    squares = (about * about).sum(1)
    result = np.empty(count)
    # The error of each sum is at most its length times its largest term, times epsilon.
    slack = 4 * (about.shape[1] + 4) * np.finfo(np.float64).eps * squares.max()
    size = max(1, _DISTANCES // count)
    for start in range(0, count, size):
        part = slice(start, min(start + size, count))
        near = about[part] @ about.T
        near *= -2
        near += squares
        rows = np.arange(part.stop - start)
        near[rows, rows + start] = np.inf
        limits = near.min(1) + slack
        result[part] = _exact(vectors, start, near <= limits[:, None])
    return result


def _exact(vectors: Wide, start: int, candidates: Groups) -> Wide:
    """Smallest distance of each row to its candidates."""
    result = np.full(len(candidates), np.inf)
    most = max(1, _DISTANCES // vectors.shape[1])
    rows, others = np.nonzero(candidates)
    for at in range(0, rows.size, most):
        one, other = rows[at : at + most], others[at : at + most]
        difference = vectors[start + one] - vectors[other]
        np.minimum.at(result, one, np.sqrt((difference * difference).sum(1)))
    return result


def _entropy(distances: Wide, hidden: int) -> float:
    """Kozachenko and Leonenko's estimate of the differential entropy, in nat."""
    count = distances.size
    if count < 2 or not (distances > 0).all():
        return math.nan
    ball = hidden / 2 * math.log(math.pi) - math.lgamma(hidden / 2 + 1)
    # ψ(n) − ψ(1) is a harmonic number.
    harmonic = float((1 / np.arange(1, count)).sum())
    return hidden * float(np.log(distances).mean()) + ball + harmonic


def _nearest_kernel(values: Array, members: Numbers) -> Wide:
    """Distance of each token, followed by the entropy: (token + 1)."""
    result = np.full(len(values) + 1, np.nan)
    if not members.size:
        return result
    # −0 and +0 have distance 0.
    wide = values[members].astype(np.float64) + 0.0
    first, vector = divide(wide)
    usable = np.isfinite(wide[first]).all(1)
    distances = np.full(first.size, np.nan)
    distances[usable] = _nearest(wide[first[usable]])
    result[members] = distances[vector]
    result[-1] = _entropy(distances[usable], wide.shape[1])
    return result


@quantity()
def nearest_distance(
    scan: Scan, population: str = "all", steps: Sequence[int] | int | None = None
) -> xr.Dataset:
    """Distance of each token to the nearest other vector, and the entropy of all vectors.

    Parameters
    ----------
    ds : Dataset
        With ``W`` (step, token, hidden).
    population : str
        Population of the vectors. Tokens outside it have NaN.
    steps : int or sequence of int, optional
        Steps to compute; default: all. The cost grows with the square of the number of vectors.

    Returns
    -------
    Dataset, float64
        ``nearest_distance`` (step, token), ‖W_i − W_j‖₂ to the nearest token j whose vector
        differs, so tokens with identical vectors have the same distance. NaN if there is none, or
        if W is not finite. ``nearest_entropy`` (step), in nat: Kozachenko and Leonenko's estimate
        of the differential entropy of the n distinct finite vectors,
        D⟨ln d⟩ + ln V_D + ψ(n) − ψ(1). D is the length of a vector, d the nearest distance of
        each, V_D the volume of the unit ball, ψ the digamma function.

    Raises
    ------
    InvalidArgument
        For an unknown population.
    StepNotFound
        If a step was not recorded.

    Examples
    --------
    >>> nearest_distance(ds, steps=0).nearest_distance.sel(token=ord("e")).values.round(3)
    array([1.5])
    """
    group = one_population(scan.ds, population)
    rows = input_checks.rows_of_steps(scan.ds, steps)
    blocks = whole_rows(scan.blocks("W"), rows)
    tokens = blocks.shape[1]
    members = np.nonzero(group)[0]
    sizes = {"u": tokens + 1}
    found = measure(
        _nearest_kernel, "su", blocks, members=members, dtype=np.float64, sizes=sizes, by_row=True
    )
    distance = Fact("f8", "distance to the nearest other vector", scan.units)
    entropy = Fact("f8", "differential entropy by nearest distances", "nat")
    variables = {
        "nearest_distance": (("step", "token"), found[:, :tokens], distance),
        "nearest_entropy": ("step", found[:, tokens], entropy),
    }
    coords = scan.coords("W", ("step", "token"), rows)
    return dataset(variables, coords).assign_attrs(population=population)
