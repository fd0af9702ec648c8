from __future__ import annotations

import itertools
import os

import numpy as np
import pytest
import xarray as xr
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from trajstore import analysis
from trajstore.analysis.motion.freezing import last_start
from trajstore.analysis.several_quantities import compute_named


def motion_of(bits: np.ndarray) -> np.ndarray:
    """True where any bit changed, with −0 equal to +0."""
    point = np.where(bits & 0x7FFF, bits, 0)
    return point[1:] != point[:-1]


def life_of(moved: np.ndarray, steps: np.ndarray, min_unchanged: int) -> tuple[int, int, int, int]:
    """Facts about one token, from a loop over its rows."""
    last, thaws, moves = None, 0, 0
    for row in range(1, len(steps)):
        if moved[row - 1]:
            if last is not None and steps[row - 1] - steps[last] >= min_unchanged:
                thaws += 1
            last, moves = row, moves + 1
    last_motion = steps[last] if last is not None else -1
    still = steps[-1] - steps[last if last is not None else 0]
    following = steps[0] if last is None else steps[min(last + 1, len(steps) - 1)]
    return last_motion, following if still >= min_unchanged else -1, thaws, moves


@pytest.mark.parametrize(("spread", "min_unchanged"), [(1, 1), (2, 3)])
def test_freeze(bits, chunks, min_unchanged, spread, make_run):
    steps = np.arange(len(bits)) ** spread
    dead = np.arange(bits.shape[1]) % 2 == 0
    ds = make_run(bits, steps=steps, is_dead=dead, chunks=chunks)
    elements = motion_of(bits)
    found = {}
    for per, moved in (("token", elements.any(-1, keepdims=True)), ("element", elements)):
        got = found[per] = analysis.freeze(ds, min_unchanged, per=per).compute()
        places = np.ndindex(moved.shape[1:])
        lives = np.array([life_of(moved[:, *at], steps, min_unchanged) for at in places])
        lives = lives.reshape(*moved.shape[1:], 4)
        names = ("last_motion", "frozen_since", "thaws", "moves")
        for number, name in enumerate(names[: 4 if per == "token" else 2]):
            expected = lives[..., 0, number] if per == "token" else lives[..., number]
            assert got[name].dtype == np.int64
            np.testing.assert_array_equal(got[name], expected, err_msg=name)
        since = lives[..., 1]
        frozen = (since >= 0) & (since <= steps[1:, None, None])
        for population, members in {"dead": dead, "live": ~dead, "all": dead | True}.items():
            for name, share in (("unchanged_fraction", ~moved), ("frozen_fraction", frozen)):
                of = share[:, members].mean((1, 2)) if members.any() else np.nan
                np.testing.assert_allclose(got[name].sel(population=population), of)
    middle = np.sort(lives[..., 0], axis=-1)[:, (bits.shape[2] - 1) // 2]
    np.testing.assert_array_equal(got.median_last_motion, middle)
    if spread == 1:  # a recorded sum of hops takes the place of the weights
        hops = analysis.lattice_displacement(ds, ord=1)
        stored = ds.assign(W_ulp_l1=hops.reindex(step=ds.step)).drop_vars("W")
        xr.testing.assert_equal(analysis.freeze(stored, min_unchanged).compute(), found["token"])


def test_a_run_without_rows_is_too_short_to_freeze():
    assert last_start(np.array([], np.int64), 3) == -1


def last_moves_of(W: np.ndarray, steps: np.ndarray) -> list[tuple[int, int, int, float]]:
    """Facts about each token, from loops over its rows and elements."""
    found = []
    for token in range(W.shape[1]):
        last = (-1, -1, 0, np.nan)
        for row in range(1, len(W)):
            before, after = W[row - 1, token], W[row, token]
            moved = [
                number
                for number, (old, new) in enumerate(zip(before, after, strict=True))
                if old.tobytes() != new.tobytes() and not old == new == 0
            ]
            if moved:
                size = np.abs(before.astype(np.float64))
                finite = [number for number in moved if np.isfinite(size[number])]
                element = min(finite, key=lambda number: size[number]) if finite else moved[0]
                last = (steps[row], element, len(moved), size[element])
        found.append(last)
    return found


def ties() -> np.ndarray:
    """Of several elements that move last, the smallest, then the first; (4, 5, 3)."""
    W = np.zeros((4, 5, 3), np.float32)
    W[:, 0] = [[4, 1, 2], [4, 1, 2], [5, 1, 3], [5, 1, 3]]
    W[:, 1] = [[1, -1, 1], [2, -2, 1], [2, -2, 1], [2, -2, 1]]
    W[:, 2] = [[0, 0, 0], [-0.0, 0, 0], [0, 0, 0], [0, -0.0, 0]]  # no motion
    W[:, 3] = [[np.nan, np.inf, 1], [np.nan, 3, 1], [2, 3, 1], [2, 3, 1]]
    W[:, 4] = [[9, 8, 7], [9, 8, 7], [9, 8, 7], [9, 8, 6]]
    return W


def test_against_a_walk_through_the_elements(bits, chunks, make_run):
    for ds in (
        make_run(bits, steps=np.arange(len(bits)) ** 2, chunks=chunks),
        make_run(ties(), native="float32"),
    ):
        got = analysis.last_moving_element(ds).compute()
        expected = last_moves_of(ds.W.values, ds.step.values)
        names = ("last_motion", "last_moving_element", "moving_elements", "last_moving_size")
        for name, values in zip(names, zip(*expected, strict=True), strict=True):
            np.testing.assert_array_equal(got[name], values, err_msg=name)


VALUES = st.sampled_from([0.0, -0.0, 0.25, 0.5, 1.0, -1.0, np.nan, np.inf])


@settings(max_examples=int(os.environ.get("TRAJSTORE_EXAMPLES", "12")), deadline=None)
@given(
    arrays(np.float32, st.tuples(st.integers(1, 7), st.integers(1, 3)), elements=VALUES),
    st.integers(1, 4),
    st.sampled_from(["change", "value"]),
)
def test_against_a_walk_along_the_curve(values: np.ndarray, chunk: int, of: str) -> None:
    steps = np.arange(len(values)) * 3 + 1
    curve = xr.DataArray(values, dims=("step", "token"), coords={"step": steps}, name="curve")
    chunked = curve.chunk(step=chunk, token=2)
    got = analysis.crossings(curve.to_dataset(), chunked, [0.5, 1], of).compute(scheduler="sync")
    wide = values.astype(np.float64)
    if of == "change":
        start = np.where(np.isnan(wide[0]), wide[min(1, len(wide) - 1)], wide[0])
        with np.errstate(all="ignore"):
            wide = (wide - start) / (wide[-1] - start)
    for number, level in enumerate((0.5, 1)):
        for token, one in enumerate(wide.T):
            seen = [(int(step), v >= level) for step, v in zip(steps, one, strict=True) if v == v]
            passes = [
                step
                for (_, before), (step, now) in itertools.pairwise(seen)
                if now != before and (now or of == "value")
            ]
            first, last = (passes[0], passes[-1]) if passes else (-1, -1)
            assert got.first_crossing[number, token] == first
            assert got.last_crossing[number, token] == last
            above = next((step for step, reached in seen if reached), -1)
            assert got.first_above[number, token] == above, "also in the first row"


def test_curves_of_a_run(make_run, walk) -> None:
    ds = make_run(walk(12, 5, 3), is_dead=np.arange(5) < 2, chunks=(4, 2, 3))
    ds = ds.assign(loss=("step", np.linspace(4, 1, 12)))
    frozen = analysis.crossings(ds, "freeze.frozen_fraction", 0.5, of="value")
    fraction = analysis.freeze(ds).frozen_fraction
    xr.testing.assert_equal(frozen, analysis.crossings(ds, fraction, 0.5, "value"))
    assert frozen.first_crossing.dims == ("level", "population")
    assert analysis.crossings(ds, "loss").first_crossing.values.tolist() == [6, 10, 11]
    falling = analysis.crossings(ds, "loss", [5, 3.5, 2, 0], "value")
    assert falling.first_crossing.values.tolist() == [-1, 2, 8, -1]
    counts = analysis.crossings(ds, analysis.regimes(ds).counts, 1, "value")
    assert counts.first_crossing.dims == ("level", "population", "regime_name")
    again = compute_named(ds, ["crossings"], ["quantity=loss", "levels=0.5,0.9"])
    assert again.first_crossing.values.tolist() == [6, 10]


ROWS = 200


def history(kick: float = 0.0, at: int = 100, freeze: bool = True) -> np.ndarray:
    """Random walk whose pace decays to zero, with a kick that also decays."""
    rng = np.random.default_rng(0)
    rows = np.arange(1, ROWS)
    pace = 1e-3 * np.exp(-rows / 20) if freeze else np.full(ROWS - 1, 1e-3)
    pace = pace + np.where(rows >= at, kick * np.exp(-(rows - at) / 8), 0)
    W = np.zeros((ROWS, 40, 8), np.float32)
    W[1:] = np.cumsum(pace[:, None, None] * rng.normal(size=(ROWS - 1, 40, 8)), axis=0)
    return W


def single_element() -> np.ndarray:
    W = history()
    W[100:] = W[99]
    W[150:, 0, 0] += 1e-6
    return W


def nan_from_90() -> np.ndarray:
    W = history(freeze=False)
    W[90:, 3] = np.nan
    return W


@pytest.mark.parametrize(
    ("W", "found", "unknown"),
    [
        (history(), [], 1),
        (history(freeze=False), [], 1),
        (history(kick=5e-4, at=20), [20], 1),
        (history(kick=5e-4, at=ROWS - 3), [ROWS - 3], 1),
        (single_element(), [100], 1),  # where the motion ends, not where one element moves
        (nan_from_90(), [90], 110),
        (np.ones((30, 4, 2), np.float32), [], 29),
        (history()[:4], [], 3),  # few rows are no neighborhood
    ],
)
def test_a_discontinuity_is_found_where_it_is(W, found, unknown, make_run):
    got = analysis.discontinuities(make_run(W, native="float32", chunks=(17, 9, -1))).compute()
    assert got.step.values[got.discontinuity.values].tolist() == found
    assert got.discontinuity_score.isnull().sum() == unknown
    large = got.step.values[abs(got.discontinuity_score) > 5]
    assert large.tolist() == found
