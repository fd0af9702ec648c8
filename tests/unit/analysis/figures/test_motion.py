"""Figures of motion show the numbers of the analysis."""

from __future__ import annotations

import numpy as np
import pytest
import xarray as xr
from matplotlib.figure import Figure as Canvas

from trajstore import analysis
from trajstore.analysis.figures import FIGURES, Options, collect, draw_sheet
from trajstore.analysis.figures.axes_marks import central_range
from trajstore.analysis.figures.motion import log_histogram, pooled_steps
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
    assert ax.get_yscale() == ("linear" if name == "displacement" else "log"), "plateaus are seen"
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


def test_hops(run):
    length = analysis.lattice_displacement(run, ord=1).values
    ax = FIGURES["lattice_displacement"](run, Canvas().subplots())
    for steps, members in zip(ax.patches, (run.is_dead.values, ~run.is_dead.values), strict=True):
        counts, edges, _ = steps.get_data()
        moving = length[:, members][length[:, members] > 0]
        np.testing.assert_array_equal(counts, np.histogram(moving, edges)[0])
        assert counts.sum() == moving.size
        share = f"{1 - moving.size / length[:, members].size:.1%}"
        assert f"unchanged in {share} of {length[:, members].size}" in steps.get_label()


def test_speed_density(run):
    pace = analysis.speed(run).values
    ax = FIGURES["speed_density"](run, Canvas().subplots())
    (mesh,) = ax.collections
    shown = mesh.get_array().filled(0)
    np.testing.assert_array_equal(shown.sum(0), (pace > 0).sum(1))
    assert (
        f"unchanged, not shown: {(pace == 0).mean():.1%}" in ax.get_legend().get_title().get_text()
    )


def test_steps_are_pooled_and_none_left_out(run, monkeypatch):
    counts = log_histogram(analysis.speed(run).compute())["count"].sel(population="all")
    monkeypatch.setattr("trajstore.analysis.figures.motion._COLUMNS", 5)
    pooled, width = pooled_steps(counts)
    assert width == 5
    assert pooled.step.values.tolist() == [1, 6, 11, 16, 21]
    np.testing.assert_array_equal(pooled.sum("step"), counts.sum("step"))
    np.testing.assert_array_equal(pooled[0], counts[:5].sum("step"))
    ax = FIGURES["speed_density"](run, Canvas().subplots())
    bar = next(other for other in ax.figure.axes if other is not ax)
    assert bar.get_ylabel() == "tokens × steps, 5 steps per column"


def test_outliers_are_beyond_the_axis_and_counted():
    edges = np.logspace(0, 6, 7)
    assert central_range(edges, np.array([0, 1, 5000, 5000, 0, 1])) == (100, 10_000)
    assert central_range(edges, np.array([0, 20, 5000, 5000, 0, 1])) == (10, 10_000)


def values(chunks=None):
    rng = np.random.default_rng(0)
    data = 10 ** rng.uniform(-4, 4, (5, 40))
    data[0, :6] = [0, np.nan, np.inf, -1, 1.0, 0.1]
    da = xr.DataArray(data, dims=("step", "token"), name="length")
    da = da.assign_coords(is_dead=("token", np.arange(40) % 3 == 0))
    return da.chunk(chunks) if chunks else da


@pytest.mark.parametrize("chunks", [None, {"step": 2, "token": 7}])
def test_every_token_is_counted_once(chunks):
    da = values(chunks)
    found = log_histogram(da, -3, 3, 2).compute()
    edges = np.append(found.lower, found.upper[-1])
    np.testing.assert_allclose(edges, np.logspace(-3, 3, 13))
    for population, members in (
        ("dead", da.is_dead.values),
        ("live", ~da.is_dead.values),
        ("all", slice(None)),
    ):
        part = found.sel(population=population)
        for row in range(5):
            numbers = da.values[row, members]
            inside = numbers[np.isfinite(numbers) & (numbers > 0)]
            # The last class of NumPy's takes its upper edge as well, and nothing lies on it.
            np.testing.assert_array_equal(part["count"][row], np.histogram(inside, edges)[0])
            assert part.zero[row] == (numbers == 0).sum()
            assert part.nan[row] == np.isnan(numbers).sum()
        total = part["count"].sum("value_class") + part.zero + part.outside + part.nan
        assert (total == da.values[0, members].size).all()
    assert found.outside.sel(population="all")[0] >= 2  # −1 and infinity


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
