"""The plane is that of a singular value decomposition, or holds the mean hidden state."""

from __future__ import annotations

import numpy as np
import pytest

import analysis
from trajstore.errors import InvalidArgument, VariableNotRecorded


@pytest.mark.parametrize("chunks", [None, (6, 4, 3)])
def test_principal_components(chunks, make_run, walk):
    ds = make_run(walk(23, 11, 6), chunks=chunks)
    W = ds.W.values.astype(np.float64)
    away = W - W.mean((0, 1))
    _, spread, axes = np.linalg.svd(away.reshape(-1, 6), full_matrices=False)
    found = analysis.principal_plane(ds).compute()
    np.testing.assert_allclose(found.share, (spread**2 / (spread**2).sum())[:2])
    np.testing.assert_allclose(abs(found.axes.values @ axes[:2].T), np.eye(2), atol=1e-10)
    np.testing.assert_allclose(found.origin, W.mean((0, 1)))
    np.testing.assert_allclose(found.position, away @ found.axes.values.T, atol=1e-7)
    longest = np.take_along_axis(found.axes.values, abs(found.axes.values).argmax(1)[:, None], 1)
    assert (longest > 0).all()


def test_the_plane_of_the_mean_hidden_state(make_run, walk):
    ds = make_run(walk(23, 11, 6))
    state = np.random.default_rng(2).normal(size=(23, 6)) + 1
    state[0] = np.nan
    found = analysis.principal_plane(
        ds.assign(hidden_mean=(("step", "hidden"), state)), "hidden_mean"
    ).compute()
    mean = np.nanmean(state, 0)
    np.testing.assert_allclose(abs(found.axes.values[0] @ (mean / np.linalg.norm(mean))), 1)
    np.testing.assert_allclose(found.axes.values[0] @ found.axes.values[1], 0, atol=1e-12)


def test_vectors_that_are_not_finite_have_no_part_in_it(make_run, walk):
    ds = make_run(walk(23, 11, 6))
    broken = ds.assign(W=ds.W.where(ds.token != ds.token[4]))
    found = analysis.principal_plane(broken).compute()
    kept = analysis.principal_plane(ds.isel(token=[*range(4), *range(5, 11)])).compute()
    np.testing.assert_allclose(found.axes, kept.axes, atol=1e-12)
    assert np.isnan(found.position[:, 4]).all()
    nothing = analysis.principal_plane(ds.assign(W=ds.W * np.nan)).compute()
    assert np.isnan(nothing.position).all()


def test_what_it_needs(make_run, walk):
    ds = make_run(walk(4, 3, 1))
    assert analysis.principal_plane(ds).compute().position.shape == (4, 3, 2)
    with pytest.raises(InvalidArgument, match="expected 'principal' or 'hidden_mean'"):
        analysis.principal_plane(ds, "umap")
    with pytest.raises(VariableNotRecorded, match="hidden_mean"):
        analysis.principal_plane(ds, "hidden_mean")
