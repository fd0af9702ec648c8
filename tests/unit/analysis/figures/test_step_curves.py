"""Curves show the numbers of the analysis."""

from __future__ import annotations

import numpy as np
import pytest
from matplotlib.figure import Figure as Canvas

from trajstore import analysis
from trajstore.analysis.figures import FIGURES
from trajstore.errors import InvalidArgument


def drawn(name, ds, **options):
    return FIGURES[name](ds, Canvas().subplots(), **options)


def test_loss(run):
    ax = drawn("loss", run)
    np.testing.assert_array_equal(ax.lines[0].get_ydata(), run.loss)
    assert "3.000 at step 1, 2.000 at step 22" not in ax.texts[0].get_text()  # row 0 is NaN
    assert "2.955 at step 1, 2.000 at step 22" in ax.texts[0].get_text()


def test_logits(run):
    expected = analysis.logit_stats(run).isel(step=slice(1, None))
    ax = drawn("logits", run)
    np.testing.assert_array_equal(ax.lines[0].get_ydata(), expected.entropy)
    (right,) = (other for other in ax.figure.axes if other is not ax)
    np.testing.assert_array_equal(right.lines[0].get_ydata(), expected.dead_mass)
    heights = ax.collections[0].get_paths()[0].vertices[:, 1]
    assert np.isin(expected.logit_max, heights).all()
    assert np.isin(expected.logit_min, heights).all()
    assert right.get_ylim() == (0, 1)
    told = [text.get_text() for text in ax.get_legend().get_texts()]
    assert told[-1] == "probability of all dead tokens"


def test_logits_of_some_tokens_are_refused(run):
    run = run.assign_attrs(recording={"vocabulary": 11})
    drawn("logits", run)
    with pytest.raises(InvalidArgument, match="over all 11 tokens of the vocabulary, and 3 are"):
        drawn("logits", run.isel(token=slice(0, 3)))


def test_centroid(run):
    expected = analysis.centroid(run)
    lines = iter(drawn("centroid", run).lines)
    for population in ("dead", "live"):
        part = expected.sel(population=population)
        np.testing.assert_array_equal(next(lines).get_ydata(), part.centroid_norm)
        np.testing.assert_array_equal(next(lines).get_ydata(), part.mean_radius)


def test_seams(run):
    W = run.W.where(run.step < 12, run.W + 5)
    run = run.assign(W=W.drop_attrs().chunk(step=6))
    expected = analysis.seams(run).compute()
    ax = drawn("seams", run)
    np.testing.assert_array_equal(ax.lines[0].get_ydata(), expected.seam_score)
    marks = ax.lines[-1]
    np.testing.assert_array_equal(marks.get_xdata(), expected.step[expected.seam])
    assert marks.get_xdata().size
    assert f"seams at step {marks.get_xdata()[0]}" in ax.texts[0].get_text()
