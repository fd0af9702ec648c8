from __future__ import annotations

import numpy as np
import pytest
import xarray as xr

from trajstore import analysis
from trajstore.errors import InvalidArgument, StepNotFound


@pytest.fixture
def run(make_run, walk):
    bits = walk(8, 6, 3)
    bits[:, 4] = 0x8000  # without direction
    bits[3:, 5, 1] = 0x7FC0
    rng = np.random.default_rng(5)
    grad = rng.normal(size=bits.shape).astype(np.float32)
    grad[0] = np.nan
    ds = make_run(bits, grad=grad, is_dead=np.arange(6) % 2 == 0, chunks=(4, 3, -1))
    return ds.assign(hidden_mean=(("step", "hidden"), rng.normal(size=(8, 3)).astype("f4")))


def vectors(ds, name, of=None):
    W = ds.W.values.astype(np.float64)
    if name == "delta":
        return np.concatenate([np.full((1, *W.shape[1:]), np.nan), np.diff(W, axis=0)])
    if name == "previous":
        earlier = vectors(ds, of)[:-1]
        return np.concatenate([np.full((1, *W.shape[1:]), np.nan), earlier])
    if name == "centroid":
        return np.broadcast_to(W.mean(1, keepdims=True), W.shape)
    if name == "bulk":
        return np.broadcast_to(vectors(ds, "delta").mean(1, keepdims=True), W.shape)
    if name == "hidden_mean":
        return np.broadcast_to(ds.hidden_mean.values[:, None].astype(np.float64), W.shape)
    return ds[name].values.astype(np.float64)


@pytest.mark.parametrize(
    ("of", "other"),
    [("W", other) for other in ("hidden_mean", "centroid", "bulk", "grad", "delta", "previous")]
    + [("delta", "grad"), ("grad", "previous"), ("delta", "delta")],
)
def test_alignment_equals_a_plain_computation(of, other, run):
    if of == other:
        with pytest.raises(InvalidArgument, match="two different vectors"):
            analysis.alignment(run, other, of)
        return
    got = analysis.alignment(run, other, of, quantiles=[0.5, 1]).compute(scheduler="sync")
    one, second = vectors(run, of), vectors(run, other, of)
    with np.errstate(all="ignore"):
        expected = (one * second).sum(-1) / np.linalg.norm(one, axis=-1)
        expected /= np.linalg.norm(second, axis=-1)
    np.testing.assert_allclose(got.cosine, expected, rtol=1e-9, atol=1e-12)
    turned = np.degrees(np.arccos(np.clip(expected, -1, 1)))
    np.testing.assert_allclose(got.angle, turned, atol=1e-5)
    dead = run.is_dead.values
    for name, group in {"dead": dead, "live": ~dead, "all": dead | True}.items():
        for row, cosines in enumerate(expected[:, group]):
            reported = got.sel(population=name).isel(step=row)
            known = cosines[~np.isnan(cosines)]
            assert reported.aligned_tokens == known.size
            if known.size:
                np.testing.assert_allclose(reported.alignment, known.mean(), atol=1e-12)
                quantiles = [np.median(known), known.max()]
                np.testing.assert_allclose(reported.alignment_quantiles, quantiles, atol=1e-12)
            else:
                assert reported.alignment.isnull()


def test_the_centroid_of_a_population(run):
    run = run.isel(token=slice(0, 4))
    got = analysis.alignment(run, population="dead").compute()
    W = run.W.values.astype(np.float64)
    mean = W[:, ::2].mean(1)
    cosine = np.einsum("sth,sh->st", W, mean) / np.linalg.norm(W, axis=-1)
    cosine /= np.linalg.norm(mean, axis=-1)[:, None]
    np.testing.assert_allclose(got.cosine, cosine, rtol=1e-9)
    np.testing.assert_allclose(got.alignment, cosine[:, ::2].mean(1), rtol=1e-9)


def test_a_wrong_vector_or_quantile_is_refused(run):
    with pytest.raises(InvalidArgument, match="other='sun'"):
        analysis.alignment(run, "sun")
    with pytest.raises(InvalidArgument, match="quantiles"):
        analysis.alignment(run, quantiles=[2])


@pytest.fixture(params=["wandering", "one token", "one step", "not finite"])
def projected_run(request, make_run, walk) -> xr.Dataset:
    bits = walk(9, 7, 4)
    if request.param == "one token":
        bits = bits[:, :1]
    elif request.param == "one step":
        bits = bits[:1]
    elif request.param == "not finite":
        bits[2, 1, 0] = 0x7FC0
    return make_run(bits, steps=np.arange(len(bits)) * 2, chunks=(4, 3, -1))


def test_projection_on_given_axes(projected_run: xr.Dataset) -> None:
    W = projected_run.W.values.astype(np.float64)
    axes = np.array([[1.0, 2, 0, -1], [1, 2, 0, -1.5], [2, 4, 0, -2]])  # axes 0 and 2 are parallel
    got = analysis.projection(projected_run, axes).compute()
    with np.errstate(invalid="ignore"):
        along = W @ (axes / np.linalg.norm(axes, axis=1, keepdims=True)).T
        Q, _ = np.linalg.qr(axes[:2].T)
        across = np.linalg.norm(W - W @ Q @ Q.T, axis=-1)
    np.testing.assert_allclose(got.projection, along, rtol=1e-9, atol=1e-15)
    np.testing.assert_allclose(got.across, across, rtol=1e-7, atol=1e-12)


