"""Motion and shape of the cloud of any small history, against a few lines of NumPy each.

``TRAJSTORE_EXAMPLES=500`` asks for more histories than the few of every day.
"""

from __future__ import annotations

import os
from typing import Any

import numpy as np
import pytest
import xarray as xr
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from trajstore import analysis
from trajstore.errors import InvalidArgument

# Ties, both zeros, neighbors on the lattice, both signs; NaN only now and then.
VALUES = st.sampled_from([0, 0x8000, 0x3F80, 0x3F80, 0x3F81, 0xBFC0, 0x3E00])
several = settings(
    max_examples=int(os.environ.get("TRAJSTORE_EXAMPLES", "4")),
    deadline=None,
    # The fixture is the same for all histories.
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
)
Wide = np.ndarray[Any, np.dtype[np.float64]]


@st.composite
def histories(draw: st.DrawFn) -> xr.Dataset:
    rows, tokens, hidden = (draw(st.integers(1, most)) for most in (6, 4, 3))
    bits = draw(arrays(np.uint16, (rows, tokens, hidden), elements=VALUES))
    for row in range(1, rows):
        if draw(st.booleans()):  # a step in which some rest
            bits[row, : tokens // 2 + 1] = bits[row - 1, : tokens // 2 + 1]
    if draw(st.integers(0, 3)) == 0:
        bits[draw(st.integers(0, rows - 1)), draw(st.integers(0, tokens - 1)), 0] = 0x7FC0
    W = (bits.astype(np.uint32) << 16).view(np.float32)
    ds = xr.Dataset(
        {"W": (("step", "token", "hidden"), W, {"native_dtype": "bfloat16"})},
        coords={
            "step": np.arange(rows) * draw(st.integers(1, 3)),
            "token": np.arange(tokens),
            "is_dead": ("token", draw(arrays(bool, tokens))),
        },
    )
    return ds.chunk({dim: draw(st.integers(1, size)) for dim, size in ds.sizes.items()})


def values_of(ds: xr.Dataset) -> tuple[Wide, dict[str, np.ndarray[Any, np.dtype[np.bool_]]]]:
    dead = ds.is_dead.values
    return ds.W.values.astype(np.float64), {"dead": dead, "live": ~dead, "all": dead | True}


def spectrum_of(vectors: Wide) -> Wide:
    if not len(vectors) or not np.isfinite(vectors).all():
        return np.full(vectors.shape[1], np.nan)
    about = vectors - vectors.mean(0)
    return np.linalg.svd(about.T @ about / len(vectors), compute_uv=False)


@pytest.fixture(autouse=True)
def _quiet() -> Any:
    with np.errstate(all="ignore"):
        yield


@several
@given(histories(), st.sampled_from([None, 1, 2]))
def test_path_efficiency(ds: xr.Dataset, window: int | None) -> None:
    W, _ = values_of(ds)
    if window is not None and window > max(len(W) - 1, 1):
        with pytest.raises(InvalidArgument, match="expected 1 to 1"):
            analysis.path_efficiency(ds, window)
        return
    got = analysis.path_efficiency(ds, window).compute(scheduler="sync")
    length = window or max(len(W) - 1, 1)
    starts = range(0, len(W) - 1, length)
    assert got.sizes["window"] == len(starts)
    for number, start in enumerate(starts):
        part = W[start : start + length + 1]
        path = np.linalg.norm(np.diff(part, axis=0), axis=-1).sum(0)
        come = np.linalg.norm(part[-1] - part[0], axis=-1)
        np.testing.assert_allclose(got.path_length[number], path, rtol=1e-12)
        np.testing.assert_allclose(got.path_efficiency[number], come / path, rtol=1e-12)


@several
@given(histories(), st.sampled_from(["origin", "centroid"]))
def test_radial_tangential(ds: xr.Dataset, about: str) -> None:
    got = analysis.radial_tangential(ds, about, "dead").compute(scheduler="sync")
    W, masks = values_of(ds)
    dead = masks["dead"]
    centre = W[:, dead].sum(1, keepdims=True) / dead.sum() if about == "centroid" else 0 * W
    place = (W - centre)[:-1]
    way = np.diff(W, axis=0) / np.diff(ds.step.values)[:, None, None]
    far = np.linalg.norm(place, axis=-1) > 1e-9  # or rounding says where the centre lies
    outward = place / np.linalg.norm(place, axis=-1, keepdims=True)
    along = (way * outward).sum(-1)
    across = np.linalg.norm(way - along[..., None] * outward, axis=-1)
    for name, expected in (("radial_speed", along), ("tangential_speed", across)):
        assert got[name].shape == expected.shape
        np.testing.assert_allclose(got[name].values[far], expected[far], rtol=1e-5, atol=1e-6)
    if about == "origin":
        assert got.radial_speed.isnull().values[~far].all()


@several
@given(histories(), st.sampled_from(["velocity", "position"]))
def test_autocorrelation(ds: xr.Dataset, of: Any) -> None:
    largest = ds.sizes["step"] - (2 if of == "velocity" else 1)
    lags = [*range(1, largest + 1)]
    with pytest.raises(InvalidArgument, match="at most"):
        analysis.autocorrelation(ds, [*lags, largest + 1] if lags else 1, of)
    if not lags:
        return
    got = analysis.autocorrelation(ds, lags, of).compute(scheduler="sync")
    W, masks = values_of(ds)
    x = np.diff(W, axis=0) if of == "velocity" else W - W.mean(0)

    def mean_product(lag: int) -> Wide:
        if len(x) <= lag:
            return np.full(W.shape[1], np.nan)
        return (x[: len(x) - lag] * x[lag:]).sum(-1).mean(0)

    means = np.stack([mean_product(lag) for lag in (0, *lags)])
    reported = {None: (got.token_autocorrelation.values, means)}
    for name, mask in masks.items():
        one = got.autocorrelation.sel(population=name).values[:, None]
        together = means[:, mask].mean(1, keepdims=True) if mask.any() else means[:, :1] * np.nan
        reported[name] = (one, together)
    for found, products in reported.values():
        moves = ~(products[0] < 1e-20)  # but for rounding; NaN is none
        expected = products[1:] / products[0]
        np.testing.assert_allclose(found[:, moves], expected[:, moves], rtol=1e-9, atol=1e-12)
        if of == "velocity":
            assert np.isnan(found[:, ~moves]).all()


@several
@given(histories(), st.sampled_from(["centroid", "previous", "delta"]))
def test_alignment(ds: xr.Dataset, other: str) -> None:
    got = analysis.alignment(ds, other).compute(scheduler="sync")
    W, masks = values_of(ds)
    nothing = np.full((1, *W.shape[1:]), np.nan)
    second = {
        "centroid": np.broadcast_to(W.mean(1, keepdims=True), W.shape),
        "previous": np.concatenate([nothing, W[:-1]]),
        "delta": np.concatenate([nothing, np.diff(W, axis=0)]),
    }[other]
    cosine = (W * second).sum(-1) / np.linalg.norm(W, axis=-1) / np.linalg.norm(second, axis=-1)
    clear = ~(np.linalg.norm(second, axis=-1) < 1e-9)
    np.testing.assert_allclose(got.cosine.values[clear], cosine[clear], rtol=1e-9, atol=1e-12)
    if not clear.all():
        return
    for name, mask in masks.items():
        one = got.sel(population=name)
        known = [row[~np.isnan(row)] for row in cosine[:, mask]]
        assert one.aligned_tokens.values.tolist() == [len(row) for row in known]
        means = [row.mean() if len(row) else np.nan for row in known]
        np.testing.assert_allclose(one.alignment, means, rtol=1e-9, atol=1e-12)


@several
@given(histories(), st.sampled_from(["all", "last", 0]), st.sampled_from(["dead", "all"]))
def test_pca(ds: xr.Dataset, basis: Any, population: str) -> None:
    hidden = ds.sizes["hidden"]
    got = analysis.pca(ds, population, hidden, basis).compute(scheduler="sync")
    W, masks = values_of(ds)
    rows = {"all": W, "last": W[-1:], 0: W[:1]}[basis]
    vectors = rows[:, masks[population]].reshape(-1, hidden)
    vectors = vectors[np.isfinite(vectors).all(1)]
    expected = spectrum_of(vectors)
    np.testing.assert_allclose(got.spectrum, expected, rtol=1e-9, atol=1e-13)
    if not len(vectors):
        assert got.scores.isnull().all()
        return
    np.testing.assert_allclose(got.basis.values @ got.basis.values.T, np.eye(hidden), atol=1e-12)
    scores = (W - vectors.mean(0)) @ got.basis.values.T
    np.testing.assert_allclose(got.scores, scores, rtol=1e-5, atol=1e-6)
    share = expected / expected.sum()
    if expected.max() > 1e-12:
        np.testing.assert_allclose(got.participation_ratio, 1 / (share**2).sum(), rtol=1e-9)


@several
@given(histories())
def test_inertia(ds: xr.Dataset) -> None:
    got = analysis.inertia(ds).compute(scheduler="sync")
    W, masks = values_of(ds)
    for name, mask in masks.items():
        expected = np.stack([spectrum_of(row[mask]) for row in W])
        found = got.inertia.sel(population=name)
        np.testing.assert_allclose(found, expected, rtol=1e-9, atol=1e-13)


@several
@given(histories(), st.lists(st.integers(-2, 2), min_size=6, max_size=6), st.integers(1, 2))
def test_projection(ds: xr.Dataset, numbers: list[int], count: int) -> None:
    hidden = ds.sizes["hidden"]
    axes = np.array(numbers, np.float64).reshape(2, 3)[:count, :hidden]
    got = analysis.projection(ds, axes).compute(scheduler="sync")
    W, _ = values_of(ds)
    unit = axes / np.linalg.norm(axes, axis=1, keepdims=True)
    np.testing.assert_allclose(got.projection, W @ unit.T, rtol=1e-12, atol=1e-15)
    if not np.isfinite(unit).all():
        assert got.across.isnull().all()
        return
    across = W - W @ np.linalg.pinv(unit) @ unit
    np.testing.assert_allclose(got.across, np.linalg.norm(across, axis=-1), rtol=1e-9, atol=1e-12)
