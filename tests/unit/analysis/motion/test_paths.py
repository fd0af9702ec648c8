from __future__ import annotations

from collections import Counter

import dask
import numpy as np
import pytest
import xarray as xr

from trajstore import analysis
from trajstore.analysis.several_quantities import compute_named
from trajstore.errors import InvalidArgument, VariableNotRecorded


@pytest.fixture
def run(bits, chunks, make_run):
    dead = np.arange(bits.shape[1]) % 3 != 1
    steps = np.cumsum(1 + np.arange(len(bits)) % 3)
    return make_run(bits, grad=bits, steps=steps, is_dead=dead, chunks=chunks)


def populations_of(ds: xr.Dataset) -> dict[str, np.ndarray]:
    dead = ds.is_dead.values
    return {"dead": dead, "live": ~dead, "all": dead | True}


def norm(vectors: np.ndarray, order: float = 2) -> np.ndarray:
    """The direct computation in float64."""
    with np.errstate(all="ignore"):
        wide = np.abs(vectors.astype(np.float64))
        if order == 2:
            return np.sqrt((wide**2).sum(-1)).astype(np.float32)
        return (wide.sum(-1) if order == 1 else wide.max(-1)).astype(np.float32)


@pytest.mark.filterwarnings("error")
def test_motion_and_norms(run):
    W, steps = run.W.values.astype(np.float64), run.step.values
    row = len(W) // 2
    with np.errstate(all="ignore"):
        ways, places = np.diff(W, axis=0), W - W[row]
        velocity = ways / np.diff(steps)[:, None, None]
        expected = {
            "from a step": (analysis.displacement(run, since=int(steps[row])), norm(places)),
            "from the row before": (analysis.displacement(run, since="previous"), norm(ways)),
            "velocity": (analysis.velocity(run), velocity.astype(np.float32)),
            "acceleration": (
                analysis.acceleration(run),
                np.diff(velocity, axis=0).astype(np.float32),
            ),
        }
        for order in (1, 2, np.inf):
            expected[f"order {order}"] = analysis.grad_norms(run, ord=order), norm(W, order)
    for name, (got, values) in expected.items():
        np.testing.assert_array_equal(got, values, err_msg=name)
        assert got.dtype == np.float32
        assert got.step.values.tolist() == steps[len(steps) - len(values) :].tolist()
        assert got.token.values.tolist() == run.token.values.tolist()
    assert expected["velocity"][0].attrs["units"] == "1 per step"
    speed = analysis.speed(run).values
    assert speed.dtype == np.float32
    np.testing.assert_allclose(speed, norm(velocity), rtol=3e-7)


def test_norms_of_float64_are_float64(make_run):
    values = np.random.default_rng(0).normal(size=(6, 5, 4))
    got = analysis.grad_norms(make_run(values, grad=values, native="float64"))
    assert got.dtype == np.float64
    np.testing.assert_allclose(got, np.linalg.norm(values, axis=-1), rtol=1e-15)


def test_stored_norms_of_gradients_agree_to_the_last_bit(make_run, walk):
    ds = make_run(walk(20, 6, 8), grad=walk(20, 6, 8, 1))
    computed = analysis.grad_norms(ds).compute()
    stored = ds.assign(grad_token_norm=computed.rename("grad_token_norm"))
    for held in (stored, stored.drop_vars("grad")):
        xr.testing.assert_identical(analysis.grad_norms(held).compute(), computed)
    with pytest.raises(VariableNotRecorded, match="grad"):
        analysis.grad_norms(held, ord=1)


def test_a_stored_way_is_not_used_where_rows_are_left_out(make_run, walk):
    ds = make_run(walk(21, 6, 8))
    way = analysis.displacement(ds, since="previous").reindex(step=ds.step)
    stored = ds.assign(W_step_norm=way.astype(np.float32))
    for rows in (slice(None), slice(4, 9), slice(None, None, 5), [0, 3, 4, 11]):
        expected = analysis.displacement(ds.isel(step=rows), since="previous")
        got = analysis.displacement(stored.isel(step=rows), since="previous")
        xr.testing.assert_identical(got.compute(), expected.compute())
    only_stored = stored.drop_vars("W").sel(step=slice(3, 9))
    np.testing.assert_array_equal(
        analysis.displacement(only_stored, since="previous"), way.sel(step=slice(4, 9))
    )


