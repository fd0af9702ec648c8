"""The figure of the spectrum shows the numbers of `pca`."""

from __future__ import annotations

import numpy as np
import pytest
from matplotlib.figure import Figure as Canvas

from trajstore import analysis
from trajstore.analysis.figures import FIGURES


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
            assert line.get_label() == f"{name} tokens, {rows}: effective rank {rank:.3g}"
    assert not list(lines)
    assert ax.get_yscale() == "log"
