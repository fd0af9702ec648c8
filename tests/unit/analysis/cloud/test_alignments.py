from __future__ import annotations

import numpy as np
import pytest

from trajstore import analysis
from trajstore.errors import InvalidArgument, VariableNotRecorded


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


@pytest.mark.parametrize("of", ["W", "delta", "grad"])
@pytest.mark.parametrize("other", ["hidden_mean", "centroid", "bulk", "grad", "delta", "previous"])
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
    with pytest.raises(VariableNotRecorded, match="hidden_mean"):
        analysis.alignment(run.drop_vars("hidden_mean"), "hidden_mean")
    with pytest.raises(VariableNotRecorded, match="grad"):
        analysis.alignment(run.drop_vars("grad"), "grad")
