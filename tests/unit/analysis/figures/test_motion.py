"""Figures of motion show the numbers of the analysis."""

from __future__ import annotations

import numpy as np
import pytest
from matplotlib.figure import Figure as Canvas

from trajstore import analysis
from trajstore.analysis.figures import FIGURES
from trajstore.analysis.figures.style import POPULATION_COLORS


def test_discontinuities(run):
    W = run.W.where(run.step < 12, run.W + 5)
    run = run.assign(W=W.drop_attrs().chunk(step=6))
    expected = analysis.discontinuities(run).compute()
    ax = FIGURES["discontinuities"](run, Canvas().subplots())
    np.testing.assert_array_equal(ax.lines[0].get_ydata(), expected.discontinuity_score)
    marks = ax.lines[-1]
    np.testing.assert_array_equal(marks.get_xdata(), expected.step[expected.discontinuity])
    assert marks.get_xdata().size
    assert (
        f"discontinuities at step {marks.get_xdata()[0]}" in ax.get_legend().get_title().get_text()
    )


QUANTITIES = {
    "grad_norms": analysis.grad_norms,
    "displacement": analysis.displacement,
    "speed": analysis.speed,
}


@pytest.mark.parametrize("name", QUANTITIES)
def test_means_and_quantiles(name, run):
    expected = analysis.by_population(QUANTITIES[name](run), (0.05, 0.95)).sel(step=run.step[1:])
    ax = FIGURES[name](run, Canvas().subplots())
    assert ax.get_yscale() == "log"
    for line, band, population in zip(ax.lines, ax.collections, ("dead", "live"), strict=True):
        part = expected.sel(population=population)
        np.testing.assert_array_equal(line.get_xdata(), expected.step)
        np.testing.assert_array_equal(line.get_ydata(), part["mean"])
        assert line.get_color() == POPULATION_COLORS[population]
        assert population in line.get_label()
        heights = band.get_paths()[0].vertices[:, 1]
        assert np.isin(part.quantiles.values[np.isfinite(part.quantiles.values)], heights).all()


def test_a_single_population_and_a_run_that_knows_of_none(run):
    (line,) = FIGURES["speed"](run, Canvas().subplots(), population="all").lines
    mean = analysis.speed(run).mean("token", dtype=np.float64)
    np.testing.assert_allclose(line.get_ydata(), mean)
    (line,) = FIGURES["speed"](run.drop_vars("is_dead"), Canvas().subplots()).lines
    np.testing.assert_allclose(line.get_ydata(), mean)


def test_zeros_on_a_logarithmic_axis_are_counted(run):
    still = run.assign(W=run.W.where(run.step < 12, run.W.isel(step=11)))
    found = analysis.by_population(analysis.speed(still), (0.05,)).sel(population="dead").compute()
    low, mean = (int((found[name] == 0).sum()) for name in ("quantiles", "mean"))
    assert low >= mean >= 11
    for canvas in (Canvas(), Canvas(layout="constrained")):
        ax = FIGURES["speed"](still, canvas.subplots())
        noted = ax.get_legend().get_title().get_text().replace("\n", " ")
        assert f"5 % quantile of dead tokens at {low} of 22 steps" in noted
        assert f"mean of dead tokens at {mean} of 22 steps" in noted


def test_notes_and_legends_are_below_the_axes_if_a_layout_makes_room(run):
    for layout, below in (("constrained", True), (None, False)):
        canvas = Canvas(layout=layout)
        ax = FIGURES["speed"](run, canvas.subplots(), other=run)
        canvas.draw_without_rendering()
        legend = ax.get_legend().get_window_extent()
        assert (legend.y1 < ax.bbox.y0) == below
        assert ax.get_legend().get_title().get_text().count("line: mean over tokens") == 1
        assert legend.y0 >= 0


def test_each_run_has_a_color_and_each_population_a_line(run):
    ax = FIGURES["speed"](run, Canvas().subplots(), other=run.isel(step=slice(0, 9)))
    drawn = ax.lines[:4]
    assert [line.get_linestyle() for line in drawn] == ["-", "--", "-", "--"]
    first, _, second, _ = (line.get_color() for line in drawn)
    assert [line.get_color() for line in drawn] == [first, first, second, second]
    assert first != second
    np.testing.assert_array_equal(drawn[2].get_ydata(), drawn[0].get_ydata()[:8])
    assert not ax.collections, "bands of several runs would hide each other"


def test_speeds(run):
    expected = analysis.bulk_thermal(run)
    ax = FIGURES["bulk_thermal"](run, Canvas().subplots())
    for points, population in zip(ax.collections, ("dead", "live"), strict=True):
        part = expected.sel(population=population).compute()
        moving = (part.bulk_speed > 0) & (part.thermal_speed > 0)
        np.testing.assert_array_equal(points.get_offsets()[:, 0], part.thermal_speed[moving])
        np.testing.assert_array_equal(points.get_offsets()[:, 1], part.bulk_speed[moving])
        np.testing.assert_array_equal(points.get_array(), part.step[moving])


def test_steps_without_a_point_are_counted(run):
    later = run.W.isel(step=11) + np.float32(2) * (run.step > 15)  # all at once, at step 16
    steps = run.assign(W=run.W.where(run.step < 12, later).drop_attrs())
    found = analysis.bulk_thermal(steps, "live").compute()
    rest = int(((found.bulk_speed == 0) & (found.thermal_speed == 0)).sum())
    alike = int(((found.bulk_speed > 0) & (found.thermal_speed == 0)).sum())
    assert rest >= 10
    assert alike == 1
    ax = FIGURES["bulk_thermal"](steps, Canvas().subplots())
    labels = [text.get_text() for text in ax.get_legend().get_texts()]
    expected = f"{22 - rest - alike} shown, {rest} unchanged, 1 all moving alike"
    assert f"live tokens: {expected} of 22 steps" in labels


@pytest.mark.parametrize("held", [1 << 28, 4 * 8 * 66])
def test_lags_up_to_half_of_the_rows_or_as_many_as_may_be_held(held, run, monkeypatch):
    monkeypatch.setattr("trajstore.analysis.figures.motion._HELD", held)
    run = run.assign_coords(step=run.step * 10)
    ax = FIGURES["autocorrelation"](run, Canvas().subplots())
    lags = list(range(1, 12 if held > 1 << 20 else 5))
    expected = analysis.autocorrelation(run, lags).autocorrelation
    for line, name in zip(ax.lines, ("dead", "live"), strict=False):
        np.testing.assert_array_equal(line.get_xdata(), np.array(lags) * 10)
        np.testing.assert_array_equal(line.get_ydata(), expected.sel(population=name))
    assert ax.get_xscale() == "log"
