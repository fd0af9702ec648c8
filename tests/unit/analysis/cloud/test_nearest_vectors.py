from __future__ import annotations

import math
import os

import numpy as np
import pytest
import xarray as xr
from hypothesis import given, settings
from near_histories import near_histories

from trajstore import analysis
from trajstore.errors import StepNotFound


def distances_by_hand(W: np.ndarray) -> np.ndarray:
    with np.errstate(all="ignore"):
        apart = np.linalg.norm(W[:, None] - W[None], axis=-1)
    finite = np.isfinite(W).all(1)
    apart[(apart == 0) | ~finite | ~finite[:, None]] = np.inf
    nearest = apart.min(1, initial=np.inf)
    return np.where(np.isfinite(nearest), nearest, np.nan)


@settings(max_examples=int(os.environ.get("TRAJSTORE_EXAMPLES", "6")), deadline=None)
@given(near_histories())
def test_nearest_distance(ds: xr.Dataset) -> None:
    for population, members in {"dead": ds.is_dead.values, "all": ds.is_dead.values | True}.items():
        got = analysis.nearest_distance(ds, population).compute(scheduler="sync")
        for row, W in enumerate(ds.W.values.astype(np.float64)):
            expected = np.full(len(members), np.nan)
            expected[members] = distances_by_hand(W[members])
            np.testing.assert_allclose(got.nearest_distance[row], expected, rtol=1e-12)
            finite = members & np.isfinite(W).all(1)
            _, first = np.unique(W[finite] + 0.0, axis=0, return_index=True)
            if len(first) < 2:
                assert got.nearest_entropy[row].isnull()
                continue
            n, hidden = len(first), W.shape[1]
            ball = math.log({1: 2.0, 2: math.pi}[hidden])
            harmonic = sum(1 / number for number in range(1, n))
            entropy = hidden * np.log(expected[finite][first]).mean() + ball + harmonic
            np.testing.assert_allclose(got.nearest_entropy[row], entropy, rtol=1e-9, atol=1e-9)


def test_more_distances_than_fit_in_memory_at_once(make_run) -> None:
    rng = np.random.default_rng(1)
    places = np.cumsum(rng.integers(1, 9, 3000)).astype(np.float64)
    gaps = np.diff(places, prepend=-np.inf, append=np.inf)
    order = rng.permutation(places.size)
    ds = make_run(places[None, order, None], native="float64")
    distances = analysis.nearest_distance(ds).nearest_distance[0]
    np.testing.assert_array_equal(distances, np.minimum(gaps[:-1], gaps[1:])[order])


def test_the_nearest_of_many_that_products_cannot_tell_apart(make_run) -> None:
    rng = np.random.default_rng(2)
    W = (1000 + rng.normal(0, 1e-9, (1, 40, 4))).astype(np.float64)
    W[0, 0] = -1000  # the squares are large, and the mean is far away
    got = analysis.nearest_distance(make_run(W, native="float64")).compute()
    np.testing.assert_allclose(got.nearest_distance[0], distances_by_hand(W[0]), rtol=1e-12)


def test_steps_of_choice(make_run, walk) -> None:
    ds = make_run(walk(6, 9, 3), is_dead=np.arange(9) < 4, steps=np.arange(6) * 2, chunks=(4, 5, 3))
    whole = analysis.nearest_distance(ds).compute()
    got = analysis.nearest_distance(ds, steps=[10, 2]).compute()
    xr.testing.assert_identical(got, whole.sel(step=[10, 2]))
    with pytest.raises(StepNotFound):
        analysis.nearest_distance(ds, steps=[2, 3])
