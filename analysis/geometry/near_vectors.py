"""Nearest other vector of each token, entropy of the cloud, and graph of vectors in nearby cells.

Identical tokens count as one vector: they have the same nearest vector, and are one vertex.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import xarray as xr

from trajstore.analysis.geometry.identical_vectors import divide, smallest_members, token_labels
from trajstore.analysis.scan import input_checks
from trajstore.analysis.scan.block_tasks import Array, Groups, Numbers, Wide, measure, whole_rows
from trajstore.analysis.scan.quantity import quantity
from trajstore.analysis.scan.result_variables import (
    ResultVariable,
    dataset,
    field,
    record_of,
    table,
)
from trajstore.analysis.scan.rows import with_lattice_attributes
from trajstore.analysis.scan.scan import Scan
from trajstore.arguments import ANY, Count, exact
from trajstore.errors import InvalidArgument, needs_extra
from trajstore.populations import chosen_populations, one_population
from trajstore.values.native_types import ordinal

# Maximum distances in memory.
_DISTANCES = 1 << 23


def _nearest(vectors: Wide, k: int, of: Numbers) -> tuple[Numbers, Wide]:
    """Numbers and distances of the k nearest other vectors, for finite, distinct vectors.

    |y|² − 2x·y selects the candidates for the nearest vectors, up to rounding. Their distances are
    then computed from differences.

    Parameters
    ----------
    vectors : ndarray of float64, (vector, hidden)
    k : int
        Fewer are found if there are fewer others.
    of : ndarray of int64
        Numbers of the vectors whose nearest are found.

    Returns
    -------
    others : ndarray of int64, (of, rank)
        The nearest first. Of vectors at the same distance, that with the smallest number.
    distances : ndarray of float64, (of, rank)
    """
    count = len(vectors)
    k = min(k, count - 1)
    others, distances = np.empty((of.size, max(k, 0)), np.int64), np.empty((of.size, max(k, 0)))
    if k < 1:
        return others, distances
    about = np.ldexp(vectors, -_exponents(vectors))  # whose squares are finite
    about -= about.mean(0)
    squares = (about * about).sum(1)
    # The error of each sum is at most its length times its largest term, times epsilon.
    slack = 4 * (about.shape[1] + 4) * np.finfo(np.float64).eps * squares.max()
    size = max(1, _DISTANCES // count)
    for start in range(0, of.size, size):
        part = slice(start, start + size)
        near = about[of[part]] @ about.T
        near *= -2
        near += squares
        near[np.arange(len(near)), of[part]] = np.inf
        limits = near.min(1) if k == 1 else np.partition(near, k - 1, axis=1)[:, k - 1]
        row, other = np.nonzero(near <= (limits + slack)[:, None])
        distance = _distances(vectors, of[part][row], other)
        order = np.lexsort((other, distance, row))
        ends = np.searchsorted(row, np.arange(len(near)))  # rows stay in their order
        first = order[ends[:, None] + np.arange(k)]
        others[part], distances[part] = other[first], distance[first]
    return others, distances


def _distances(vectors: Wide, of: Numbers, others: Numbers) -> Wide:
    """Distances of pairs of vectors, computed from their differences."""
    result = np.empty(of.size)
    most = max(1, _DISTANCES // vectors.shape[1])
    for at in range(0, of.size, most):
        pairs = slice(at, at + most)
        difference = vectors[of[pairs]] - vectors[others[pairs]]
        exponents = _exponents(difference, axis=1)
        difference = np.ldexp(difference, -exponents)
        result[pairs] = np.ldexp(np.sqrt((difference * difference).sum(1)), exponents[:, 0])
    return result


def _exponents(values: Wide, axis: int | None = None) -> Any:
    """Exponents of the largest absolute values: a scale by powers of two, which rounds nothing."""
    return np.frexp(np.abs(values).max(axis, keepdims=True, initial=0))[1]


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
    nearest = _nearest(wide[first[usable]], 1, np.arange(np.count_nonzero(usable)))[1]
    if nearest.size:
        distances[usable] = nearest[:, 0]
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
    sizes = {"distance": tokens + 1}
    distances = measure(
        _nearest_kernel,
        blocks,
        dims=("step", "distance"),
        members=members,
        dtype=np.float64,
        sizes=sizes,
        by_row=True,
    )
    distance = ResultVariable("f8", "distance to the nearest other vector", scan.units)
    entropy = ResultVariable("f8", "differential entropy by nearest distances", "nat")
    variables = {
        "nearest_distance": (("step", "token"), distances[:, :tokens], distance),
        "nearest_entropy": ("step", distances[:, tokens], entropy),
    }
    coords = scan.coords("W", ("step", "token"), rows)
    return dataset(variables, coords).assign_attrs(population=population)


_NO_NEIGHBOR = {-1: "none"}
_TEXT = np.dtypes.StringDType()


def _nearest_tokens_kernel(
    values: Array, members: Numbers, places: Numbers, labels: Numbers, k: int
) -> dict[str, Array]:
    """Labels and distances of the nearest tokens of the tokens at some places, (token, rank)."""
    nearest = np.full((places.size, k), -1, np.int64)
    distances = np.full((places.size, k), np.nan)
    members = members[np.isfinite(values[members]).all(1)]
    wide = values[members].astype(np.float64) + 0.0  # −0 and +0 have distance 0
    first, group = divide(wide)
    # A smaller number is a group with a smaller token. Then ties are as between tokens.
    rank = np.argsort(np.argsort(first))
    first, group = np.sort(first), rank[group]
    inside = np.searchsorted(members, places)
    asked = np.flatnonzero(np.isin(places, members))
    of, number = np.unique(group[inside[asked]], return_inverse=True)
    others, apart = _nearest(wide[first], k, of)
    by_group = np.split(np.argsort(group, kind="stable"), np.cumsum(np.bincount(group))[:-1])
    for row, each in zip(asked, number, strict=True):
        groups = [by_group[at][: k + 1] for at in (of[each], *others[each])]
        away = np.repeat([0.0, *apart[each]], [tokens.size for tokens in groups])
        tokens = np.concatenate(groups)
        other = tokens != inside[row]
        order = np.lexsort((tokens[other], away[other]))[:k]
        nearest[row, : order.size] = labels[members[tokens[other][order]]]
        distances[row, : order.size] = away[other][order]
    return {"nearest_token": nearest, "distance": distances}


@quantity(alone=True)
def nearest_tokens(
    scan: Scan,
    k: Count = 5,
    tokens: Sequence[int] | int | None = None,
    steps: Sequence[int] | int | None = None,
    population: str = "all",
) -> xr.Dataset:
    """The k nearest other tokens of each token, and their distances.

    Parameters
    ----------
    ds : Dataset
        With ``W`` (step, token, hidden).
    k : int
        Number of nearest tokens.
    tokens : int or sequence of int, optional
        Tokens whose nearest are found; default: all.
    steps : int or sequence of int, optional
        Steps to compute; default: all. The cost grows with `tokens` times the population.
    population : str
        Population that the nearest tokens, and `tokens`, belong to.

    Returns
    -------
    Dataset
        Over (step, token, rank), with ``rank`` from 1, the nearest, to k: ``nearest_token``, int64,
        and ``distance``, float64, ‖W_i − W_j‖₂. Identical tokens have distance 0. Tokens at the
        same distance keep their order along token. If the run has the texts of tokens,
        ``nearest_text`` has those of the nearest. −1, NaN and an empty text if there are fewer than
        k others, the token is not in the population, or W is not finite.

    Raises
    ------
    InvalidArgument
        If k is not from 1 to the number of tokens; for a token that the run does not hold, or an
        unknown population or one of fewer than two tokens.
    StepNotFound
        If a step was not recorded.

    Examples
    --------
    >>> near = nearest_tokens(ds, k=3, tokens=ord("e"), steps=20)
    >>> near.nearest_text.squeeze().values.tolist(), near.distance.squeeze().values.round(2)
    ([' ', 'a', 'h'], array([0., 0., 0.]))
    """
    group = one_population(scan.ds, population)
    labels = token_labels(scan.ds)
    if (size := np.count_nonzero(group)) < 2:
        raise InvalidArgument(
            f"the population {population} has {size} of these tokens, expected at least 2; "
            "name the tokens by tokens=, not by a selection"
        )
    asked = labels if tokens is None else exact("tokens", np.atleast_1d(tokens), "int64", least=ANY)
    if missing := sorted(set(asked.tolist()) - set(labels.tolist())):
        raise InvalidArgument(f"got tokens={missing[0]}, expected tokens of the run")
    if k > labels.size:
        raise InvalidArgument(f"got k={k}, expected 1 to {labels.size}, the number of tokens")
    by_label = np.argsort(labels)
    places = by_label[np.searchsorted(labels, asked, sorter=by_label)]
    rows = input_checks.rows_of_steps(scan.ds, steps)
    variables = {
        "nearest_token": ResultVariable("i8", "nearest token", None, flags=_NO_NEIGHBOR),
        "distance": ResultVariable("f8", "distance to the nearest token", scan.units),
    }
    measured = measure(
        _nearest_tokens_kernel,
        whole_rows(scan.blocks("W"), rows),
        dims=("step", "nearest_of", "rank"),
        members=np.nonzero(group)[0],
        places=places,
        labels=labels,
        k=k,
        dtype=record_of(variables),
        sizes={"nearest_of": asked.size, "rank": k},
        by_row=True,
    )
    dims = ("step", "token", "rank")
    coords = {
        name: values.isel(token=places) if "token" in values.dims else values
        for name, values in scan.coords("W", dims, rows).items()
    }
    result = table(measured, variables, dims, {**coords, "rank": np.arange(1, k + 1)})
    if "token_text" in scan.ds.coords:
        texts = np.array([*scan.ds["token_text"].values[by_label].tolist(), ""], _TEXT)
        # Computed from `measured`: dask loses a variable that another one is computed from.
        named = measured.map_blocks(_texts_of, labels=labels[by_label], texts=texts, dtype=_TEXT)
        attributes = {"long_name": "text of the nearest token"}
        result = result.assign_coords(nearest_text=(dims, named, attributes))
    return result.assign_attrs(population=population)


def _texts_of(nearest: Array, labels: Numbers, texts: Array) -> Array:
    """Text of each nearest token; the last one of the texts if there is none."""
    tokens = nearest["nearest_token"]
    return np.asarray(texts[np.where(tokens < 0, labels.size, np.searchsorted(labels, tokens))])


_ALL_CELLS = 1 << 32
"""Upper limit of the distance between two 32-bit values, in values."""

# Maximum pairs of neighbors in memory, at about 50 bytes each.
_PAIRS = 1 << 21
# Pairs of vectors per comparison, few enough for the processor's cache.
_COMPARED = 1 << 19
# When one candidate in _FEW is left, the remaining dimensions are compared in groups of _AT_ONCE.
_AT_ONCE = 8
_FEW = 64

_OF_POPULATIONS = {
    "vertices": ResultVariable("i8", "distinct vectors"),
    "edges": ResultVariable("i8", "pairs of neighbors"),
    "mean_degree": ResultVariable("f8", "mean number of neighbors of a vector"),
    "components": ResultVariable("i8", "connected components"),
    "isolated": ResultVariable("i8", "vectors without a neighbor"),
    "largest_component": ResultVariable("i8", "vectors in the largest component"),
    "largest_component_tokens": ResultVariable("i8", "tokens in the largest component"),
}
_OUTSIDE = {-1: "outside_the_population"}
_OF_TOKENS = {
    "degree": ResultVariable("i8", "number of neighbors", flags=_OUTSIDE),
    "connected_component": ResultVariable(
        "i8", "connected component, by its smallest token", flags=_OUTSIDE
    ),
}


def _scipy() -> tuple[Any, Any]:
    with needs_extra("adjacency", "graph"):
        from scipy.sparse import coo_array
        from scipy.sparse.csgraph import connected_components
    return coo_array, connected_components


def near_pairs(
    cells: Numbers, k: int, *, compared: int = _COMPARED, few: int = _FEW
) -> Iterator[Numbers]:
    """Yield pairs of neighbors in batches, (pair, 2); each pair once.

    Vectors are sorted along the dimension with the fewest close pairs. A block of vectors is
    compared with its possible neighbors, one dimension at a time, by the lowest bits only. When few
    pairs are left, their complete values are compared.

    Parameters
    ----------
    cells : ndarray of int64, (vector, hidden)
    k : int
        Largest distance of neighbors in each dimension.
    compared : int
        Pairs of vectors per comparison.
    few : int
        One candidate in this many is few.
    """
    count, hidden = cells.shape
    ordered = np.sort(cells, axis=0)
    near = [np.searchsorted(column, column + k, side="right").sum() for column in ordered.T]
    dimensions = np.argsort(near, kind="stable")
    by = np.argsort(cells[:, dimensions[0]], kind="stable")
    numbers = cells[by][:, dimensions]
    stops = np.searchsorted(numbers[:, 0], numbers[:, 0] + k, side="right")
    low = np.ascontiguousarray(numbers.T.astype(_lowest_bits(k)))
    rows = np.arange(1, math.isqrt(compared) + 1)  # a block is also compared with itself
    batch: list[Numbers] = []
    start = 0
    while start < count:
        ends = stops[start : start + rows.size] - start
        stop = start + max(1, int(np.count_nonzero(ends * rows[: ends.size] <= compared)))
        first, second = np.nonzero(_may_be_near(low, start, stop, int(stops[stop - 1]), k, few))
        once = second > first
        first, second = first[once] + start, second[once] + start
        for at in range(0, hidden, _AT_ONCE):
            part = slice(at, at + _AT_ONCE)
            left = (np.abs(numbers[first, part] - numbers[second, part]) <= k).all(1)
            first, second = first[left], second[left]
        batch.append(by[np.stack([first, second], 1)])
        if stop == count or sum(map(len, batch)) >= _PAIRS:
            yield np.concatenate(batch)
            batch = []
        start = stop


def _lowest_bits(k: int) -> type[np.unsignedinteger[Any]]:
    """Smallest type in which few random numbers differ by k or less."""
    types = (np.uint8, np.uint16, np.uint32)
    return next((kind for kind in types if 8 * k < np.iinfo(kind).max), np.uint64)


def _may_be_near(low: Array, start: int, stop: int, end: int, k: int, few: int) -> Groups:
    """Candidate pairs of vectors from `start` to `stop` with vectors from `start` to `end`.

    Integer arithmetic wraps around, so no neighbor is missed, but some candidates are no neighbors.
    """
    near = np.ones((stop - start, end - start), bool)
    away = np.empty(near.shape, low.dtype)
    also = np.empty(near.shape, bool)
    for column in low:
        np.subtract(column[None, start:end], column[start:stop, None] - low.dtype.type(k), out=away)
        np.less_equal(away, low.dtype.type(2 * k), out=also)
        near &= also
        if np.count_nonzero(near) * few < near.size:
            break
    return near


def _joined(labels: Numbers, pairs: Numbers) -> Numbers:
    """Components after adding these pairs."""
    coo_array, connected_components = _scipy()
    count = len(labels)
    first, second = labels[pairs].T
    new = first != second
    if not new.any():
        return labels
    ends = first[new], second[new]
    graph = coo_array((np.ones(len(ends[0]), bool), ends), shape=(count, count))
    return np.asarray(connected_components(graph, directed=False)[1][labels], np.int64)


def _graph(cells: Numbers, usable: Groups, inside: Groups, k: int) -> tuple[Numbers, Numbers]:
    """Degree and component of each vector within each population: both (population, vector)."""
    _scipy()  # raises if scipy is missing, even without neighbors
    degree = np.zeros(inside.shape, np.int64)
    labels = np.tile(np.arange(len(usable)), (len(inside), 1))
    places = np.nonzero(usable)[0]
    for pairs in near_pairs(cells[usable], k) if places.size else ():
        whole = places[pairs]
        for number, member in enumerate(inside):
            inner_pairs = whole[member[whole].all(1)]
            degree[number] += np.bincount(inner_pairs.ravel(), minlength=len(usable))
            if inner_pairs.size:
                labels[number] = _joined(labels[number], inner_pairs)
    return degree, labels


def _adjacency_of_row(
    values: Array, native: str, groups: Groups, names: Numbers, k: int, record: np.dtype[Any]
) -> dict[str, Array]:
    """Statistics of each population, and degree and component of each token of the last one."""
    points = ordinal(values, native)
    # −0 and +0 are one cell, and thus one vertex.
    first, vector = divide(points.astype(np.float64))
    usable = np.asarray(np.isfinite(values[first]).all(1))
    inside = np.zeros((len(groups), first.size), bool)
    for number, group in enumerate(groups):
        inside[number, vector[group]] = True
    degree, labels = _graph(points[first].astype(np.int64), usable, inside, k)
    statistics = np.zeros(len(groups), record)
    for number, (group, member) in enumerate(zip(groups, inside, strict=True)):
        if member.any():
            statistics[number] = _graph_statistics(
                degree[number, member], labels[number, member], labels[number, vector[group]]
            )
        else:
            statistics["mean_degree"][number] = np.nan
    degree_of_token, component_of_token = (
        np.full(len(values), -1, np.int64),
        np.full(len(values), -1, np.int64),
    )
    members = np.nonzero(groups[-1])[0]
    degree_of_token[members] = degree[-1, vector[members]]
    component_of_token[members] = smallest_members(
        labels[-1, vector[members]], first.size, names[members]
    )
    return {
        "facts": statistics,
        "degree": degree_of_token,
        "connected_component": component_of_token,
    }


def _graph_statistics(degree: Numbers, labels: Numbers, of_tokens: Numbers) -> tuple[Any, ...]:
    """The values of `_OF_POPULATIONS` for one population."""
    components, sizes = np.unique(labels, return_counts=True)
    tokens = np.unique(of_tokens, return_counts=True)[1]  # in the same order
    # Of components with equally many vectors, the one with more tokens.
    largest = np.lexsort((tokens, sizes))[-1]
    return (
        degree.size,
        degree.sum() // 2,
        degree.mean(),
        components.size,
        np.count_nonzero(degree == 0),
        sizes[largest],
        tokens[largest],
    )


@quantity()
def adjacency(
    scan: Scan,
    k: Count = 1,
    steps: Sequence[int] | int | None = None,
    population: str | None = None,
    lattice: str = "native",
) -> xr.Dataset:
    """Graph of the distinct vectors that are at most k values of the type apart in each element.

    Such vectors are neighbors: L∞ ≤ k, counted as by ``lattice_displacement(metric="ordinal")``.
    The graph of a population contains only its vectors.

    Parameters
    ----------
    ds : Dataset
        With ``W`` (step, token, hidden), or ``cells`` for the lattice of bfloat16.
    k : int
        Maximum distance of neighbors in values of the type, at least 1.
    steps : int or sequence of int, optional
        Steps to compute; default: all. With many tokens, each step takes seconds.
    population : str, optional
        A single population. The result then has no dimension population.
    lattice : {'native', 'bfloat16', 'float16', 'float32'}
        Type whose values are counted. W is first rounded to it.

    Returns
    -------
    Dataset
        Over (step, population), int64: ``vertices``, the number of distinct vectors (−0.0 and +0.0
        are equal); ``edges``; ``components``; ``isolated``, the number of vectors without a
        neighbor; ``largest_component``, its number of vectors, and ``largest_component_tokens``,
        its number of tokens; float64 ``mean_degree``. Over (step, token), int64, for the
        population or all tokens: ``degree``, the token's number of neighbors, and
        ``connected_component``, the smallest token of its component; −1 outside the population. A
        vector with a NaN or an infinity has no neighbors.

    Raises
    ------
    InvalidArgument
        For k below 1, an unknown population or lattice, float64 values, or if W holds values that
        its ``native_dtype`` cannot represent.
    StepNotFound
        If a step was not recorded.
    MissingExtra
        When computed, if scipy is not installed.

    Examples
    --------
    >>> found = adjacency(ds, steps=[0, 20])
    >>> found.vertices.sel(population="live").values, found.edges.sel(population="live").values
    (array([1, 2]), array([0, 1]))
    """
    k = min(k, _ALL_CELLS)
    names, groups = chosen_populations(scan.ds, population)
    # The last group defines the values per token.
    members = groups if population is not None else np.append(groups, np.ones_like(groups[:1]), 0)
    points, rows = scan.points(lattice), input_checks.rows_of_steps(scan.ds, steps)
    if points.type == "float64":
        raise InvalidArgument(
            "adjacency counts cells in 64-bit integers, which cannot count float64 values; use "
            "another lattice, such as lattice='float32'"
        )
    blocks = whole_rows(points.blocks, rows)
    tokens = blocks.shape[1]
    record = np.dtype(
        [
            ("facts", record_of(_OF_POPULATIONS), (len(members),)),
            *((name, fact.type, (tokens,)) for name, fact in _OF_TOKENS.items()),
        ]
    )
    measured = measure(
        _adjacency_of_row,
        blocks,
        dims=("step",),
        native=points.type,
        groups=members,
        names=token_labels(scan.ds),
        k=k,
        record=record["facts"].base,
        dtype=record,
        by_row=True,
    )
    per_group = field(measured, "facts")[:, : len(names)]
    coords = {"step": scan.ds["step"][rows], "population": names}
    result = table(per_group, _OF_POPULATIONS, ("step", "population"), coords)
    result = result.merge(scan.of_tokens(measured, _OF_TOKENS, points.variable, rows=rows))
    ds = with_lattice_attributes(result, lattice, units="1")
    return ds.sel(population=population) if population is not None else ds
