"""Figures of the cloud show the numbers of `centroid`, `pca` and `clusters`."""

from __future__ import annotations

import numpy as np
import pytest
from matplotlib.figure import Figure as Canvas

from trajstore import analysis
from trajstore.analysis.figures import FIGURES


def test_centroid(run):
    expected = analysis.centroid(run)
    lines = iter(FIGURES["centroid"](run, Canvas().subplots()).lines)
    for population in ("dead", "live"):
        part = expected.sel(population=population)
        np.testing.assert_array_equal(next(lines).get_ydata(), part.centroid_norm)
        np.testing.assert_array_equal(next(lines).get_ydata(), part.mean_radius)


@pytest.mark.parametrize("population", [None, "live"])
def test_spectra_and_their_ranks(population, run):
    ax = FIGURES["spectrum"](run, Canvas().subplots(), population=population)
    lines = iter(ax.lines)
    for name in ("dead", "live") if population is None else (population,):
        for basis, rows in (("all", "all steps"), ("last", "last step")):
            expected = analysis.pca(run, name, 1, basis).compute()
            line = next(lines)
            np.testing.assert_array_equal(line.get_xdata(), range(1, 7))
            shown = line.get_ydata()
            there = np.isfinite(shown)
            np.testing.assert_array_equal(shown[there], expected.spectrum[there])
            assert (expected.spectrum[~there] <= 1e-14 * expected.spectrum.max()).all()
            rank = expected.effective_rank.item()
            assert line.get_label() == f"{name} tokens: {rows}, effective rank {rank:.3g}"
    assert not list(lines)
    assert ax.get_yscale() == "log"


@pytest.mark.parametrize("population", [None, "dead", "rare"])
def test_clusters(run, population):
    W = run.W.where(run.step < 9, 1.5)  # all are one vector from there on
    run = run.assign(W=W.drop_attrs().chunk(step=6)).assign_coords(rare=run.token > 6)
    ax = FIGURES["clusters"](run, Canvas().subplots(), population=population)
    expected = analysis.clusters(run)
    lines = iter(ax.lines)
    for name in ("dead", "live") if population is None else (population,):
        part = expected.sel(population=name)
        np.testing.assert_array_equal(next(lines).get_ydata(), part.groups + part.singles)
        largest = next(lines).get_ydata()
        assert (largest[:9] == 1).all()
        np.testing.assert_array_equal(largest[9:], part.group_sizes[9:, 0])
    assert ax.get_yscale() == "log"
