from __future__ import annotations

from collections import Counter

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
            squares = np.square(np.diff(part, axis=0)).sum((0, -1))
            np.testing.assert_allclose(one.walk_ratio, come / np.sqrt(squares), rtol=1e-9)
            first, last = np.linalg.norm(part[[0, -1]], axis=-1)
            np.testing.assert_allclose(one.norm_change, last - first, rtol=1e-9, atol=1e-12)


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


@pytest.fixture
def populated(bits, chunks, make_run):
    dead = np.arange(bits.shape[1]) % 3 != 1
    steps = np.cumsum(1 + np.arange(len(bits)) % 3)
    ds = make_run(bits, steps=steps, is_dead=dead, chunks=chunks)
    return ds, {"dead": dead, "live": ~dead, "all": dead | True}


def test_centroid(populated):
    ds, populations = populated
    got = analysis.centroid(ds).compute()
    W = ds.W.values.astype(np.float64)
    for name, members in populations.items():
        one = got.sel(population=name)
        if not members.any():
            assert all(one[fact].isnull().all() for fact in one)
            continue
        with np.errstate(all="ignore"):
            centre = W[:, members].mean(1)
            radii = np.linalg.norm(W[:, members] - centre[:, None], axis=-1)
            drift = np.linalg.norm(np.diff(centre, axis=0), axis=-1) / np.diff(ds.step.values)
            expected = {
                "centroid": centre,
                "centroid_norm": np.linalg.norm(centre, axis=-1),
                "mean_radius": radii.mean(1),
                "max_radius": radii.max(1),
                "drift": np.append(np.nan, drift),
            }
        for fact, values in expected.items():
            np.testing.assert_allclose(one[fact], values, rtol=1e-9, atol=1e-300, err_msg=fact)


def test_bulk_and_thermal(populated):
    ds, populations = populated
    got = analysis.bulk_thermal(ds).compute()
    with np.errstate(all="ignore"):
        velocity = np.diff(ds.W.values.astype(np.float64), axis=0)
        velocity /= np.diff(ds.step.values)[:, None, None]
    for name, members in populations.items():
        if not members.any():
            assert got.bulk_speed.sel(population=name).isnull().all()
            continue
        one = got.sel(population=name)
        with np.errstate(all="ignore"):
            bulk = velocity[:, members].mean(1)
            about = velocity[:, members] - bulk[:, None]
            thermal = np.sqrt((about**2).sum(-1).mean(1))
            speed = np.linalg.norm(bulk, axis=-1)
            ratio = speed / thermal
            square = (velocity[:, members] ** 2).sum(-1).mean(1)
        np.testing.assert_allclose(one.bulk_velocity, bulk, rtol=1e-9)
        np.testing.assert_allclose(one.bulk_speed, speed, rtol=1e-9)
        np.testing.assert_allclose(one.thermal_speed, thermal, rtol=1e-9, atol=1e-300)
        np.testing.assert_allclose(one.bulk_thermal_ratio, ratio, rtol=1e-6)
        finite = np.isfinite(square)
        np.testing.assert_allclose(
            (one.bulk_speed**2 + one.thermal_speed**2).values[finite], square[finite], rtol=1e-9
        )


def test_coherence(populated):
    ds, populations = populated
    got = analysis.coherence(ds).compute()
    with np.errstate(all="ignore"):
        ways = np.diff(ds.W.values.astype(np.float64), axis=0)
    for name, members in populations.items():
        for row, way in enumerate(ways[:, members]):
            with np.errstate(all="ignore"):
                mean = way.mean(0) if members.any() else np.zeros(way.shape[1])
                moving = way[np.linalg.norm(way, axis=-1) != 0]
                cosines = [
                    token @ mean / np.linalg.norm(token) / np.linalg.norm(mean) for token in moving
                ]
            expected = np.mean(cosines) if cosines and np.linalg.norm(mean) else np.nan
            np.testing.assert_allclose(got.sel(population=name)[row], expected, rtol=1e-9)


def test_distinct(populated):
    ds, populations = populated
    got = analysis.distinct(ds).compute()
    W = ds.W.values
    for name, members in populations.items():
        for row in range(len(W)):
            counts = Counter(token.tobytes() for token in W[row, members])
            one = got.sel(population=name).isel(step=row)
            assert one.distinct == len(counts)
            assert one.most_common == max(counts.values(), default=0)


def test_one_population(make_run, walk):
    ds = make_run(walk(6, 5, 4), is_dead=np.arange(5) < 2)
    whole = analysis.centroid(ds).compute()
    dead = analysis.centroid(ds, "dead").compute()
    assert "population" not in dead.dims
    np.testing.assert_array_equal(dead.centroid_norm, whole.centroid_norm.sel(population="dead"))
    with pytest.raises(InvalidArgument, match="'undead'"):
        analysis.centroid(ds, "undead")
    with pytest.raises(InvalidArgument, match="is_dead"):
        analysis.coherence(ds.drop_vars("is_dead"), "dead")
    assert analysis.coherence(ds.drop_vars("is_dead"), "all").sizes["step"] == 5


@pytest.mark.parametrize("of", ["centroid", "displacement"])
def test_against_pairs_of_centroids(of, make_run, walk):
    dead = np.arange(7) % 3 == 0
    ds = make_run(walk(9, 7, 5), is_dead=dead, chunks=(4, 3, -1))
    W = ds.W.values.astype(np.float64)
    means = {"dead": W[:, dead].mean(1), "live": W[:, ~dead].mean(1), "all": W.mean(1)}
    if of == "displacement":
        means = {name: mean - mean[0] for name, mean in means.items()}
    got = analysis.separation(ds, of).compute()
    for one, x in means.items():
        for other, y in means.items():
            pair = got.sel(population=one, other_population=other)
            np.testing.assert_allclose(pair.separation, np.linalg.norm(x - y, axis=-1), atol=1e-15)
            with np.errstate(invalid="ignore"):
                lengths = np.linalg.norm(x, axis=-1) * np.linalg.norm(y, axis=-1)
                cosine = np.clip((x * y).sum(-1) / lengths, -1, 1)
                direction = x / np.linalg.norm(x, axis=-1)[:, None]
            np.testing.assert_allclose(
                pair.separation_angle, np.degrees(np.arccos(cosine)), atol=1e-5
            )
            np.testing.assert_allclose(pair.direction, direction, atol=1e-12)
