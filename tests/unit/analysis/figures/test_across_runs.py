"""Several runs in one figure."""

from __future__ import annotations

import numpy as np
import pytest
import xarray as xr
from matplotlib.figure import Figure as Canvas

from trajstore import analysis
from trajstore.analysis.figures import FIGURES, Options, collect, draw_sheet, figures_named
from trajstore.analysis.figures.across_runs import mean_and_spread, run_groups
from trajstore.errors import InvalidArgument


@pytest.fixture
def runs(run) -> xr.Dataset:
    """Four runs: two seeds of two settings, each a multiple of one."""
    several = xr.concat([run.assign(grad=run.grad * factor) for factor in (1, 3, 5, 9)], "run")
    seed = ("run", [1, 2, 1, 2], {"long_name": "training.seed"})
    return several.assign_coords(run=list("abcd"), seed=seed, sigma=("run", [0.1, 0.1, 2, 2]))


def test_groups_differ_in_more_than_the_seed(runs):
    assert [(group.label, group.members) for group in run_groups(runs)] == [
        ("sigma=0.1", (0, 1)), ("sigma=2.0", (2, 3)),
    ]  # fmt: skip
    (alone,) = run_groups(runs.drop_vars("sigma"))
    assert (alone.label, alone.members) == ("", (0, 1, 2, 3))


def test_mean_and_spread_are_drawn_of_each_group(runs):
    ax = FIGURES["gradients"](runs, Canvas().subplots(), population="dead")
    norms = analysis.grad_norms(runs.isel(run=0)).isel(token=runs.is_dead.values)
    one = norms.mean("token").values[1:]
    assert [line.get_label() for line in ax.get_lines()] == [
        "sigma=0.1 (2 runs): dead tokens (4)", "sigma=2.0 (2 runs): dead tokens (4)",
    ]  # fmt: skip
    for line, band, (low, high) in zip(
        ax.get_lines(), ax.collections, ((1, 3), (5, 9)), strict=True
    ):
        mean, spread = (low + high) / 2, (high - low) / np.sqrt(2)
        np.testing.assert_allclose(line.get_ydata(), one * mean, rtol=1e-5)
        drawn = band.get_paths()[0].vertices[:, 1]
        np.testing.assert_allclose(drawn.min(), (one * (mean - spread)).min(), rtol=1e-5)
        np.testing.assert_allclose(drawn.max(), (one * (mean + spread)).max(), rtol=1e-5)
    assert "4 runs · 11 × 6 W" in ax.get_title("left")
    assert len(ax.texts) == 1, "one note, which says what bands are"


@pytest.mark.parametrize("name", [name for name, figure in FIGURES.items() if figure.averages])
def test_every_figure_that_averages(name, runs):
    ax = FIGURES[name](runs.isel(run=slice(0, 3)), Canvas().subplots())  # two groups, one of one
    ax.figure.canvas.draw()
    assert any("standard deviation between runs" in text.get_text() for text in ax.texts)


def test_a_single_run_has_no_spread(runs):
    data = analysis.speed(runs.isel(run=0)).to_dataset(name="speed").compute()
    mean, spread = mean_and_spread([data])
    np.testing.assert_array_equal(mean.speed, data.speed)
    assert spread.speed.isnull().all()
    assert mean.speed.dims == data.speed.dims


def test_a_sheet_has_a_panel_for_what_does_not_go_into_one(runs):
    each = analysis.each_run(runs)
    for names, settings, panels in (
        (["loss", "hops"], runs, 1 + 4),
        (["loss"], runs.assign_coords(sigma=("run", [1, 2, 3, 3])), 3),
    ):
        figures = figures_named(names)
        found = collect(each, figures, Options(), groups=run_groups(settings))
        canvas = draw_sheet(found)
        axes = [ax for part in canvas.subfigs for ax in part.axes if ax.get_title("left")]
        assert len(axes) == panels
        assert canvas.get_suptitle().startswith("4 runs")


def test_what_is_refused(runs):
    with pytest.raises(InvalidArgument, match=r"hops cannot show these runs .* not averaged"):
        FIGURES["hops"](runs, Canvas().subplots())
    many = runs.assign_coords(sigma=("run", [1, 2, 3, 3]))
    with pytest.raises(InvalidArgument, match="they have 3 settings"):
        FIGURES["loss"](many, Canvas().subplots())
    with pytest.raises(InvalidArgument, match="there is another one"):
        FIGURES["loss"](runs, Canvas().subplots(), other=runs.isel(run=0))
