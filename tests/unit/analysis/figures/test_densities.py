"""Counts of hops and speeds are those of the analysis."""

from __future__ import annotations

import numpy as np
import pytest
import xarray as xr
from matplotlib.figure import Figure as Canvas

from trajstore import analysis
from trajstore.analysis.figures import FIGURES
from trajstore.analysis.figures.axes_marks import central_range
from trajstore.analysis.figures.motion import log_histogram, pooled_steps


def test_hops(run):
    length = analysis.lattice_displacement(run, ord=1).values
    ax = FIGURES["lattice_displacement"](run, Canvas().subplots())
    for steps, members in zip(ax.patches, (run.is_dead.values, ~run.is_dead.values), strict=True):
        counts, edges, _ = steps.get_data()
        moving = length[:, members][length[:, members] > 0]
        np.testing.assert_array_equal(counts, np.histogram(moving, edges)[0])
        assert counts.sum() == moving.size
        share = f"{1 - moving.size / length[:, members].size:.1%}"
        assert f"unchanged in {share} of {length[:, members].size}" in steps.get_label()


def test_speed_density(run):
    pace = analysis.speed(run).values
    ax = FIGURES["speed_density"](run, Canvas().subplots())
    (mesh,) = ax.collections
    shown = mesh.get_array().filled(0)
    np.testing.assert_array_equal(shown.sum(0), (pace > 0).sum(1))
    assert (
        f"unchanged, not shown: {(pace == 0).mean():.1%}" in ax.get_legend().get_title().get_text()
    )


def test_steps_are_pooled_and_none_left_out(run, monkeypatch):
    counts = log_histogram(analysis.speed(run).compute())["count"].sel(population="all")
    monkeypatch.setattr("trajstore.analysis.figures.motion._COLUMNS", 5)
    pooled, width = pooled_steps(counts)
    assert width == 5
    assert pooled.step.values.tolist() == [1, 6, 11, 16, 21]
    np.testing.assert_array_equal(pooled.sum("step"), counts.sum("step"))
    np.testing.assert_array_equal(pooled[0], counts[:5].sum("step"))
    ax = FIGURES["speed_density"](run, Canvas().subplots())
    bar = next(other for other in ax.figure.axes if other is not ax)
    assert bar.get_ylabel() == "tokens × steps, 5 steps per column"


def test_outliers_are_beyond_the_axis_and_counted():
    edges = np.logspace(0, 6, 7)
    assert central_range(edges, np.array([0, 1, 5000, 5000, 0, 1])) == (100, 10_000)
    assert central_range(edges, np.array([0, 20, 5000, 5000, 0, 1])) == (10, 10_000)


def values(chunks=None):
    rng = np.random.default_rng(0)
    data = 10 ** rng.uniform(-4, 4, (5, 40))
    data[0, :6] = [0, np.nan, np.inf, -1, 1.0, 0.1]
    da = xr.DataArray(data, dims=("step", "token"), name="length")
    da = da.assign_coords(is_dead=("token", np.arange(40) % 3 == 0))
    return da.chunk(chunks) if chunks else da


@pytest.mark.parametrize("chunks", [None, {"step": 2, "token": 7}])
def test_every_token_is_counted_once(chunks):
    da = values(chunks)
    found = log_histogram(da, -3, 3, 2).compute()
    edges = np.append(found.lower, found.upper[-1])
    np.testing.assert_allclose(edges, np.logspace(-3, 3, 13))
    for population, members in (
        ("dead", da.is_dead.values),
        ("live", ~da.is_dead.values),
        ("all", slice(None)),
    ):
        part = found.sel(population=population)
        for row in range(5):
            numbers = da.values[row, members]
            inside = numbers[np.isfinite(numbers) & (numbers > 0)]
            # The last class of NumPy's takes its upper edge as well, and nothing lies on it.
            np.testing.assert_array_equal(part["count"][row], np.histogram(inside, edges)[0])
            assert part.zero[row] == (numbers == 0).sum()
            assert part.nan[row] == np.isnan(numbers).sum()
        total = part["count"].sum("value_class") + part.zero + part.outside + part.nan
        assert (total == da.values[0, members].size).all()
    assert found.outside.sel(population="all")[0] >= 2  # −1 and infinity
