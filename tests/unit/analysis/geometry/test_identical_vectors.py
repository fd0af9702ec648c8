from __future__ import annotations

import itertools
import os

import dask
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
@given(tied_histories(), st.sampled_from(["dead", "live", "all"]))
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


def test_an_odd_number_of_16_bit_values() -> None:
    W = np.zeros((1, 3, 5), np.float16)
    W[0, 2, 4] = 1
    found = analysis.clusters(xr.Dataset({"W": (("step", "token", "hidden"), W)}, {"step": [0]}))
    assert found.groups.values.tolist() == [[1]]
    assert found.singles.values.tolist() == [[1]]
