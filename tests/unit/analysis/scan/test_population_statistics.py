from __future__ import annotations

import numpy as np
import pytest

from trajstore import analysis
from trajstore.errors import InvalidArgument, VariableNotRecorded


def test_statistics_of_each_population(make_run, walk):
    dead = np.array([True, False, False, True, False, True, False])
    ds = make_run(walk(9, 7, 4), grad=walk(9, 7, 4, 2), is_dead=dead)
    norms = analysis.grad_norms(ds)
    values = norms.values.astype(np.float64)
    for chunked in (norms, norms.chunk(step=2, token=3), norms.compute()):
        got = analysis.by_population(chunked, quantiles=(0.1, 0.9)).compute()
        for name, members in {"dead": dead, "live": ~dead, "all": dead | True}.items():
            one, chosen = got.sel(population=name), values[:, members]
            np.testing.assert_allclose(one["mean"], chosen.mean(1))
            np.testing.assert_allclose(one["std"], chosen.std(1))
            np.testing.assert_array_equal(one["min"], chosen.min(1))
            np.testing.assert_array_equal(one["max"], chosen.max(1))
            np.testing.assert_allclose(one["median"], np.median(chosen, axis=1))
            expected = np.quantile(chosen, [0.1, 0.9], axis=1).T
            np.testing.assert_allclose(one["quantiles"], expected)
    assert got["mean"].attrs["units"] == "1"


def test_a_nan_spoils_its_population_and_an_empty_one_is_nan(make_run, walk):
    ds = make_run(walk(3, 4, 2), is_dead=np.array([True, True, True, True]))
    norms = analysis.displacement(ds)
    norms[1, 2] = np.nan
    got = analysis.by_population(norms)
    assert got["max"].sel(population="live").isnull().all()
    for name in ("mean", "std", "min", "max", "median"):
        assert got[name].sel(population="dead").isnull().values.tolist() == [False, True, False]


@pytest.mark.parametrize("lazy", [False, True])
def test_mostly_dead_tokens_are_a_population_of_their_own(make_run, walk, lazy):
    count = np.array([0, 1, 3, 4, 900, -1])  # -1 means unknown
    rare = np.array([False, True, True, False, False, False])
    ds = make_run(walk(5, 6, 3), is_dead=count == 0).assign_coords(token_count=("token", count))
    ds = ds.chunk(step=2, token=4) if lazy else ds
    reported = ds.assign_attrs(config={"data": {"mostly_dead": 3}})
    counts = analysis.regimes(reported).counts.sum("regime_name").compute()
    assert counts.population.values.tolist() == ["dead", "live", "all", "mostly_dead"]
    np.testing.assert_array_equal(counts, [[1, 5, 6, 2]] * 4)
    moved = analysis.regimes(ds).regime.values != 0
    still = analysis.freeze(reported).unchanged_fraction.sel(population="mostly_dead")
    np.testing.assert_allclose(still, 1 - moved[:, rare].mean(1))
    way = analysis.displacement(reported)
    mean = analysis.by_population(way)["mean"].sel(population="mostly_dead")
    np.testing.assert_allclose(mean, way.values[:, rare].astype(float).mean(1))
    centre = analysis.centroid(reported, "mostly_dead").centroid.values
    np.testing.assert_allclose(centre, ds.W.values[:, rare].astype(float).mean(1))
    for config in (None, {}, {"data": {}}, {"data": {"mostly_dead": None}}, "text"):
        plain = ds.assign_attrs(config=config)
        assert "mostly_dead" not in analysis.regimes(plain).population
    with pytest.raises(InvalidArgument, match="expected dead, live, all, mostly_dead"):
        analysis.centroid(reported, "undead")


def test_missing_inputs_are_reported(make_run, walk):
    ds = make_run(walk(3, 4, 2))
    with pytest.raises(VariableNotRecorded, match="is_dead"):
        analysis.by_population(analysis.displacement(ds))
    with pytest.raises(InvalidArgument, match="expected token"):
        analysis.by_population(ds.step)
    with pytest.raises(InvalidArgument, match="quantiles"):
        analysis.by_population(analysis.displacement(ds), quantiles=(2,))
