"""The figure of the autocorrelation shows the numbers of `autocorrelation`."""

from __future__ import annotations

import numpy as np
import pytest
from matplotlib.figure import Figure as Canvas

from trajstore import analysis
from trajstore.analysis.figures import FIGURES


@pytest.mark.parametrize("held", [1 << 28, 4 * 8 * 66])
def test_lags_up_to_half_of_the_rows_or_as_many_as_may_be_held(held, run, monkeypatch):
    monkeypatch.setattr("trajstore.analysis.figures.memory_of_motion._HELD", held)
    run = run.assign_coords(step=run.step * 10)
    ax = FIGURES["autocorrelation"](run, Canvas().subplots())
    lags = list(range(1, 12 if held > 1 << 20 else 5))
    expected = analysis.autocorrelation(run, lags).autocorrelation
    for line, name in zip(ax.lines, ("dead", "live"), strict=False):
        np.testing.assert_array_equal(line.get_xdata(), np.array(lags) * 10)
        np.testing.assert_array_equal(line.get_ydata(), expected.sel(population=name))
    assert ax.get_xscale() == "log"
