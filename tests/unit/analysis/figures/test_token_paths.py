"""Paths are the first two scores of `pca`."""

from __future__ import annotations

import numpy as np
import pytest
from matplotlib.figure import Figure as Canvas

from trajstore import analysis
from trajstore.analysis.figures import FIGURES


@pytest.mark.parametrize("plane", ["principal", "hidden_mean"])
def test_lines_and_their_ends(plane, run):
    rng = np.random.default_rng(1)
    run = run.assign(hidden_mean=(("step", "hidden"), rng.normal(size=(23, 6))))
    first = None if plane == "principal" else plane
    found = analysis.pca(run, components=2, first=first).compute()
    ax = FIGURES["trajectory"](run, Canvas().subplots(), plane=plane)
    for paths, members in zip(
        ax.collections, (~run.is_dead.values, run.is_dead.values), strict=True
    ):
        shown = np.stack([path.vertices for path in paths.get_paths()], 1)
        np.testing.assert_allclose(shown, found.scores.values[:, members])
    start, end = ax.lines[:2]
    live = found.scores.values[:, ~run.is_dead.values]
    np.testing.assert_allclose(start.get_xydata(), live[0])
    np.testing.assert_allclose(end.get_xydata(), live[-1])
    assert (
        f"{(found.spectrum[0] / found.spectrum.sum()).item():.1%} of the variance"
        in ax.get_xlabel()
    )


def test_many_tokens_are_counted_all(run, monkeypatch):
    monkeypatch.setattr("trajstore.analysis.figures.token_paths._LINES", 5)
    ax = FIGURES["trajectory"](run, Canvas().subplots())
    assert [mesh.get_array().sum() for mesh in ax.collections] == [7 * 23, 4 * 23]
    assert "all tokens at all steps" in ax.texts[0].get_text()


def test_steps_that_are_left_out_are_told(run, monkeypatch):
    monkeypatch.setattr("trajstore.analysis.figures.token_paths._POINTS", 100)
    ax = FIGURES["trajectory"](run, Canvas().subplots())
    assert "every 3th step" in ax.texts[0].get_text()
    assert len(ax.collections[0].get_paths()[0].vertices) == 8
