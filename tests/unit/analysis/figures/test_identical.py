"""The figure of identical tokens shows the numbers of `clusters`."""

from __future__ import annotations

import numpy as np
import pytest
from matplotlib.figure import Figure as Canvas

from trajstore import analysis
from trajstore.analysis.figures import FIGURES


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
