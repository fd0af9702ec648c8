from __future__ import annotations

import numpy as np
import pytest

import analysis
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


def test_what_is_missing_is_said(make_run, walk):
    ds = make_run(walk(3, 4, 2))
    with pytest.raises(VariableNotRecorded, match="is_dead"):
        analysis.by_population(analysis.displacement(ds))
    with pytest.raises(InvalidArgument, match="expected token"):
        analysis.by_population(ds.step)
    with pytest.raises(InvalidArgument, match="quantiles"):
        analysis.by_population(analysis.displacement(ds), quantiles=(2,))
