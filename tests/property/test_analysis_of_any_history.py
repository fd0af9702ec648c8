"""Any bit patterns, any steps, any chunks: the analysis against models of a few lines."""

from __future__ import annotations

import itertools
import os

import numpy as np
import xarray as xr
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from trajstore import analysis

several = settings(max_examples=int(os.environ.get("TRAJSTORE_EXAMPLES", "6")), deadline=None)

# Bits near each other make motion and rest; the others make trouble.
BITS = st.one_of(
    st.sampled_from([0, 0x8000, 1, 0x3F80, 0x3F81, 0x7F80, 0x7FC0, 0x7F81]),
    st.integers(0, 0xFFFF),
)


@st.composite
def histories(draw: st.DrawFn) -> tuple[np.ndarray, xr.Dataset]:
    rows, tokens, hidden = (draw(st.integers(1, most)) for most in (9, 5, 4))
    bits = draw(arrays(np.uint16, (rows, tokens, hidden), elements=BITS))
    for row in range(1, rows):
        for token in range(tokens):
            if draw(st.booleans()):
                bits[row, token] = bits[row - 1, token]
    steps = np.cumsum(draw(st.lists(st.integers(1, 4), min_size=rows, max_size=rows)))
    dead = np.array(draw(st.lists(st.booleans(), min_size=tokens, max_size=tokens)))
    W = (bits.astype(np.uint32) << 16).view(np.float32)
    ds = xr.Dataset(
        {"W": (("step", "token", "hidden"), W, {"native_dtype": "bfloat16"})},
        coords={"step": steps, "is_dead": ("token", dead)},
    )
    sizes = {dim: draw(st.integers(1, size)) for dim, size in ds.sizes.items()}
    return bits, ds.chunk(sizes)


def motion(bits: np.ndarray) -> np.ndarray:
    point = np.where(bits & 0x7FFF, bits, 0)
    return (point[1:] != point[:-1]).any(-1)


@several
@given(histories(), st.integers(1, 5))
def test_freeze(history: tuple[np.ndarray, xr.Dataset], min_unchanged: int) -> None:
    bits, ds = history
    got = analysis.freeze(ds, min_unchanged=min_unchanged).compute(scheduler="sync")
    steps, moved = ds.step.values, motion(bits)
    for token in range(bits.shape[1]):
        rows = [row + 1 for row in range(len(moved)) if moved[row, token]]
        gaps = [steps[later - 1] - steps[row] for row, later in itertools.pairwise(rows)]
        assert got.moves[token] == len(rows)
        assert got.last_motion[token] == (steps[rows[-1]] if rows else -1)
        assert got.thaws[token] == sum(gap >= min_unchanged for gap in gaps)
        settled = steps[-1] - steps[rows[-1] if rows else 0] >= min_unchanged
        following = steps[rows[-1] + 1 if rows else 0] if settled else -1
        assert got.frozen_since[token] == following


@several
@given(histories())
def test_regimes_are_a_partition_that_agrees_with_motion(
    history: tuple[np.ndarray, xr.Dataset],
) -> None:
    bits, ds = history
    got = analysis.regimes(ds).compute(scheduler="sync")
    assert ((got.regime >= 0) & (got.regime < 5)).all()
    np.testing.assert_array_equal(got.regime != 0, motion(bits))
    by_token = got.counts.sel(population="dead") + got.counts.sel(population="live")
    np.testing.assert_array_equal(by_token, got.counts.sel(population="all"))
    assert (by_token.sum("regime_name") == bits.shape[1]).all()
    last = analysis.lifecycle(ds).compute(scheduler="sync")
    latest = np.maximum.reduce([last[name].values for name in last])
    np.testing.assert_array_equal(latest, analysis.freeze(ds).last_motion)


@several
@given(histories(), histories())
def test_comparing_finds_the_first_difference(
    history: tuple[np.ndarray, xr.Dataset], other: tuple[np.ndarray, xr.Dataset]
) -> None:
    bits, ds = history
    changed = bits.copy()
    if other[0].shape == bits.shape:
        changed[len(bits) // 2 :] = other[0][len(bits) // 2 :]
    else:
        changed[-1, -1, -1] ^= 1
    W = (changed.astype(np.uint32) << 16).view(np.float32)
    got = analysis.compare(ds, ds.assign(W=ds.W.copy(data=W))).compute(scheduler="sync")
    rows = np.nonzero((bits != changed).any((1, 2)))[0]
    assert got.first_difference.item() == (ds.step.values[rows[0]] if rows.size else -1)
