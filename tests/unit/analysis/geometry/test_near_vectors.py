"""Vectors that are identical, or near each other, compared with sets and with loops over pairs."""

from __future__ import annotations

import itertools
import math
import os

import dask
import numpy as np
import pytest
import xarray as xr
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from trajstore import analysis
from trajstore.analysis.geometry.identical_vectors import divide
from trajstore.analysis.geometry.near_vectors import near_pairs
from trajstore.analysis.several_quantities import compute_named
from trajstore.errors import InvalidArgument, StepNotFound
from trajstore.values.native_types import ordinal

# Few bits: many ties, zeros of both signs, NaN of two payloads.
TIED = st.sampled_from([0, 0x8000, 0x3F80, 0x7FC0, 0x7FC1])
# Near each other, across zero and across a power of two; NaN and infinity.
NEAR = st.sampled_from([0, 0x8000, 1, 0x8001, 0x3F7F, 0x3F80, 0x3F81, 0x3F83, 0x7F80, 0x7FC0])


@st.composite
def histories(draw: st.DrawFn, elements: st.SearchStrategy[int], *most: int) -> xr.Dataset:
    """bfloat16 bits of at most that many rows and tokens."""
    rows, tokens, hidden = (draw(st.integers(1, size)) for size in (*most, 2))
    bits = draw(arrays(np.uint16, (rows, tokens, hidden), elements=elements))
    W = (bits.astype(np.uint32) << 16).view(np.float32)
    ds = xr.Dataset(
        {"W": (("step", "token", "hidden"), W, {"native_dtype": "bfloat16"})},
        coords={
            "step": np.cumsum(draw(arrays(np.int64, rows, elements=st.integers(1, 3)))),
            "token": np.array(draw(st.permutations(range(tokens)))) * 5,
            "is_dead": ("token", draw(arrays(bool, tokens))),
        },
    )
    return ds.chunk(step=draw(st.integers(1, 2)), token=draw(st.integers(3, 6)))


def groups_of(row: np.ndarray, labels: np.ndarray) -> list[set[int]]:
    """Groups of identical vectors, including single tokens."""
    found: dict[bytes, set[int]] = {}
    for vector, label in zip(row, labels, strict=True):
        found.setdefault(vector.tobytes(), set()).add(int(label))
    return list(found.values())


def events_of(before: list[set[int]], now: list[set[int]]) -> list[int]:
    def bonds(group: set[int], others: list[set[int]]) -> int:
        return sum(len(group & other) > 1 for other in others)

    old = [bonds(group, now) for group in before if len(group) > 1]
    new = [bonds(group, before) for group in now if len(group) > 1]
    return [
        new.count(0),
        sum(number > 1 for number in new),
        sum(number > 1 for number in old),
        old.count(0),
    ]


def moved(token: int, mine: list[set[int]], others: list[set[int]]) -> int:
    """Name of the group of `mine` whose lasting part excludes the token; −1 if none."""
    group = next(group for group in mine if token in group)
    if len(group) == 1:
        return -1
    parts = [(-len(group & other), min(other), group & other) for other in others]
    size, _, part = min(parts, key=lambda found: found[:2])
    return -1 if size < -1 and token in part else min(group)


