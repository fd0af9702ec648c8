"""The map of the moments shows `moment_plane`."""

from __future__ import annotations

import numpy as np
from matplotlib.figure import Figure as Canvas

from trajstore import analysis
from trajstore.analysis.figures import FIGURES


def test_counts_and_line(run):
    expected = analysis.moment_plane(run).compute()
    ax = FIGURES["moments"](run, Canvas().subplots(), population="dead")
    mesh = ax.collections[0]
    part = expected.sel(population="dead")
    np.testing.assert_array_equal(mesh.get_array().filled(0), part["count"].values.T)
    line = expected.threshold.sel(quantile=0.5)
    np.testing.assert_array_equal(ax.lines[0].get_ydata(), line)
    np.testing.assert_array_equal(ax.lines[0].get_xdata(), expected.root)
    assert "step 22, learning rate 0.0001, dead tokens" in told(ax)


def told(ax):
    return ax.texts[0].get_text().replace("\n", " ")
