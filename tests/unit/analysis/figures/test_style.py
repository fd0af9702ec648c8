"""Several runs in one figure."""

from __future__ import annotations

import numpy as np
import pytest
import xarray as xr
from matplotlib.figure import Figure as Canvas

from trajstore import analysis
from trajstore.analysis.figures import FIGURES, Options, collect, draw_sheet, figures_named
from trajstore.analysis.figures.style import MOST_CURVES, mean_and_spread, run_groups
from trajstore.errors import InvalidArgument

AVERAGED = [name for name, figure in FIGURES.items() if figure.runs.averages]


@pytest.fixture
def several(run):
    """Make runs of two seeds of each setting, the gradients of each multiplied by a number."""

    def make(*factors: float, settings: int = 2) -> list[xr.Dataset]:
        return [
            run.assign(grad=run.grad * factor).assign_attrs(
                config={
                    "training": {"seed": number % 2},
                    "data": {"sigma": None if number // 2 % settings else 0.1},
                }
            )
            for number, factor in enumerate(factors)
        ]

    return make


def dead_norms(run: xr.Dataset) -> np.ndarray:
    return analysis.grad_norms(run).isel(token=run.is_dead.values).mean("token").values[1:]


def labels_of(ax) -> list[str]:
    return [text.get_text() for text in ax.get_legend().get_texts()]


def notes(ax):
    return ax.get_legend().get_title().get_text()


def test_a_run_is_labeled_by_what_differs(several):
    runs = several(1, 3, 5, 9)
    labels = [
        "sigma=0.1, seed=0",
        "sigma=0.1, seed=1",
        "sigma=unset, seed=0",
        "sigma=unset, seed=1",
    ]
    assert [(set(group.label.split(", ")), group.members) for group in run_groups(runs)] == [
        (set(label.split(", ")), (number,)) for number, label in enumerate(labels)
    ]
    assert [group.label for group in run_groups(runs[:1])] == [""]


def test_many_runs_are_grouped_by_all_but_their_seed(several):
    runs = several(*range(MOST_CURVES + 1))
    assert [(group.label, group.members) for group in run_groups(runs)] == [
        ("sigma=0.1 (5 runs)", (0, 1, 4, 5, 8)), ("sigma=unset (4 runs)", (2, 3, 6, 7)),
    ]  # fmt: skip
    (alone,) = run_groups(several(*range(9), settings=1))
    assert (alone.label, alone.members) == ("9 runs", tuple(range(9)))


def test_runs_of_one_label_are_one_curve(several):
    groups = run_groups(several(1, 3, 5), ["a", "b", "a"])
    assert [(group.label, group.members) for group in groups] == [
        ("a (2 runs)", (0, 2)), ("b (1 run)", (1,)),
    ]  # fmt: skip


def test_a_covered_curve_is_wider_and_a_note_names_what_covers_it(several, run):
    runs = several(1, 1.0001, 3)
    found = collect(
        runs, [FIGURES["grad_norms"]], Options(population="dead"), labels=["a", "b", "c"]
    )
    (ax,) = draw_sheet(found).axes
    widths = [line.get_linewidth() for line in ax.lines[:3]]
    assert widths[0] > widths[1] == widths[2]
    assert notes(ax).splitlines()[-1] == "wider, as others cover it: a under b"
    copies = collect([run, run], [FIGURES["lattice_displacement"]], Options(), labels=["a", "b"])
    (ax,) = draw_sheet(copies).axes
    below, above = (patch.get_linewidth() for patch in ax.patches[::2])
    assert below > above


def test_few_runs_have_a_line_each(several):
    runs = several(1, 3, 5)
    found = collect(
        runs, [FIGURES["grad_norms"]], Options(population="dead"), labels=["a", "b", "c"]
    )
    (ax,) = draw_sheet(found).axes
    norms = dead_norms(runs[0])
    for line, factor in zip(ax.lines, (1, 3, 5), strict=False):
        np.testing.assert_allclose(line.get_ydata(), norms * factor, rtol=1e-5)
    assert labels_of(ax) == ["a", "b", "c"]
    assert notes(ax).startswith("shown: dead tokens\n")
    assert not ax.collections
    assert "3 runs · W 11 × 6" in ax.get_title("left")


def test_labels_name_identical_lines(several):
    (ax,) = draw_sheet(collect(several(1, 1), [FIGURES["grad_norms"]], Options())).axes
    assert labels_of(ax) == ["seed=0", "seed=1 (same as no. 1)", "dead tokens", "live tokens"]


def test_mean_and_spread_of_many_end_where_values_do(several):
    factors = (1, 3, 30)
    found = collect(several(*factors), [FIGURES["grad_norms"]], Options(), labels=["x"] * 3)
    (ax,) = draw_sheet(found).axes
    norms = dead_norms(several(1)[0])
    np.testing.assert_allclose(ax.lines[0].get_ydata(), norms * np.mean(factors), rtol=1e-5)
    high = norms * (np.mean(factors) + np.std(factors, ddof=1))
    drawn = ax.collections[0].get_paths()[0].vertices[:, 1]
    np.testing.assert_allclose(drawn.max(), high.max(), rtol=1e-5)
    assert drawn.min() == 0, "no norm is below"
    assert labels_of(ax)[0] == "x (3 runs): dead tokens (4)"


@pytest.mark.parametrize("name", AVERAGED)
def test_every_figure_that_averages(name, several):
    runs = several(1, 2, 3)
    if FIGURES[name].runs.between:
        runs = [run.assign(W=run.W * (1 + number)) for number, run in enumerate(runs)]
    (ax, *_) = draw_sheet(collect(runs, [FIGURES[name]], Options(), labels=["x"] * 3)).axes
    ax.figure.canvas.draw()
    assert notes(ax).count("standard deviation between runs") == 1


def test_a_mean_has_the_dimensions_of_what_it_is_of(several):
    data = [analysis.speed(run).to_dataset(name="speed").compute() for run in several(1, 2)]
    mean, (low, high) = mean_and_spread(data, (0, np.inf))
    np.testing.assert_array_equal(mean.speed, data[0].speed)
    assert mean.speed.dims == data[0].speed.dims
    xr.testing.assert_equal(low, high)


def test_a_sheet_has_a_panel_for_what_does_not_go_into_one(several):
    for names, number, panels in ((["loss", "regimes"], 4, 1 + 4), (["loss"], 20, 1)):
        canvas = draw_sheet(collect(several(*range(number)), figures_named(names), Options()))
        axes = [ax for part in canvas.subfigs for ax in part.axes if ax.get_title("left")]
        assert len(axes) == panels
    assert axes[0].get_title("left").startswith("Training loss\n20 runs")
    many = [
        run.assign_attrs(config={"data": {"sigma": number // 2}})
        for number, run in enumerate(several(*range(19)))
    ]
    canvas = draw_sheet(collect(many, figures_named(["loss"]), Options()))
    assert len(canvas.subfigs) == 10
    assert canvas.axes[0].get_title("left") == "Training loss\nsigma=0 (2 runs)"
    (alone,) = (ax for ax in canvas.axes if ax.get_title("left").endswith("sigma=9 (1 run)"))
    assert "mean over runs" not in notes(alone)


def test_panels_of_one_label_have_the_names_of_their_runs(several):
    runs = several(1, 2)
    for run, name in zip(runs, ("first", "second"), strict=True):
        run.encoding["source"] = f"/runs/{name}.zarr"
    canvas = draw_sheet(collect(runs, [FIGURES["regimes"]], Options(), labels=["x", "x"]))
    titles = [ax.get_title("left") for part in canvas.subfigs for ax in part.axes]
    assert [title.splitlines()[1] for title in titles] == ["x (first)", "x (second)"]


def test_runs_that_one_figure_cannot_show_are_an_error(run, several):
    runs = xr.concat([run, run], "run").assign_coords(run=["a", "b"])
    with pytest.raises(InvalidArgument, match=r"regimes cannot show these runs in one axes"):
        FIGURES["regimes"](runs, Canvas().subplots())
    with pytest.raises(InvalidArgument, match="got 1 labels, expected one per run"):
        FIGURES["loss"](runs, Canvas().subplots(), labels=["a"])
    other = {"other": run.isel(step=slice(0, 9)), "labels": ["a", "a"]}
    with pytest.raises(InvalidArgument, match="different steps"):
        FIGURES["loss"](run, Canvas().subplots(), **other)
    with pytest.raises(InvalidArgument, match="size needs a new figure"):
        FIGURES["loss"](run, Canvas().subplots(), size=(3, 2))
    with pytest.raises(InvalidArgument, match="divergence compares runs, got one"):
        FIGURES["divergence"](run, Canvas().subplots())
