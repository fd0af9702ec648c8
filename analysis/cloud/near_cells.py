"""Graph of distinct vectors in nearby cells of the lattice.

Identical tokens are one vertex of the graph.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import xarray as xr

from trajstore.analysis.cloud.identical_vectors import divide, smallest_members, token_labels
from trajstore.analysis.scan import input_checks
from trajstore.analysis.scan.block_tasks import (
    Array,
    Groups,
    Numbers,
    field,
    measure,
    table,
    whole_rows,
)
from trajstore.analysis.scan.input_checks import Fact, record_of
from trajstore.analysis.scan.quantity import quantity
from trajstore.analysis.scan.rows import with_lattice_attributes
from trajstore.analysis.scan.scan import Scan
from trajstore.arguments import Count
from trajstore.errors import InvalidArgument, needs_extra
from trajstore.populations import chosen_populations
from trajstore.values.native_types import ordinal

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
    "vertices": Fact("i8", "distinct vectors"),
    "edges": Fact("i8", "pairs of neighbors"),
    "mean_degree": Fact("f8", "mean number of neighbors of a vector"),
    "components": Fact("i8", "connected components"),
    "isolated": Fact("i8", "vectors without a neighbor"),
    "largest_component": Fact("i8", "vectors in the largest component"),
    "largest_component_tokens": Fact("i8", "tokens in the largest component"),
}
_OUTSIDE = {-1: "outside_the_population"}
_OF_TOKENS = {
    "degree": Fact("i8", "number of neighbors", flags=_OUTSIDE),
    "connected_component": Fact("i8", "connected component, by its smallest token", flags=_OUTSIDE),
}


def _scipy() -> tuple[Any, Any]:
    with needs_extra("adjacency", "graph"):
        from scipy.sparse import coo_array
        from scipy.sparse.csgraph import connected_components
    return coo_array, connected_components


def _pairs(cells: Numbers, k: int) -> Iterator[Numbers]:
    """Yield pairs of neighbors in batches, (pair, 2); each pair once.

    Vectors are sorted along the dimension with the fewest close pairs. A block of vectors is
    compared with its possible neighbors, one dimension at a time, by the lowest bits only. When few
    pairs are left, their complete values are compared.
    """
    count, hidden = cells.shape
    ordered = np.sort(cells, axis=0)
    near = [np.searchsorted(column, column + k, side="right").sum() for column in ordered.T]
    dimensions = np.argsort(near, kind="stable")
    by = np.argsort(cells[:, dimensions[0]], kind="stable")
    numbers = cells[by][:, dimensions]
    stops = np.searchsorted(numbers[:, 0], numbers[:, 0] + k, side="right")
    low = np.ascontiguousarray(numbers.T.astype(_lowest_bits(k)))
    rows = np.arange(1, math.isqrt(_COMPARED) + 1)  # a block is also compared with itself
    held: list[Numbers] = []
    start = 0
    while start < count:
        ends = stops[start : start + rows.size] - start
        stop = start + max(1, int(np.count_nonzero(ends * rows[: ends.size] <= _COMPARED)))
        first, second = np.nonzero(_may_be_near(low, start, stop, int(stops[stop - 1]), k))
        once = second > first
        first, second = first[once] + start, second[once] + start
        for at in range(0, hidden, _AT_ONCE):
            part = slice(at, at + _AT_ONCE)
            left = (np.abs(numbers[first, part] - numbers[second, part]) <= k).all(1)
            first, second = first[left], second[left]
        held.append(by[np.stack([first, second], 1)])
        if stop == count or sum(map(len, held)) >= _PAIRS:
            yield np.concatenate(held)
            held = []
        start = stop


def _lowest_bits(k: int) -> type[np.unsignedinteger[Any]]:
    """Smallest type in which few random numbers differ by k or less."""
    types = (np.uint8, np.uint16, np.uint32)
    return next((kind for kind in types if 8 * k < np.iinfo(kind).max), np.uint64)


def _may_be_near(low: Array, start: int, stop: int, end: int, k: int) -> Groups:
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
        if np.count_nonzero(near) * _FEW < near.size:
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
    for pairs in _pairs(cells[usable], k) if places.size else ():
        whole = places[pairs]
        for number, member in enumerate(inside):
            own = whole[member[whole].all(1)]
            degree[number] += np.bincount(own.ravel(), minlength=len(usable))
            if own.size:
                labels[number] = _joined(labels[number], own)
    return degree, labels


def _adjacency_of_row(
    values: Array, native: str, groups: Groups, names: Numbers, k: int, record: np.dtype[Any]
) -> dict[str, Array]:
    """Facts about each population, and degree and component of each token of the last one."""
    points = ordinal(values, native)
    # −0 and +0 are one cell, and thus one vertex.
    first, vector = divide(points.astype(np.float64))
    usable = np.asarray(np.isfinite(values[first]).all(1))
    inside = np.zeros((len(groups), first.size), bool)
    for number, group in enumerate(groups):
        inside[number, vector[group]] = True
    degree, labels = _graph(points[first].astype(np.int64), usable, inside, k)
    facts = np.zeros(len(groups), record)
    for number, (group, member) in enumerate(zip(groups, inside, strict=True)):
        if member.any():
            facts[number] = _facts(
                degree[number, member], labels[number, member], labels[number, vector[group]]
            )
        else:
            facts["mean_degree"][number] = np.nan
    own, component = np.full(len(values), -1, np.int64), np.full(len(values), -1, np.int64)
    members = np.nonzero(groups[-1])[0]
    own[members] = degree[-1, vector[members]]
    component[members] = smallest_members(labels[-1, vector[members]], first.size, names[members])
    return {"facts": facts, "degree": own, "connected_component": component}


def _facts(degree: Numbers, labels: Numbers, of_tokens: Numbers) -> tuple[Any, ...]:
    """The values of `_OF_POPULATIONS` for one population."""
    found, sizes = np.unique(labels, return_counts=True)
    tokens = np.unique(of_tokens, return_counts=True)[1]  # in the same order
    # Of components with equally many vectors, the one with more tokens.
    largest = np.lexsort((tokens, sizes))[-1]
    return (
        degree.size,
        degree.sum() // 2,
        degree.mean(),
        found.size,
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
    found = measure(
        _adjacency_of_row,
        "s",
        blocks,
        native=points.type,
        groups=members,
        names=token_labels(scan.ds),
        k=k,
        record=record["facts"].base,
        dtype=record,
        by_row=True,
    )
    per_group = field(found, "facts")[:, : len(names)]
    coords = {"step": scan.ds["step"][rows], "population": names}
    result = table(per_group, _OF_POPULATIONS, ("step", "population"), coords)
    result = result.merge(scan.of_tokens(found, _OF_TOKENS, points.variable, rows=rows))
    ds = with_lattice_attributes(result, lattice, units="1")
    return ds.sel(population=population) if population is not None else ds
