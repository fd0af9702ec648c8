from __future__ import annotations

import numpy as np
import pytest

from trajstore import analysis
from trajstore.errors import InvalidArgument


@pytest.fixture
def run(bits, chunks, make_run):
    dead = np.arange(bits.shape[1]) % 3 != 1
    steps = np.cumsum(1 + np.arange(len(bits)) % 3)
    return make_run(bits, steps=steps, is_dead=dead, chunks=chunks)


@pytest.mark.parametrize("window", [None, 1, 4])
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


def test_radial_and_tangential_motion(make_run):
    W = np.array([[[1, 0], [1, 0], [0, 0]], [[3, 0], [1, 2], [1, 1]]], np.float32)
    got = analysis.radial_tangential(make_run(W, native="float32", steps=np.array([0, 2])))
    assert got.radial_speed.values[0, :2].tolist() == [1, 0]
    assert got.tangential_speed.values[0, :2].tolist() == [0, 1]
    assert got.radial_speed[0, 2].isnull()


def test_a_wrong_window_or_center_is_refused(make_run, walk):
    ds = make_run(walk(4, 3, 2))
    with pytest.raises(InvalidArgument, match="window=0"):
        analysis.path_efficiency(ds, 0)
    with pytest.raises(InvalidArgument, match="'dead'"):
        analysis.radial_tangential(ds, "centroid", "dead")
