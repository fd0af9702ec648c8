from __future__ import annotations

import numpy as np
import pytest
import xarray as xr

from trajstore import analysis


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


def vectors(ds, name, of, members):
    def later(values):
        return np.concatenate([np.full((1, *values.shape[1:]), np.nan), values])

    W = ds.W.values.astype(np.float64)
    delta = later(np.diff(W, axis=0))
    if name == "previous":
        return later(vectors(ds, of, None, members)[:-1])
    if name in ("W", "delta"):
        return {"W": W, "delta": delta}[name]
    if name in ("centroid", "bulk"):
        return {"centroid": W, "bulk": delta}[name][:, members].mean(1, keepdims=True)
    values = ds[name].values.astype(np.float64)
    return values[:, None] if name == "hidden_mean" else values


@pytest.mark.parametrize(
    ("of", "other", "population"),
    [
        *(("W", other, None) for other in ("hidden_mean", "bulk", "grad", "delta", "previous")),
        ("W", "centroid", None),
        ("W", "centroid", "dead"),
        ("delta", "grad", None),
        ("grad", "previous", None),
    ],
)
def test_alignment_equals_a_plain_computation(of, other, population, run):
    dead = run.is_dead.values
    groups = {"dead": dead, "live": ~dead, "all": dead | True}
    got = analysis.alignment(run, other, of, population, [0.5, 1]).compute(scheduler="sync")
    one, second = (vectors(run, name, of, groups[population or "all"]) for name in (of, other))
    with np.errstate(all="ignore"):
        expected = (one * second).sum(-1) / np.linalg.norm(one, axis=-1)
        expected /= np.linalg.norm(second, axis=-1)
    np.testing.assert_allclose(got.cosine, expected, rtol=1e-9, atol=1e-12)
    turned = np.degrees(np.arccos(np.clip(expected, -1, 1)))
    np.testing.assert_allclose(got.angle, turned, atol=1e-5)
    for name in [population] if population else groups:
        of_population = got if population else got.sel(population=name)
        for row, cosines in enumerate(expected[:, groups[name]]):
            reported = of_population.isel(step=row)
            known = cosines[~np.isnan(cosines)]
            assert reported.aligned_tokens == known.size
            if known.size:
                np.testing.assert_allclose(reported.alignment, known.mean(), atol=1e-12)
                quantiles = [np.median(known), known.max()]
                np.testing.assert_allclose(reported.alignment_quantiles, quantiles, atol=1e-12)
            else:
                assert reported.alignment.isnull()


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


def test_projection(form: xr.Dataset) -> None:
    W = form.W.values.astype(np.float64)
    axes = np.array([[1.0, 2, 0, -1], [1, 2, 0, -1.5], [2, 4, 0, -2]])  # axes 0 and 2 are parallel
    got = analysis.projection(form, axes).compute()
    mean = W.mean(1)
    with np.errstate(invalid="ignore"):
        along = W @ (axes / np.linalg.norm(axes, axis=1, keepdims=True)).T
        Q, _ = np.linalg.qr(axes[:2].T)
        across = np.linalg.norm(W - W @ Q @ Q.T, axis=-1)
        along_mean = np.einsum("sth,sh->st", W, mean / np.linalg.norm(mean, axis=1, keepdims=True))
    np.testing.assert_allclose(got.projection, along, rtol=1e-9, atol=1e-15)
    np.testing.assert_allclose(got.across, across, rtol=1e-7, atol=1e-12)
    got = analysis.projection(form).compute()
    np.testing.assert_allclose(
        got.projection.sel(axis="centroid"), along_mean, rtol=1e-9, atol=1e-18
    )
    mean[0] = np.nan
    seen = form.assign(hidden_mean=(("step", "hidden"), mean))
    for axis in ("hidden_mean", seen.hidden_mean.drop_vars("step")):
        of_state = analysis.projection(seen, axis).compute()
        for name in ("projection", "across"):
            assert of_state[name][0].isnull().all()
            np.testing.assert_allclose(of_state[name][1:], got[name][1:], rtol=1e-9)
    assert analysis.projection(form, np.zeros(4)).isnull().all().to_array().all(), "no direction"


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


def spectrum_of(vectors: np.ndarray) -> np.ndarray:
    if not len(vectors) or not np.isfinite(vectors).all():
        return np.full(vectors.shape[1], np.nan)
    about = vectors - vectors.mean(0)
    return np.linalg.svd(about.T @ about / len(vectors), compute_uv=False)


def rank_of(spectrum: np.ndarray) -> float:
    share = spectrum[spectrum > 1e-18 * spectrum.max(initial=0)] / spectrum.sum()
    return np.exp(-(share * np.log(share)).sum()) if share.size else np.nan


@pytest.mark.parametrize(("basis", "population"), [("all", "dead"), ("last", "all"), (0, "dead")])
def test_pca(form: xr.Dataset, basis: str | int, population: str) -> None:
    W = form.W.values.astype(np.float64)
    members = form.is_dead.values | (population == "all")
    got = analysis.pca(form, population, 2, basis).compute()
    vectors = {"all": W, "last": W[-1:], 0: W[:1]}[basis][:, members].reshape(-1, W.shape[2])
    vectors = vectors[np.isfinite(vectors).all(1)]  # others are excluded
    expected = spectrum_of(vectors)
    scale = np.nan_to_num(expected).max()
    np.testing.assert_allclose(got.spectrum, expected, rtol=1e-9, atol=1e-13 * scale)
    np.testing.assert_allclose(got.basis_mean, vectors.mean(0), rtol=1e-12)
    basis_product = got.basis @ got.basis.T.rename(component="other")
    np.testing.assert_allclose(basis_product, np.eye(2), atol=1e-12)
    assert (got.basis.max("hidden") >= -got.basis.min("hidden")).all(), "the largest is positive"
    scores = (W - vectors.mean(0)) @ got.basis.values.T
    np.testing.assert_allclose(got.scores, scores, rtol=1e-5, atol=1e-8)
    spread = (scores if basis == "all" else scores[[-1 if basis == "last" else 0]])[:, members]
    variance = np.nanvar(spread.reshape(-1, 2), 0)
    np.testing.assert_allclose(variance, expected[:2], rtol=1e-6, atol=1e-12 * scale)
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
