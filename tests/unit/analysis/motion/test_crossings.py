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
from trajstore.analysis.several_quantities import compute_named
from trajstore.errors import InvalidArgument

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
    frozen = analysis.crossings(ds, "freeze.frozen_fraction", 0.5, of="value").compute()
    fraction = analysis.freeze(ds).frozen_fraction.compute()
    for name in ("dead", "live", "all"):
        half = fraction.sel(population=name).dropna("step") >= 0.5
        passed = half.step[1:][half.values[1:] != half.values[:-1]].values
        expected = passed[0] if passed.size else -1
        assert frozen.first_crossing.sel(population=name).values.tolist() == [expected]
    assert analysis.crossings(ds, "loss").first_crossing.values.tolist() == [6, 10, 11]
    falling = analysis.crossings(ds, "loss", [5, 3.5, 2, 0], "value")
    assert falling.first_crossing.values.tolist() == [-1, 2, 8, -1]
    counts = analysis.crossings(ds, analysis.regimes(ds).counts, 1, "value")
    assert counts.first_crossing.dims == ("level", "population", "regime_name")
    again = compute_named(ds, ["crossings"], ["quantity=loss", "levels=0.5,0.9"])
    assert again.first_crossing.values.tolist() == [6, 10]


def test_a_wrong_quantity_or_level_is_refused(make_run, walk) -> None:
    ds = make_run(walk(4, 3, 2))
    for quantity, message in (
        ("sun", "got quantity='sun'"),
        ("freeze", r"freeze\.frozen_fraction"),
        ("freeze.sun", r"freeze\.unchanged_fraction"),
        ("displacement.sun", "expected displacement$"),
        ("lifecycle.last_jump", "expected lifecycle$"),
        (ds.W.isel(step=0), "along step"),
    ):
        with pytest.raises(InvalidArgument, match=message):
            analysis.crossings(ds, quantity)
    with pytest.raises(InvalidArgument, match="levels="):
        analysis.crossings(ds, levels=[np.nan])


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


@pytest.mark.parametrize("freeze", [True, False])
def test_a_clean_run_has_no_discontinuity(freeze, make_run):
    ds = make_run(history(freeze=freeze), native="float32")
    got = analysis.discontinuities(ds).compute()
    assert not got.discontinuity.any()
    assert abs(got.discontinuity_score).max() < 5


@pytest.mark.parametrize("at", [20, ROWS - 3])
def test_a_bad_checkpoint_is_found_where_it_is(at, make_run):
    ds = make_run(history(kick=5e-4, at=at), native="float32", chunks=(17, 9, -1))
    got = analysis.discontinuities(ds).compute()
    assert got.step.values[got.discontinuity.values].tolist() == [at]


def test_a_step_that_was_lost_is_found(make_run):
    W = history(freeze=False)
    W[120:] += W[40] - W[100]  # the state jumps back
    got = analysis.discontinuities(make_run(W, native="float32")).compute()
    assert 120 in got.step.values[got.discontinuity.values]


def test_one_moving_element_is_no_discontinuity(make_run):
    W = history()
    W[100:] = W[99]
    W[150:, 0, 0] += 1e-6
    got = analysis.discontinuities(make_run(W, native="float32")).compute()
    assert 150 not in got.step.values[got.discontinuity.values]
    still = make_run(np.ones((30, 4, 2), np.float32), native="float32")
    assert not analysis.discontinuities(still).discontinuity.any()


def test_a_mean_of_nan_is_a_discontinuity_where_it_begins(make_run):
    W = history(freeze=False)
    W[90:, 3] = np.nan
    got = analysis.discontinuities(make_run(W, native="float32")).compute()
    assert got.step.values[got.discontinuity.values].tolist() == [90]


def test_few_rows_are_no_neighborhood(make_run, walk):
    assert analysis.discontinuities(make_run(walk(4, 3, 2))).discontinuity_score.isnull().all()
