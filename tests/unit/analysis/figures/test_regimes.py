"""Stacks show the counts of the regimes, and of the causes."""

from __future__ import annotations

import numpy as np
from matplotlib.figure import Figure as Canvas

from trajstore import analysis
from trajstore.analysis.figures import FIGURES
from trajstore.analysis.figures.style import CAUSE_COLORS, REGIME_COLORS, REGIME_MEANINGS


def heights(ax, steps):
    """Of each stack at every step, from below."""
    tops = [
        dict.fromkeys(steps, 0.0)
        | {x: max(y for at, y in layer.get_paths()[0].vertices if at == x) for x in steps}
        for layer in ax.collections
    ]
    return np.array([[top[x] for x in steps] for top in tops])


def test_regimes(run):
    counts = analysis.regimes(run).counts.sel(population="all").compute()
    there = [name for name in analysis.REGIMES if counts.sel(regime_name=name).any()]
    ax = FIGURES["regimes"](run, Canvas().subplots())
    labels = [layer.get_label() for layer in ax.collections]
    assert [label.partition(":")[0] for label in labels] == there
    assert labels[-1] == "jump: more than √D cells (L2), D elements"
    assert REGIME_MEANINGS.keys() == REGIME_COLORS.keys()
    assert set(REGIME_COLORS) == set(analysis.REGIMES)
    expected = counts.sel(regime_name=there).values.T.cumsum(0)
    assert (expected[-1] == 11).all()
    assert (heights(ax, counts.step.values) >= expected).all()
    np.testing.assert_array_equal(heights(ax, counts.step.values)[-1], 11)
    assert ax.get_ylim() == (0, 11)


def test_causes_of_a_population(run):
    cause = analysis.freeze_cause(run).sel(token=run.token[~run.is_dead.values]).values
    ax = FIGURES["freeze_cause"](run, Canvas().subplots(), population="live")
    present = [name for at, name in enumerate(analysis.CAUSES) if (cause == at).any()]
    assert [layer.get_label() for layer in ax.collections] == [
        name.replace("_", " ") for name in present
    ]
    assert set(CAUSE_COLORS) == set(analysis.CAUSES)
    assert ax.get_ylim() == (0, cause.shape[1])
    assert "live tokens (7)" in ax.get_ylabel()
    (right,) = (other for other in ax.figure.axes if other is not ax)
    np.testing.assert_array_equal(right.lines[0].get_ydata(), run.lr[1:])
    np.testing.assert_array_equal(right.lines[0].get_xdata(), run.step[1:])