def test_projection_on_an_axis_of_each_step(projected_run: xr.Dataset) -> None:
    W = projected_run.W.values.astype(np.float64)
    mean = W.mean(1)
    got = analysis.projection(projected_run).compute()
    with np.errstate(invalid="ignore"):
        along = np.einsum("sth,sh->st", W, mean / np.linalg.norm(mean, axis=1, keepdims=True))
    np.testing.assert_allclose(got.projection.sel(axis="centroid"), along, rtol=1e-9)
    h = projected_run.assign(hidden_mean=(("step", "hidden"), mean))
    h.hidden_mean[0] = np.nan
    reported = analysis.projection(h, "hidden_mean").compute()
    assert reported.projection[0].isnull().all()
    np.testing.assert_allclose(reported.projection[1:], got.projection[1:], rtol=1e-9)
    given = analysis.projection(projected_run, h.hidden_mean.drop_vars("step")).compute()
    np.testing.assert_array_equal(given.across, reported.across)


def test_an_axis_of_no_length_has_no_direction(make_run, walk) -> None:
    got = analysis.projection(make_run(walk(2, 3, 4)), np.zeros(4)).compute()
    assert got.projection.isnull().all()
    assert got.across.isnull().all()


def test_wrong_axes_are_refused(make_run, walk) -> None:
    ds = make_run(walk(3, 4, 2))
    with pytest.raises(InvalidArgument, match="axes='centre'"):
        analysis.projection(ds, "centre")
    with pytest.raises(InvalidArgument, match=r"shape \(3,\)"):
        analysis.projection(ds, [1, 2, 3])
    with pytest.raises(InvalidArgument, match="hidden=2"):
        analysis.projection(ds, xr.DataArray([1.0, 2, 3], dims="hidden"))


@pytest.mark.parametrize(
    ("axis", "of"), [("centroid", "W"), ("hidden_mean", "W"), ("centroid", "displacement")]
)
def test_sky_equals_a_plain_computation(axis, of, make_run, walk):
    dead = np.arange(7) % 3 == 0
    bits = walk(9, 7, 5)
    bits[:, 6] = 0
    ds = make_run(bits, is_dead=dead, chunks=(4, 3, -1))
    mean = np.random.default_rng(2).normal(size=(9, 5)).astype("f4")
    mean[0] = np.nan
    ds = ds.assign(hidden_mean=(("step", "hidden"), mean))
    got = analysis.sky(ds, axis, of, "dead").compute(scheduler="sync")
    W = ds.W.values.astype(np.float64)
    own = W[:, dead].reshape(-1, 5)
    pole = own.mean(0) if axis == "centroid" else np.nanmean(mean.astype(np.float64), 0)
    pole /= np.linalg.norm(pole)
    across = own - own @ pole[:, None] * pole
    _, vectors = np.linalg.eigh(np.cov(across.T))
    W = W - W[0] if of == "displacement" else W
    x, y = W @ vectors[:, -1], W @ vectors[:, -2]
    with np.errstate(invalid="ignore"):
        latitude = 90 - np.degrees(np.arccos(W @ pole / np.linalg.norm(W, axis=-1)))
    np.testing.assert_allclose(got.latitude, latitude, atol=1e-5)
    signs = np.sign((got.sky_axes.values[1:] * vectors[:, [-1, -2]].T).sum(-1))
    longitude = np.degrees(np.arctan2(y * signs[1], x * signs[0]))
    moving = np.linalg.norm(W, axis=-1) > 0
    np.testing.assert_allclose(got.longitude.values[moving], longitude[moving], atol=1e-6)
    assert np.isnan(got.longitude.values[~moving]).all()


def test_a_sky_of_two_dimensions_is_refused(make_run, walk):
    ds = make_run(walk(3, 4, 3))
    with pytest.raises(InvalidArgument, match="at least 3 dimensions, got 2"):
        analysis.sky(ds.isel(hidden=slice(2)))


@pytest.fixture(params=["wandering", "collapsed", "one token", "one step", "not finite"])
def form(request, make_run, walk) -> xr.Dataset:
    bits = walk(9, 7, 4)
    if request.param == "collapsed":
        bits[3:, :5] = bits[3:, :1]
        bits[:, 5] = 0x8000
    elif request.param == "one token":
        bits = bits[:, :1]
    elif request.param == "one step":
        bits = bits[:1]
    elif request.param == "not finite":
        bits[2, 1, 0] = 0x7FC0
    dead = np.arange(bits.shape[1]) % 3 != 1
    return make_run(bits, is_dead=dead, steps=np.arange(len(bits)) * 2, chunks=(4, 3, -1))


