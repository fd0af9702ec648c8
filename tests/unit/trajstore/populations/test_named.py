from __future__ import annotations

import numpy as np
import pytest
import xarray as xr

from trajstore import analysis
from trajstore.errors import InvalidArgument
from trajstore.populations import with_populations


@pytest.fixture
def run():
    walk = np.random.default_rng(0).normal(0, 1e-3, (6, 8, 3)).cumsum(axis=0).astype("f4")
    W = (walk.view("u4") & 0xFFFF0000).view("f4")  # bfloat16 values
    return xr.Dataset(
        {"W": (("step", "token", "hidden"), W, {"native_dtype": "bfloat16", "units": "1"})},
        coords={
            "step": np.arange(6),
            "token": np.arange(8)[::-1] * 3,  # neither sorted nor positions
            "is_dead": ("token", np.arange(8) < 3),
        },
    ).chunk({"step": 4, "token": 3})


def test_every_function_takes_and_gives_them(run):
    mask = np.arange(8) % 2 == 0
    ds = run.traj.with_populations(even=mask, first=run.token.values[:2], late="token < 9")
    names = ["dead", "live", "all", "even", "first", "late"]
    W = run.W.values.astype(np.float64)
    got = analysis.centroid(ds).compute()
    assert got.population.values.tolist() == names
    np.testing.assert_allclose(got.centroid.sel(population="even"), W[:, mask].mean(1))
    np.testing.assert_allclose(got.centroid.sel(population="first"), W[:, :2].mean(1))
    np.testing.assert_allclose(got.centroid.sel(population="late"), W[:, -3:].mean(1))
    for result in (
        analysis.freeze(ds).frozen_fraction,
        analysis.regimes(ds).counts,
        analysis.by_population(analysis.speed(ds))["mean"],
        ds.traj.by_population(analysis.speed(run))["mean"],
        analysis.clusters(ds).groups,
        analysis.autocorrelation(ds).autocorrelation,
        analysis.alignment(ds).alignment,
        analysis.inertia(ds).inertia,
        analysis.summary(ds).displacement,
    ):
        assert result.population.values.tolist() == names
    one = analysis.pca(ds, "even", components=1).compute()
    alone = analysis.pca(run.isel(token=mask), components=1).compute()
    np.testing.assert_allclose(one.spectrum, alone.spectrum)


def test_labels_make_a_population_each(run):
    cohorts = np.array(["old", "", "new", "old", "new", "", "old", "new"])
    ds = with_populations(run, {"cohort": cohorts})
    assert ds.is_cohort_old.values.tolist() == (cohorts == "old").tolist()
    assert analysis.coherence(ds, "cohort_new").sizes == {"step": 5}
    assert "is_cohort_" not in ds.coords


def test_any_mask_along_token_is_a_population(run):
    ds = run.assign_coords(reachable=("token", np.arange(8) > 5))
    assert "reachable" in analysis.distinct(ds).population
    with pytest.raises(InvalidArgument, match="second population 'reachable'"):
        analysis.distinct(ds.assign_coords(is_reachable=ds.reachable))


def test_wrong_populations_are_errors(run):
    for name, given, message in (
        ("dead", "token > 3", "name 'dead'"),
        ("a b", "token > 3", "name 'a b'"),
        ("token", "token > 3", "already"),
        ("odd", np.ones(3, bool), "3 values of bool"),
        ("odd", np.ones(8), "8 values of float64"),
        ("odd", np.ones((8, 1), bool), "one dimension"),
        ("odd", [3, 4], "1 unknown token ids for the population odd, the first is 4"),
        ("odd", "no such file.npy", "got the file name no such file.npy"),
    ):
        with pytest.raises(InvalidArgument, match=message):
            with_populations(run, {name: given})