@pytest.mark.parametrize("window", [None, 4])
def test_path_efficiency(window, run):
    W, steps = run.W.values.astype(np.float64), run.step.values
    window = window and max(1, min(window, len(W) - 1))
    got = analysis.path_efficiency(run, window).compute(scheduler="sync")
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


LAGS = [1, 2, 5, 10, 20]  # the default; short histories have some of these


@pytest.mark.parametrize("of", ["velocity", "position"])
def test_autocorrelation_equals_a_loop_over_pairs(of, bits, chunks, make_run):
    dead = np.arange(bits.shape[1]) % 3 != 1
    ds = make_run(bits, is_dead=dead, steps=np.arange(len(bits)) * 10, chunks=chunks)
    ds = ds.assign(W=ds.W.where(np.abs(ds.W) < 4).assign_attrs(ds.W.attrs))
    W = ds.W.values.astype(np.float64)
    got = analysis.autocorrelation(ds, of=of).compute(scheduler="sync")
    apart = 10 if len(bits) > 1 else 1
    assert got.lag_steps.values.tolist() == [apart * lag for lag in LAGS]
    with np.errstate(all="ignore"):
        x = np.diff(W, axis=0) if of == "velocity" else W - W.mean(0)
        means = np.full((1 + len(LAGS), len(dead)), np.nan)
        for number, lag in enumerate((0, *LAGS)):
            if len(x) > lag:
                means[number] = (x[: len(x) - lag] * x[lag:]).sum(-1).mean(0)
        expected = means[1:] / np.where(means[0], means[0], np.nan)
    np.testing.assert_allclose(got.token_autocorrelation, expected, rtol=1e-6, atol=1e-9)
    for name, group in populations_of(ds).items():
        together = means[:, group].mean(1) if group.any() else np.full(len(means), np.nan)
        expected = together[1:] / (together[0] or np.nan)
        one = got.autocorrelation.sel(population=name)
        np.testing.assert_allclose(one, expected, rtol=1e-6, atol=1e-9)


def test_what_tokens_do_together(run):
    quantities = (analysis.centroid, analysis.bulk_thermal, analysis.coherence, analysis.distinct)
    got = dask.compute(*(quantity(run) for quantity in quantities))
    for quantity, whole in zip(quantities, got, strict=True):
        xr.testing.assert_equal(quantity(run, "dead"), whole.sel(population="dead"))
    W, elapsed = run.W.values.astype(np.float64), np.diff(run.step.values)
    for name, members in populations_of(run).items():
        centroid, bulk, coherence, distinct = (one.sel(population=name) for one in got)
        counts = [Counter(token.tobytes() for token in row) for row in run.W.values[:, members]]
        assert distinct.distinct.values.tolist() == [*map(len, counts)]
        most = [max(count.values(), default=0) for count in counts]
        assert distinct.most_common.values.tolist() == most
        if not members.any():
            for nothing in (*centroid.values(), bulk.bulk_speed, coherence):
                assert nothing.isnull().all()
            continue
        with np.errstate(all="ignore"):
            own, ways = W[:, members], np.diff(W[:, members], axis=0)
            centre, mean = own.mean(1), ways.mean(1)
            radii = np.linalg.norm(own - centre[:, None], axis=-1)
            velocity = ways / elapsed[:, None, None]
            about = velocity - velocity.mean(1, keepdims=True)
            thermal = np.sqrt((about**2).sum(-1).mean(1))
            speed = np.linalg.norm(velocity.mean(1), axis=-1)
            drift = np.linalg.norm(np.diff(centre, axis=0), axis=-1) / elapsed
            sizes = np.linalg.norm(ways, axis=-1)
            cosines = (ways * mean[:, None]).sum(-1) / sizes
            cosines /= np.linalg.norm(mean, axis=-1)[:, None]
            cosines = np.where(sizes != 0, cosines, 0).sum(1) / (sizes != 0).sum(1)
        for found, values in (
            (centroid.centroid, centre),
            (centroid.centroid_norm, np.linalg.norm(centre, axis=-1)),
            (centroid.mean_radius, radii.mean(1)),
            (centroid.max_radius, radii.max(1)),
            (centroid.drift, np.append(np.nan, drift)),
            (bulk.bulk_velocity, velocity.mean(1)),
            (bulk.bulk_speed, speed),
            (bulk.thermal_speed, thermal),
            (coherence, np.where(mean.any(1), cosines, np.nan)),
        ):
            np.testing.assert_allclose(found, values, rtol=1e-9, atol=1e-300, err_msg=found.name)
        with np.errstate(all="ignore"):
            np.testing.assert_allclose(bulk.bulk_thermal_ratio, speed / thermal, rtol=1e-6)


