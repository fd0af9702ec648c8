from __future__ import annotations

import itertools
import os

import numpy as np
import xarray as xr
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from trajstore import analysis
from trajstore.analysis.geometry.identical_vectors import divide

# Few bits: many ties, zeros of both signs, NaN of two payloads.
BITS = st.sampled_from([0, 0x8000, 0x3F80, 0x7FC0, 0x7FC1])


@st.composite
def tied_histories(draw: st.DrawFn) -> xr.Dataset:
    rows, tokens, hidden = (draw(st.integers(1, most)) for most in (4, 6, 2))
    bits = draw(arrays(np.uint16, (rows, tokens, hidden), elements=BITS))
    W = (bits.astype(np.uint32) << 16).view(np.float32)
    ds = xr.Dataset(
        {"W": (("step", "token", "hidden"), W, {"native_dtype": "bfloat16"})},
        coords={
            "step": np.cumsum(draw(arrays(np.int64, rows, elements=st.integers(1, 3)))),
            "token": np.array(draw(st.permutations(range(tokens)))) * 5,
            "is_dead": ("token", draw(arrays(bool, tokens))),
        },
    )
    return ds.chunk({dim: draw(st.integers(1, size)) for dim, size in ds.sizes.items()})


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
@given(tied_histories())
def test_clusters_equal_those_found_with_sets(ds: xr.Dataset) -> None:
    got = analysis.clusters(ds, ranks=3).compute(scheduler="sync")
    labels, W = ds.token.values, ds.W.values
    masks = {"dead": ds.is_dead.values, "live": ~ds.is_dead.values, "all": ds.is_dead.values | True}
    for name, mask in masks.items():
        one = analysis.clusters(ds, name, ranks=3).compute(scheduler="sync")
        rows = [groups_of(row[mask], labels[mask]) for row in W]
        for row, groups in enumerate(rows):
            expected = {token: min(group) for group in groups for token in group}
            cluster = one.cluster.isel(step=row).values
            assert cluster.tolist() == [expected.get(token, -1) for token in labels]
            sizes = sorted((len(group) for group in groups), reverse=True)
            several = [size for size in sizes if size > 1]
            for reported in (one.isel(step=row), got.sel(population=name).isel(step=row)):
                assert reported.groups == len(several)
                assert reported.singles == len(sizes) - len(several)
                assert reported.group_sizes.values.tolist() == [*several, 0, 0, 0][:3]
                if sizes:
                    square = sum((size / sum(sizes)) ** 2 for size in sizes)
                    np.testing.assert_allclose(reported.herfindahl, square)
                else:
                    assert np.isnan(reported.herfindahl)
                before = rows[row - 1]
                assert reported.events.values.tolist() == (
                    events_of(before, groups) if row else [-1] * 4
                )
            for token, left, joined in zip(
                labels, one.left.values[row], one.joined.values[row], strict=True
            ):
                inside = row and token in expected
                assert left == (moved(token, rows[row - 1], groups) if inside else -1)
                assert joined == (moved(token, groups, rows[row - 1]) if inside else -1)


def test_vectors_that_only_share_their_hash_are_distinguished() -> None:
    vectors = np.random.default_rng(1).integers(0, 2, (40, 4), np.uint16).view(np.float16)
    first, group = divide(vectors)
    shared_first, shared_group = divide(vectors, lambda bits: bits[:, 0].astype(np.uint64))
    np.testing.assert_array_equal(shared_first[shared_group], first[group])
    np.testing.assert_array_equal(vectors[first[group]], vectors)


def test_an_odd_number_of_16_bit_values() -> None:
    W = np.zeros((1, 3, 5), np.float16)
    W[0, 2, 4] = 1
    found = analysis.clusters(xr.Dataset({"W": (("step", "token", "hidden"), W)}, {"step": [0]}))
    assert found.groups.values.tolist() == [[1]]
    assert found.singles.values.tolist() == [[1]]


def test_vectors_that_differ_in_signs_are_distinct() -> None:
    W = np.array(list(itertools.product([1.0, -1.0], repeat=8)))
    assert divide(W)[0].size == 256


def test_clusters_on_a_lattice(make_run) -> None:
    W = np.array([[[1.0], [1.001], [1.1]]], np.float32)
    found = analysis.clusters(make_run(W, native="float32"), lattice="bfloat16")
    assert found.cluster.values.tolist() == [[3, 3, 0]]
    assert analysis.clusters(make_run(W, native="float32")).groups.values.item() == 0
