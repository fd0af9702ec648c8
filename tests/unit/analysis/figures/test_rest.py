"""Shares, histograms and distributions show what `freeze` and `lifecycle` find."""

from __future__ import annotations

import numpy as np
from matplotlib.figure import Figure as Canvas

from trajstore import analysis
from trajstore.analysis.figures import FIGURES


def test_freeze(run):
    for lattice in ("native", "float16"):
        expected = analysis.freeze(run, lattice=lattice)
        ax = FIGURES["freeze"](run, Canvas().subplots(), lattice=lattice)
        lines = iter(ax.lines)
        for population in ("dead", "live"):
            part = expected.sel(population=population)
            np.testing.assert_array_equal(next(lines).get_ydata(), part.frozen_fraction)
            np.testing.assert_array_equal(next(lines).get_ydata(), part.still_fraction)


def test_last_motion(run):
    last = analysis.freeze(run).last_motion.values
    ax = FIGURES["last-motion"](run, Canvas().subplots())
    dead = run.is_dead.values
    shown = {}
    for label, bars in zip(("dead", "live"), ax.containers or ax.patches, strict=True):
        patch = bars if not hasattr(bars, "patches") else bars.patches[0]
        shown[label] = patch
    for label, members in (("dead", dead), ("live", ~dead)):
        edges = np.linspace(0, 22, 23)
        counts, _ = np.histogram(last[members][last[members] >= 0], edges)
        outline = shown[label].get_path().vertices[:, 1]
        assert outline.max() == counts.max()
        never, end = (last[members] < 0).sum(), (last[members] == 22).sum()
        (text,) = (t.get_text() for t in ax.get_legend().get_texts() if label in t.get_text())
        assert f"({members.sum()}): {never} never moved, {end} still moved at the last step" in text


def test_lifecycle(run):
    expected = analysis.lifecycle(run).compute()
    lines = iter(FIGURES["lifecycle"](run, Canvas().subplots()).lines)
    for members in (run.is_dead.values, ~run.is_dead.values):
        for name in ("last_jump", "last_local", "last_hop"):
            line = next(lines)
            steps = np.sort(np.maximum(expected[name].values[members], 0))
            np.testing.assert_array_equal(np.unique(line.get_xdata()), np.unique(steps))
            assert line.get_ydata().max() == 1
