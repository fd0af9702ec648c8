"""The map of layers shows what `stratigraphy` pools."""

from __future__ import annotations

import numpy as np
from matplotlib.figure import Figure as Canvas

from trajstore import analysis
from trajstore.analysis.figures import FIGURES


def test_regimes_and_hops(run):
    for colour in ("regime", "hop"):
        expected = analysis.stratigraphy(run, colour).stratum.values.T
        ax = FIGURES["stratigraphy"](run, Canvas().subplots(), colour=colour)
        (mesh,) = ax.collections
        shown = mesh.get_array()
        np.testing.assert_array_equal(np.ma.filled(shown, 0), expected)
        assert "of 1 token × 1 step to a cell" in ax.texts[0].get_text()
        assert ("blank: did not move" in ax.texts[0].get_text()) == (colour == "hop")


def test_a_strip_tells_the_dead(run):
    order = np.argsort(analysis.freeze(run).last_motion.values, kind="stable")
    ax = FIGURES["stratigraphy"](run, Canvas().subplots())
    (strip,) = ax.child_axes
    shown = strip.collections[0].get_array()
    np.testing.assert_array_equal(shown[:, 0], run.is_dead.values[order])
    told = [text.get_text() for text in ax.get_legend().get_texts()]
    assert told[0].startswith("frozen: no element")
    assert told[-2:] == ["strip: live tokens", "strip: dead tokens"]
    ax = FIGURES["stratigraphy"](run.drop_vars("is_dead"), Canvas().subplots())
    assert not ax.child_axes


def test_it_says_how_cells_are_pooled(run, monkeypatch):
    pooled = analysis.stratigraphy(run, most_steps=4, most_layers=3)
    monkeypatch.setattr("trajstore.analysis.figures.strata.build_stratigraphy", lambda *_: pooled)
    ax = FIGURES["stratigraphy"](run, Canvas().subplots())
    expected = "the most common regime of up to 4 tokens × up to 6 steps to a cell"
    assert ax.texts[0].get_text().replace("\n", " ") == (
        expected + "; strip: mixed colours where both kinds are pooled"
    )
    assert ax.get_ylim() == (0, 11)