def spectrum_of(vectors: np.ndarray) -> np.ndarray:
    if not len(vectors) or not np.isfinite(vectors).all():
        return np.full(vectors.shape[1], np.nan)
    about = vectors - vectors.mean(0)
    return np.linalg.svd(about.T @ about / len(vectors), compute_uv=False)


def rank_of(spectrum: np.ndarray) -> float:
    share = spectrum[spectrum > 1e-18 * spectrum.max(initial=0)] / spectrum.sum()
    return np.exp(-(share * np.log(share)).sum()) if share.size else np.nan


@pytest.mark.parametrize("basis", ["all", "last", 0])
def test_pca(form: xr.Dataset, basis: str | int) -> None:
    W = form.W.values.astype(np.float64)
    rows = {"all": W, "last": W[-1:], 0: W[:1]}[basis]
    for population, members in (("dead", form.is_dead.values), ("all", form.is_dead.values | True)):
        got = analysis.pca(form, population, 2, basis).compute()
        vectors = rows[:, members].reshape(-1, W.shape[2])
        vectors = vectors[np.isfinite(vectors).all(1)]  # others are excluded
        expected = spectrum_of(vectors)
        scale = np.nan_to_num(expected).max()
        np.testing.assert_allclose(got.spectrum, expected, rtol=1e-9, atol=1e-13 * scale)
        np.testing.assert_allclose(got.basis_mean, vectors.mean(0), rtol=1e-12)
        np.testing.assert_allclose(
            got.basis @ got.basis.T.rename(component="other"), np.eye(2), atol=1e-12
        )
        scores = (W - vectors.mean(0)) @ got.basis.values.T
        np.testing.assert_allclose(got.scores, scores, rtol=1e-5, atol=1e-8)
        spread = (scores if basis == "all" else scores[[-1 if basis == "last" else 0]])[:, members]
        np.testing.assert_allclose(
            np.nanvar(spread.reshape(-1, 2), 0), expected[:2], rtol=1e-6, atol=1e-12 * scale
        )
        if scale:
            np.testing.assert_allclose(got.effective_rank, rank_of(expected), rtol=1e-6)
            square = expected.sum() ** 2 / (expected**2).sum()
            np.testing.assert_allclose(got.participation_ratio, square, rtol=1e-9)
        else:
            assert got.effective_rank.isnull()


def test_the_first_axis_is_that_of_the_mean_hidden_state(form: xr.Dataset) -> None:
    states = np.random.default_rng(2).normal(size=(form.sizes["step"], 4)) + 1
    states[0, :] = np.nan if len(states) > 1 else 1
    seen = form.assign(hidden_mean=(("step", "hidden"), states)).chunk()
    got = analysis.pca(seen, components=2, first="hidden_mean").compute()
    vectors = form.W.values.astype(np.float64).reshape(-1, 4)
    vectors = vectors[np.isfinite(vectors).all(1)] - got.basis_mean.values
    mean = np.nanmean(states, 0)
    direction = mean / np.linalg.norm(mean)
    np.testing.assert_allclose(got.basis[0], direction)
    across = vectors - np.outer(vectors @ direction, direction)
    expected = [np.square(vectors @ direction).mean(), *spectrum_of(across)[:3]]
    np.testing.assert_allclose(got.spectrum, expected, rtol=1e-6, atol=1e-9)
    np.testing.assert_allclose(got.basis[1] @ got.basis[0], 0, atol=1e-9)
    whole = analysis.pca(form, components=2).spectrum.sum()
    np.testing.assert_allclose(got.spectrum.sum(), whole, rtol=1e-9)


def test_inertia(form: xr.Dataset) -> None:
    got = analysis.inertia(form).compute()
    dead = form.is_dead.values
    for population, members in {"dead": dead, "live": ~dead, "all": dead | True}.items():
        one = got.sel(population=population)
        for row, W in enumerate(form.W.values.astype(np.float64)):
            expected = spectrum_of(W[members])
            scale = np.nan_to_num(expected).max()
            np.testing.assert_allclose(one.inertia[row], expected, rtol=1e-9, atol=1e-13 * scale)
            if scale:
                np.testing.assert_allclose(one.inertia_rank[row], rank_of(expected), rtol=1e-6)
            else:
                assert one.inertia_rank[row].isnull()


def test_a_population_without_tokens_has_no_axes(make_run, walk) -> None:
    ds = make_run(walk(3, 4, 2), is_dead=np.zeros(4, bool))
    assert analysis.pca(ds, "dead", 2).isnull().all().to_array().all()


def test_wrong_components_and_bases_are_refused(make_run, walk) -> None:
    ds = make_run(walk(3, 4, 2))
    for options, message in (
        ({"components": 3}, "components=3, expected 1 to 2"),
        ({"components": 1, "basis": "first"}, "basis='first'"),
        ({"components": 1, "population": "dead"}, "the coordinate is_dead is missing"),
    ):
        with pytest.raises(InvalidArgument, match=message):
            analysis.pca(ds, **options)
    with pytest.raises(StepNotFound):
        analysis.pca(ds, components=1, basis=99)
