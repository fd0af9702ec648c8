from __future__ import annotations

import numpy as np
import pytest
import xarray as xr

from trajstore import analysis
from trajstore.errors import InvalidArgument, StepNotFound, VariableNotRecorded


@pytest.fixture(params=["wandering", "collapsed", "one token", "one step", "not finite"])
def run(request, make_run, walk) -> xr.Dataset:
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
def test_pca(run: xr.Dataset, basis: str | int) -> None:
    W = run.W.values.astype(np.float64)
    rows = {"all": W, "last": W[-1:], 0: W[:1]}[basis]
    for population, members in (("dead", run.is_dead.values), ("all", run.is_dead.values | True)):
        got = analysis.pca(run, population, 2, basis).compute()
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


def test_the_first_axis_is_that_of_the_mean_hidden_state(run: xr.Dataset) -> None:
    states = np.random.default_rng(2).normal(size=(run.sizes["step"], 4)) + 1
    states[0, :] = np.nan if len(states) > 1 else 1
    seen = run.assign(hidden_mean=(("step", "hidden"), states)).chunk()
    got = analysis.pca(seen, components=2, first="hidden_mean").compute()
    vectors = run.W.values.astype(np.float64).reshape(-1, 4)
    vectors = vectors[np.isfinite(vectors).all(1)] - got.basis_mean.values
    mean = np.nanmean(states, 0)
    direction = mean / np.linalg.norm(mean)
    np.testing.assert_allclose(got.basis[0], direction)
    across = vectors - np.outer(vectors @ direction, direction)
    expected = [np.square(vectors @ direction).mean(), *spectrum_of(across)[:3]]
    np.testing.assert_allclose(got.spectrum, expected, rtol=1e-6, atol=1e-9)
    np.testing.assert_allclose(got.basis[1] @ got.basis[0], 0, atol=1e-9)
    whole = analysis.pca(run, components=2).spectrum.sum()
    np.testing.assert_allclose(got.spectrum.sum(), whole, rtol=1e-9)


def test_inertia(run: xr.Dataset) -> None:
    got = analysis.inertia(run).compute()
    dead = run.is_dead.values
    for population, members in {"dead": dead, "live": ~dead, "all": dead | True}.items():
        one = got.sel(population=population)
        for row, W in enumerate(run.W.values.astype(np.float64)):
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
    with pytest.raises(VariableNotRecorded, match="hidden_mean"):
        analysis.pca(ds, components=1, first="hidden_mean")
    with pytest.raises(StepNotFound):
        analysis.pca(ds, components=1, basis=99)