@settings(max_examples=int(os.environ.get("TRAJSTORE_EXAMPLES", "6")), deadline=None)
@given(histories(TIED, 4, 6), st.sampled_from(["dead", "live", "all"]))
def test_clusters_equal_those_found_with_sets(ds: xr.Dataset, population: str) -> None:
    labels, dead = ds.token.values, ds.is_dead.values
    mask = {"dead": dead, "live": ~dead, "all": dead | True}[population]
    rows = [groups_of(row[mask], labels[mask]) for row in ds.W.values]
    whole, one = (analysis.clusters(ds, of, ranks=3) for of in (None, population))
    whole, one = dask.compute(whole.sel(population=population), one, scheduler="sync")
    for row, groups in enumerate(rows):
        before = rows[row - 1]
        expected = {token: min(group) for group in groups for token in group}
        assert one.cluster[row].values.tolist() == [expected.get(token, -1) for token in labels]
        sizes = sorted((len(group) for group in groups), reverse=True)
        several = [size for size in sizes if size > 1]
        square = sum((size / sum(sizes)) ** 2 for size in sizes) if sizes else np.nan
        for reported in (one.isel(step=row), whole.isel(step=row)):
            assert reported.groups == len(several)
            assert reported.singles == len(sizes) - len(several)
            assert reported.group_sizes.values.tolist() == [*several, 0, 0, 0][:3]
            np.testing.assert_allclose(reported.herfindahl, square)
            events = events_of(before, groups) if row else [-1] * 4
            assert reported.events.values.tolist() == events
        for token, left, joined in zip(
            labels, one.left.values[row], one.joined.values[row], strict=True
        ):
            inside = row and token in expected
            assert left == (moved(token, before, groups) if inside else -1)
            assert joined == (moved(token, groups, before) if inside else -1)


def test_vectors_that_share_their_hash_or_differ_in_signs_are_distinguished() -> None:
    vectors = np.random.default_rng(1).integers(0, 2, (40, 4), np.uint16).view(np.float16)
    first, group = divide(vectors)
    shared_first, shared_group = divide(vectors, lambda bits: bits[:, 0].astype(np.uint64))
    np.testing.assert_array_equal(shared_first[shared_group], first[group])
    np.testing.assert_array_equal(vectors[first[group]], vectors)
    signs = np.array(list(itertools.product([1.0, -1.0], repeat=8)))
    assert divide(signs)[0].size == 256
    odd = np.zeros((3, 5), np.float16)  # of 16-bit values
    odd[2, 4] = 1
    assert divide(odd)[0].size == 2


def graph_by_hand(W: np.ndarray, names: np.ndarray, k: int) -> tuple[dict, dict[int, tuple]]:
    """Facts about the graph of some tokens, and (degree, component) of each by name."""
    if not len(W):
        facts = "vertices edges components isolated largest_component largest_component_tokens"
        return dict.fromkeys(facts.split(), 0), {}
    _, first, vertex = np.unique(
        ordinal(W, "bfloat16"), axis=0, return_index=True, return_inverse=True
    )
    cells, finite = ordinal(W[first], "bfloat16").astype(np.int64), np.isfinite(W[first]).all(1)
    near = np.abs(cells[:, None] - cells).max(-1) <= k
    near &= finite & finite[:, None] & ~np.eye(len(cells), dtype=bool)
    reached = np.linalg.matrix_power(near + np.eye(len(cells)), len(cells)) > 0
    degrees, vertex = near.sum(1), vertex.ravel()
    members = [names[of[vertex]] for of in reached]  # of the component of each vertex
    facts = {
        "vertices": len(cells),
        "edges": near.sum() // 2,
        "components": len(np.unique(reached, axis=0)),
        "isolated": (degrees == 0).sum(),
    }
    largest = max((of.sum(), len(found)) for of, found in zip(reached, members, strict=True))
    facts["largest_component"], facts["largest_component_tokens"] = largest
    reported = {
        int(name): (degrees[at], members[at].min()) for name, at in zip(names, vertex, strict=True)
    }
    return facts, reported


@settings(max_examples=int(os.environ.get("TRAJSTORE_EXAMPLES", "5")), deadline=None)
@given(histories(NEAR, 2, 8), st.integers(1, 2), st.sampled_from(["dead", "live", "all"]))
def test_adjacency(ds: xr.Dataset, k: int, population: str) -> None:
    names, dead = ds.token.values, ds.is_dead.values
    members = {"dead": dead, "live": ~dead, "all": dead | True}[population]
    whole, one = (analysis.adjacency(ds, k, population=of) for of in (None, population))
    counts, one, degree = dask.compute(
        whole.sel(population=population), one, whole.degree, scheduler="sync"
    )
    for row, W in enumerate(ds.W.values):
        facts, reported = graph_by_hand(W[members], names[members], k)
        facts["mean_degree"] = 2 * facts["edges"] / facts["vertices"] if reported else np.nan
        for of in (counts, one):
            for fact, expected in facts.items():
                np.testing.assert_allclose(of[fact][row], expected, err_msg=fact)
        pairs = [reported.get(name, (-1, -1)) for name in names]
        assert one.degree[row].values.tolist() == [pair[0] for pair in pairs]
        assert one.connected_component[row].values.tolist() == [pair[1] for pair in pairs]
        _, of_all = graph_by_hand(W, names, k)
        assert degree[row].values.tolist() == [of_all[name][0] for name in names]


