from __future__ import annotations

import numpy as np
import pytest
import xarray as xr

from trajstore import analysis
from trajstore.errors import InvalidArgument, VariableNotRecorded


@pytest.fixture(params=["wandering", "one token", "one step", "not finite"])
def run(request, make_run, walk) -> xr.Dataset:
    bits = walk(9, 7, 4)
    if request.param == "one token":
        bits = bits[:, :1]
    elif request.param == "one step":
        bits = bits[:1]
    elif request.param == "not finite":
        bits[2, 1, 0] = 0x7FC0
    return make_run(bits, steps=np.arange(len(bits)) * 2, chunks=(4, 3, -1))


def test_projection_on_given_axes(run: xr.Dataset) -> None:
    W = run.W.values.astype(np.float64)
    axes = np.array([[1.0, 2, 0, -1], [1, 2, 0, -1.5], [2, 4, 0, -2]])  # axes 0 and 2 are parallel
    got = analysis.projection(run, axes).compute()
    with np.errstate(invalid="ignore"):
        along = W @ (axes / np.linalg.norm(axes, axis=1, keepdims=True)).T
        Q, _ = np.linalg.qr(axes[:2].T)
        across = np.linalg.norm(W - W @ Q @ Q.T, axis=-1)
    np.testing.assert_allclose(got.projection, along, rtol=1e-9, atol=1e-15)
    np.testing.assert_allclose(got.across, across, rtol=1e-7, atol=1e-12)


def test_projection_on_an_axis_of_each_step(run: xr.Dataset) -> None:
    W = run.W.values.astype(np.float64)
    mean = W.mean(1)
    got = analysis.projection(run).compute()
    with np.errstate(invalid="ignore"):
        along = np.einsum("sth,sh->st", W, mean / np.linalg.norm(mean, axis=1, keepdims=True))
    np.testing.assert_allclose(got.projection.sel(axis="centroid"), along, rtol=1e-9)
    h = run.assign(hidden_mean=(("step", "hidden"), mean))
    h.hidden_mean[0] = np.nan
    reported = analysis.projection(h, "hidden_mean").compute()
    assert reported.projection[0].isnull().all()
    np.testing.assert_allclose(reported.projection[1:], got.projection[1:], rtol=1e-9)
    given = analysis.projection(run, h.hidden_mean.drop_vars("step")).compute()
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
    with pytest.raises(VariableNotRecorded, match="hidden_mean"):
        analysis.projection(ds, "hidden_mean")
