"""The figure between runs."""

from __future__ import annotations

import numpy as np
from matplotlib.figure import Figure as Canvas

from trajstore import analysis
from trajstore.analysis.figures import FIGURES, Options, collect, draw_sheet


def test_two_runs_from_their_first_difference_on(run):
    other = run.assign(W=run.W + (run.step >= 5) * np.float32(0.5)).isel(step=slice(0, 20))
    ax = FIGURES["divergence"](run, Canvas().subplots(), other=other)
    found = analysis.divergence(run, other).compute()
    (right,) = (each for each in ax.figure.axes if each is not ax)
    for axes, name in ((ax, "distance"), (right, "differing")):
        for line, population in zip(axes.lines[:2], ("dead", "live"), strict=True):
            expected = found[name].sel(population=population)
            np.testing.assert_array_equal(line.get_ydata()[5:], expected[5:])
            assert np.isnan(line.get_ydata()[:5]).all()
    assert "since step 5" in ax.get_legend().get_title().get_text()


def test_several_runs_and_one_that_never_differs(run):
    others = [run.assign(W=run.W * 2), run]
    found = collect([run, *others], [FIGURES["divergence"]], Options(), labels=["a", "b", "c"])
    (ax,) = draw_sheet(found).axes
    assert [text.get_text() for text in ax.get_legend().get_texts()] == [
        "b", "c", "dead tokens: distance", "live tokens: distance",
    ]  # fmt: skip
    note = ax.get_legend().get_title().get_text()
    assert "b: differs from run" in note
    assert "c: never differs" in note
    alone = FIGURES["divergence"](run, Canvas().subplots(), other=run)
    assert "never differs" in alone.get_legend().get_title().get_text()