# Distances around wraps of the lowest bits, and just within or beyond k.
NUMBERS = st.integers(-4, 4).flatmap(
    lambda small: st.sampled_from([0, 256, -512, 1 << 16, 1 << 32, -(1 << 32)]).map(
        lambda turns: small + turns
    )
)


@settings(max_examples=int(os.environ.get("TRAJSTORE_EXAMPLES", "8")), deadline=None)
@given(
    arrays(np.int64, st.tuples(st.integers(1, 12), st.integers(1, 10)), elements=NUMBERS),
    st.sampled_from([1, 2, 31, 40, 255, 9000, 70_000]),
    st.sampled_from([1, 7, 1 << 19]),
)
def test_pairs_whatever_their_lowest_bits(cells: np.ndarray, k: int, compared: int) -> None:
    batches = near_pairs(cells, k, compared=compared, few=2)
    pairs = [tuple(sorted(pair)) for batch in batches for pair in batch]
    apart = np.abs(cells[:, None] - cells[None]).max(2)
    expected = np.argwhere(np.triu(apart <= k, 1)).tolist()
    assert sorted(pairs) == [tuple(pair) for pair in expected]


@pytest.mark.nightly
def test_more_pairs_than_fit_in_memory_at_once(make_run) -> None:
    numbers = np.arange(1500, dtype=np.uint16)  # both groups together have more than 2²¹ pairs
    bits = np.concatenate([numbers, numbers + 0x3000])[None, :, None]
    graph = analysis.adjacency(make_run(bits), k=1500, population="all").compute()
    assert (graph.degree == 1499).all()
    assert (graph.edges.item(), graph.components.item()) == (1500 * 1499, 2)


def test_steps_of_choice(make_run, walk) -> None:
    ds = make_run(walk(6, 9, 3), is_dead=np.arange(9) < 4, steps=np.arange(6) * 2)
    for quantity in (analysis.adjacency, analysis.nearest_distance):
        whole = quantity(ds).compute()
        for steps in ([10, 2], 4):
            got = quantity(ds, steps=steps).compute()
            xr.testing.assert_identical(got, whole.sel(step=np.atleast_1d(steps)))
        with pytest.raises(StepNotFound):
            quantity(ds, steps=[2, 3])
    again = compute_named(ds, ["adjacency"], ["steps=2,10", "k=2"])
    xr.testing.assert_identical(again.compute(), analysis.adjacency(ds, 2, [2, 10]).compute())


def distances_by_hand(W: np.ndarray) -> np.ndarray:
    with np.errstate(all="ignore"):
        apart = np.linalg.norm(W[:, None] - W[None], axis=-1)
    finite = np.isfinite(W).all(1)
    apart[(apart == 0) | ~finite | ~finite[:, None]] = np.inf
    nearest = apart.min(1, initial=np.inf)
    return np.where(np.isfinite(nearest), nearest, np.nan)