@pytest.mark.parametrize("of", ["centroid", "displacement"])
def test_separation_of_centroids(of, make_run, walk):
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


DEAD = np.array([True, False, True, True, False, False])


@pytest.fixture(scope="module")
def clustered(make_run, walk):
    """Two dead tokens share a vector from row 2 on, two live ones all their gradients."""
    bits = walk(9, 6, 4)
    bits[2:, 3] = bits[2:, 0]
    bits[5:, 2] = bits[5:, 0]
    rng = np.random.default_rng(7)
    grad = rng.normal(size=bits.shape).astype("f4")
    grad[:, 4] = grad[:, 1]
    grad[0] = np.nan
    mean = rng.normal(size=(9, 4)).astype("f4")
    mean[0] = np.nan
    ds = make_run(bits, grad=grad, is_dead=DEAD, chunks=(4, 3, -1))
    ds.grad.attrs["native_dtype"] = "float32"
    return ds.assign(hidden_mean=(("step", "hidden"), mean, {"units": "1"}))


def test_other_vectors_take_the_place_of_the_weights(clustered):
    W = clustered.W.values.astype(np.float64)
    cluster = np.full((9, 2, 4), np.nan)
    cluster[2:, 0] = W[2:, 0]
    for of, population, expected in (
        ("hidden_mean", None, clustered.hidden_mean.values[1:, None]),
        ("grad", None, clustered.grad.values[1:]),
        ("delta", None, np.diff(W, axis=0)),
        ("centroid", None, np.stack([W[:, DEAD].mean(1), W[:, ~DEAD].mean(1)], 1)),
        ("centroid", "all", W.mean(1, keepdims=True)),
        ("largest_cluster", None, cluster),
    ):
        found = analysis.vectors(clustered, of, population)
        np.testing.assert_allclose(found.W, expected, rtol=1e-12, err_msg=of)
        assert found.step.values.tolist() == list(range(9 - len(expected), 9))
    centroids = analysis.vectors(clustered, "centroid")
    assert centroids.token_text.values.tolist() == ["dead", "live"]
    assert centroids.is_dead.values.tolist() == [True, False]


def test_quantities_of_other_vectors(clustered):
    x = np.diff(clustered.hidden_mean.values[1:].astype(np.float64), axis=0)
    expected = np.mean((x[:-1] * x[1:]).sum(-1)) / np.mean((x**2).sum(-1))
    found = analysis.autocorrelation(analysis.vectors(clustered, "hidden_mean"), 1)
    np.testing.assert_allclose(found.autocorrelation.sel(population="hidden_mean"), [expected])
    counted = compute_named(clustered, ["clusters"], ["population=live"], vectors="grad")
    assert counted.groups.values.tolist() == [1] * 8


def test_invalid_vectors(clustered):
    for of, population, error, message in (
        ("grad", "dead", InvalidArgument, "population='dead' for grad"),
        ("centroid", "undead", InvalidArgument, "population='undead'"),
        ("hidden_means", None, InvalidArgument, "vectors='hidden_means'.*'hidden_mean'"),
        ("exp_avg", None, VariableNotRecorded, "exp_avg"),
        ("hidden_mean", None, VariableNotRecorded, "hidden_mean"),
    ):
        with pytest.raises(error, match=message):
            analysis.vectors(clustered.drop_vars("hidden_mean"), of, population)
    with pytest.raises(InvalidArgument, match="token, hidden, expected step"):
        analysis.displacement(clustered.assign(W=clustered.W.isel(step=0, drop=True)))
