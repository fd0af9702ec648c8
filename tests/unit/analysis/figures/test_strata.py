"""The map of layers shows what `stratigraphy` pools."""

from __future__ import annotations

import numpy as np
from matplotlib.figure import Figure as Canvas

import analysis
from analysis.figures import FIGURES


def test_regimes_and_hops(run):
    for colour in ("regime", "hop"):
        expected = analysis.stratigraphy(run, colour).stratum.values.T
        ax = FIGURES["stratigraphy"](run, Canvas().subplots(), colour=colour)
        (mesh,) = ax.collections
        shown = mesh.get_array()
        np.testing.assert_array_equal(np.ma.filled(shown, 0), expected)
        assert "one token and one step to a cell" in ax.texts[0].get_text()


def test_it_says_how_cells_are_pooled(run, monkeypatch):
    pooled = analysis.stratigraphy(run, most_steps=4, most_layers=3)
    monkeypatch.setattr("analysis.figures.strata.build_stratigraphy", lambda *_: pooled)
    ax = FIGURES["stratigraphy"](run, Canvas().subplots())
    assert "the most common regime of up to 4 tokens × 6 steps to a cell" in ax.texts[0].get_text()
    assert ax.get_ylim() == (0, 11)
