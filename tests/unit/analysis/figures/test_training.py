"""Figures of training show the numbers of the analysis and what was recorded."""

from __future__ import annotations

import numpy as np
import pytest
from matplotlib.figure import Figure as Canvas

from trajstore import analysis
from trajstore.analysis.figures import FIGURES
from trajstore.errors import InvalidArgument


def drawn(name, ds, **options):
    return FIGURES[name](ds, Canvas().subplots(), **options)


def test_logits(run):
    expected = analysis.logit_stats(run).isel(step=slice(1, None))
    ax = drawn("logit_stats", run)
    np.testing.assert_array_equal(ax.lines[0].get_ydata(), expected.entropy)
    (right,) = (other for other in ax.figure.axes if other is not ax)
    np.testing.assert_array_equal(right.lines[0].get_ydata(), expected.dead_mass)
    heights = ax.collections[0].get_paths()[0].vertices[:, 1]
    assert np.isin(expected.logit_max, heights).all()
    assert np.isin(expected.logit_min, heights).all()
    assert right.get_ylim() == (0, 1)
    labels = [text.get_text() for text in ax.get_legend().get_texts()]
    assert labels[-1] == "probability of all dead tokens"


def test_logits_of_some_tokens_are_refused(run):
    run = run.assign_attrs(recording={"vocabulary": 11})
    drawn("logit_stats", run)
    with pytest.raises(InvalidArgument, match="all 11 tokens of the vocabulary, got 3"):
        drawn("logit_stats", run.isel(token=slice(0, 3)))


def test_moments(run):
    expected = analysis.moment_plane(run).compute()
    ax = FIGURES["moments"](run, Canvas().subplots(), population="dead")
    mesh = ax.collections[0]
    part = expected.sel(population="dead")
    np.testing.assert_array_equal(mesh.get_array().filled(0), part["count"].values.T)
    line = expected.threshold.sel(quantile=0.5)
    np.testing.assert_array_equal(ax.lines[0].get_ydata(), line)
    np.testing.assert_array_equal(ax.lines[0].get_xdata(), expected.root)
    assert "step 22, learning rate 0.0001, dead tokens" in notes(ax)


def notes(ax):
    return ax.get_legend().get_title().get_text().replace("\n", " ")
