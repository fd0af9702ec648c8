from __future__ import annotations

import numpy as np
import pytest

from trajstore import analysis
from trajstore.errors import InvalidArgument, VariableNotRecorded


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


def test_a_wrong_axis_or_dimension_is_refused(make_run, walk):
    ds = make_run(walk(3, 4, 3))
    with pytest.raises(InvalidArgument, match="at least 3 dimensions, got 2"):
        analysis.sky(ds.isel(hidden=slice(2)))
    with pytest.raises(VariableNotRecorded, match="hidden_mean"):
        analysis.sky(ds, "hidden_mean")