@settings(max_examples=int(os.environ.get("TRAJSTORE_EXAMPLES", "8")), deadline=None)
@given(histories(NEAR, 2, 8), st.sampled_from(["dead", "all"]))
def test_nearest_distance(ds: xr.Dataset, population: str) -> None:
    members = ds.is_dead.values | (population == "all")
    got = analysis.nearest_distance(ds, population).compute(scheduler="sync")
    for row, W in enumerate(ds.W.values.astype(np.float64)):
        expected = np.full(len(members), np.nan)
        expected[members] = distances_by_hand(W[members])
        np.testing.assert_allclose(got.nearest_distance[row], expected, rtol=1e-12)
        finite = members & np.isfinite(W).all(1)
        _, first = np.unique(W[finite] + 0.0, axis=0, return_index=True)
        if len(first) < 2:
            assert got.nearest_entropy[row].isnull()
            continue
        n, hidden = len(first), W.shape[1]
        ball = math.log({1: 2.0, 2: math.pi}[hidden])
        harmonic = sum(1 / number for number in range(1, n))
        entropy = hidden * np.log(expected[finite][first]).mean() + ball + harmonic
        np.testing.assert_allclose(got.nearest_entropy[row], entropy, rtol=1e-9, atol=1e-9)


@settings(max_examples=int(os.environ.get("TRAJSTORE_EXAMPLES", "8")), deadline=None)
@given(histories(NEAR, 2, 8), st.integers(1, 6), st.sampled_from(["dead", "all"]))
def test_nearest_tokens(ds: xr.Dataset, k: int, population: str) -> None:
    labels, k = ds.token.values, min(k, ds.sizes["token"])
    members = ds.is_dead.values | (population == "all")
    ds = ds.assign_coords(token_text=("token", [f"<{label}>" for label in labels]))
    if members.sum() < 2:
        with pytest.raises(InvalidArgument, match=r"expected at least 2; name the tokens by"):
            analysis.nearest_tokens(ds, k, population=population)
        return
    got = analysis.nearest_tokens(ds, k, labels[::-1], population=population)
    got = got.compute(scheduler="sync")
    assert got.token.values.tolist() == labels[::-1].tolist()
    for (row, W), place in itertools.product(enumerate(ds.W.values), range(len(labels))):
        finite = members & np.isfinite(W).all(1)
        with np.errstate(invalid="ignore"):
            apart = np.sqrt(((W.astype(np.float64) - W[place]) ** 2).sum(1))
        others = [other for other in np.flatnonzero(finite) if other != place and finite[place]]
        others = sorted(others, key=lambda other: apart[other])[:k]  # stable: by token
        rest = k - len(others)
        near = got.isel(step=row, token=-1 - place)
        assert near.nearest_token.values.tolist() == [*labels[others], *[-1] * rest]
        texts = [f"<{label}>" for label in labels[others]]
        assert near.nearest_text.values.tolist() == texts + [""] * rest
        np.testing.assert_array_equal(near.distance, [*apart[others], *[np.nan] * rest])


def test_distances_of_many_and_of_those_that_products_cannot_tell_apart(make_run) -> None:
    rng = np.random.default_rng(1)
    places = np.cumsum(rng.integers(1, 9, 3000)).astype(np.float64)
    gaps = np.diff(places, prepend=-np.inf, append=np.inf)
    order = rng.permutation(places.size)
    near = 1000 + rng.normal(0, 1e-9, (40, 4))
    near[0] = -1000  # the squares are large, and the mean is far away
    for W, expected in (
        (places[order, None], np.minimum(gaps[:-1], gaps[1:])[order]),
        (near, distances_by_hand(near)),
    ):
        got = analysis.nearest_distance(make_run(W[None], native="float64")).nearest_distance
        np.testing.assert_allclose(got[0], expected, rtol=1e-12)


def test_numbers_beyond_their_type(make_run) -> None:
    W = np.array([[[1.0, 0], [2, 0], [5, 0], [4, 0]]])
    found, huge = (
        analysis.nearest_tokens(make_run(W * scale, native="float64"), 3).compute()
        for scale in (1.0, 2.0**1000)
    )
    np.testing.assert_array_equal(huge.nearest_token, found.nearest_token)
    np.testing.assert_array_equal(huge.distance, found.distance * 2.0**1000)
    with pytest.raises(InvalidArgument, match="lattice='float32'"):
        analysis.adjacency(make_run(W, native="float64"))
    with pytest.raises(InvalidArgument, match=r"tokens: got 11\d+ at position 0, expected whole"):
        analysis.nearest_tokens(make_run(W), tokens=2**70)
