from __future__ import annotations

import numpy as np
import pytest
import xarray as xr

from trajstore import analysis
from trajstore.errors import InvalidArgument

LAGS = [1, 3, 20]  # short histories have some of these


def by_hand(x: np.ndarray, lag: int) -> np.ndarray:
    """Mean scalar product of rows at a lag, (token)."""
    pairs = len(x) - lag
    if pairs <= 0:
        return np.full(x.shape[1], np.nan)
    return (x[: len(x) - lag] * x[lag:]).sum(-1).mean(0)


@pytest.mark.parametrize("of", ["velocity", "position"])
def test_autocorrelation_equals_a_loop_over_pairs(of, bits, chunks, make_run):
    dead = np.arange(bits.shape[1]) % 3 != 1
    ds = make_run(bits, is_dead=dead, steps=np.arange(len(bits)) * 10, chunks=chunks)
    W = ds.W.values.astype(np.float64)
    if np.abs(W[np.isfinite(W)]).max(initial=0) > 1e6:
        ds = ds.assign(W=ds.W.where(np.abs(ds.W) < 4).assign_attrs(ds.W.attrs))
        W = ds.W.values.astype(np.float64)
    largest = len(bits) - (2 if of == "velocity" else 1)
    lags = [lag for lag in LAGS if lag <= largest]
    if len(lags) < len(LAGS):
        with pytest.raises(InvalidArgument, match=rf"expected at most {max(largest, 0)}, "):
            analysis.autocorrelation(ds, LAGS, of)
    if not lags:
        return
    got = analysis.autocorrelation(ds, lags, of).compute(scheduler="sync")
    assert got.lag_steps.values.tolist() == [10 * lag for lag in lags]
    with np.errstate(all="ignore"):
        x = np.diff(W, axis=0) if of == "velocity" else W - W.mean(0)
        means = np.stack([by_hand(x, lag) for lag in (0, *lags)])
        expected = np.where(means[0] > 1e-30, means[1:] / means[0], np.nan)
    known = np.isfinite(expected)
    np.testing.assert_allclose(
        got.token_autocorrelation.values[known], expected[known], rtol=1e-6, atol=1e-9
    )
    assert np.isnan(got.token_autocorrelation.values[:, np.isnan(means[0])]).all()
    with np.errstate(all="ignore"):
        for name, group in {"dead": dead, "live": ~dead, "all": dead | True}.items():
            together = means[:, group].mean(1) if group.any() else np.full(1 + len(lags), np.nan)
            expected = together[1:] / together[0] if together[0] > 1e-30 else together[1:] * np.nan
            one = got.autocorrelation.sel(population=name).values
            if np.isfinite(together[0]) and together[0] > 1e-30:
                np.testing.assert_allclose(one, expected, rtol=1e-6, atol=1e-9)
            elif np.isnan(together[0]):
                assert np.isnan(one).all()


def test_straight_motion_has_autocorrelation_1(make_run):
    W = np.arange(6.0)[:, None, None] * np.ones((1, 2, 3), np.float32)
    got = analysis.autocorrelation(make_run(W.astype(np.float32), native="float32"), 2).compute()
    xr.testing.assert_equal(got.token_autocorrelation, xr.ones_like(got.token_autocorrelation))


def test_uneven_rows_and_wrong_lags_are_refused(make_run, walk):
    ds = make_run(walk(4, 3, 2), steps=np.array([0, 1, 2, 4]))
    with pytest.raises(InvalidArgument, match="evenly spaced rows, got spacings of 1, 2 steps"):
        analysis.autocorrelation(ds)
    ds = ds.isel(step=slice(3))
    usual = analysis.autocorrelation(ds).compute()
    xr.testing.assert_identical(analysis.autocorrelation(ds, [1, 2, 5, 10, 20]).compute(), usual)
    for lags in (0, [1, -2], [], [1.5]):
        with pytest.raises(InvalidArgument, match="lags="):
            analysis.autocorrelation(ds, lags)
