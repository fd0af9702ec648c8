"""Counts of hops and speeds are those of the analysis."""

from __future__ import annotations

import numpy as np
from matplotlib.figure import Figure as Canvas

from trajstore import analysis
from trajstore.analysis.figures import FIGURES
from trajstore.analysis.figures.densities import pooled_steps
from trajstore.analysis.optimizer.log_histograms import log_histogram


def test_hops(run):
    length = analysis.lattice_displacement(run, ord=1).values
    ax = FIGURES["hops"](run, Canvas().subplots())
    for steps, members in zip(ax.patches, (run.is_dead.values, ~run.is_dead.values), strict=True):
        counts, edges, _ = steps.get_data()
        moving = length[:, members][length[:, members] > 0]
        np.testing.assert_array_equal(counts, np.histogram(moving, edges)[0])
        assert counts.sum() == moving.size
        share = f"{1 - moving.size / length[:, members].size:.1%}"
        assert f"still in {share} of {length[:, members].size}" in steps.get_label()


def test_speed_density(run):
    pace = analysis.speed(run).values
    ax = FIGURES["speed-density"](run, Canvas().subplots())
    (mesh,) = ax.collections
    shown = mesh.get_array().filled(0)
    np.testing.assert_array_equal(shown.sum(0), (pace > 0).sum(1))
    assert f"still, not shown: {(pace == 0).mean():.1%}" in ax.texts[0].get_text()


def test_steps_are_pooled_and_none_left_out(run, monkeypatch):
    counts = log_histogram(analysis.speed(run).compute())["count"].sel(population="all")
    monkeypatch.setattr("trajstore.analysis.figures.densities._COLUMNS", 5)
    pooled, width = pooled_steps(counts)
    assert width == 5
    assert pooled.step.values.tolist() == [1, 6, 11, 16, 21]
    np.testing.assert_array_equal(pooled.sum("step"), counts.sum("step"))
    np.testing.assert_array_equal(pooled[0], counts[:5].sum("step"))
    ax = FIGURES["speed-density"](run, Canvas().subplots())
    bar = next(other for other in ax.figure.axes if other is not ax)
    assert bar.get_ylabel() == "tokens × steps, 5 steps to a column"
