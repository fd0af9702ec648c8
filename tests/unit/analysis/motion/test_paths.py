from __future__ import annotations

import numpy as np
import pytest
import xarray as xr

from trajstore import analysis
from trajstore.errors import InvalidArgument


@pytest.fixture
def run(bits, chunks, make_run):
    dead = np.arange(bits.shape[1]) % 3 != 1
    steps = np.cumsum(1 + np.arange(len(bits)) % 3)
    return make_run(bits, steps=steps, is_dead=dead, chunks=chunks)


@pytest.mark.parametrize("window", [None, 4])
def test_path_efficiency(window, run):
    if window is not None and window > max(run.sizes["step"] - 1, 1):
        with pytest.raises(InvalidArgument, match=f"window={window}, expected 1 to"):
            analysis.path_efficiency(run, window)
        return
    got = analysis.path_efficiency(run, window).compute(scheduler="sync")
    W, steps = run.W.values.astype(np.float64), run.step.values
    length = window or max(len(W) - 1, 1)
    starts = range(0, len(W) - 1, length)
    assert got.sizes["window"] == len(starts)
    for number, start in enumerate(starts):
        part = W[start : start + length + 1]
        one = got.isel(window=number)
        assert (one.window_start, one.window) == (steps[start], steps[start + len(part) - 1])
        with np.errstate(all="ignore"):
            path = np.linalg.norm(np.diff(part, axis=0), axis=-1).sum(0)
            come = np.linalg.norm(part[-1] - part[0], axis=-1)
            np.testing.assert_allclose(one.path_length, path, rtol=1e-9)
            np.testing.assert_allclose(one.path_efficiency, come / path, rtol=1e-9)


@pytest.mark.parametrize("about", ["origin", "centroid"])
def test_radial_tangential(about, run):
    got = analysis.radial_tangential(run, about, "dead").compute(scheduler="sync")
    W = run.W.values.astype(np.float64)
    with np.errstate(all="ignore"):
        centre = W[:, run.is_dead.values].mean(1, keepdims=True) if about == "centroid" else 0 * W
        place = (W - centre)[:-1]
        way = np.diff(W, axis=0) / np.diff(run.step.values)[:, None, None]
        outward = place / np.linalg.norm(place, axis=-1, keepdims=True)
        along = (way * outward).sum(-1)
        across = np.linalg.norm(way - along[..., None] * outward, axis=-1)
        size = np.linalg.norm(way, axis=-1)
    known = np.isfinite(along) & np.isfinite(across) & (size < 1e30)
    assert (np.isnan(got.radial_speed.values) | known | ~np.isfinite(size) | (size >= 1e30)).all()
    for name, expected in (("radial_speed", along), ("tangential_speed", across)):
        error = np.abs(got[name].values[known] - expected[known])
        assert (error <= 1e-6 * size[known] + 1e-37).all()


def test_a_wrong_window_or_center_is_refused(make_run, walk):
    ds = make_run(walk(4, 3, 2))
    with pytest.raises(InvalidArgument, match="window=0"):
        analysis.path_efficiency(ds, 0)
    with pytest.raises(InvalidArgument, match="'dead'"):
        analysis.radial_tangential(ds, "centroid", "dead")


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
