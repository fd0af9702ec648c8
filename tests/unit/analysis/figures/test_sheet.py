"""All figures and their options, several runs in one figure, several figures on a sheet, files."""

from __future__ import annotations

import matplotlib
import numpy as np
import pytest
import xarray as xr
from drawn_figures import drawn, labels_of, notes
from matplotlib import pyplot
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure as Canvas

from trajstore import analysis
from trajstore.analysis.figures import FIGURES, Options, collect, draw_sheet, figures_named, save
from trajstore.analysis.figures.axes_marks import add_legend, set_log, set_title
from trajstore.analysis.figures.figure import in_style
from trajstore.analysis.figures.style import MOST_CURVES, mean_and_spread, run_groups
from trajstore.errors import InvalidArgument, RunExists, VariableNotRecorded

NEEDS = {
    "loss": "loss",
    "grad_norms": "grad",
    "freeze_cause": "grad",
    "moments": "exp_avg",
    "moment_sizes": "exp_avg",
    "moment_tracks": "exp_avg",
    "logit_stats": "logits",
    "param_update_lost": "param_update_lost",
    "layers": "param_norm",
}
ALONE = [name for name, figure in FIGURES.items() if not figure.runs.between]
AVERAGED = [figure for figure in FIGURES.values() if figure.runs.averages]


def sheet(runs, *names, labels=None, population=None, **options):
    options = Options(population=population, **options)
    return collect(runs, figures_named(names), options, labels=labels)


def titled(canvas):
    """Axes of the panels, without those of color bars and second scales."""
    return [ax for ax in canvas.axes if ax.get_title("left")]


@pytest.fixture(scope="module")
def together(run):
    return sheet([run.chunk(step=6, token=4)], "all")


@pytest.mark.nightly
@pytest.mark.parametrize("name", ALONE)
def test_a_figure_shows_the_same_alone_and_with_all(name, run, together):
    assert sheet([run], name).data[name][0].identical(together.data[name][0])


def test_all_figures_have_titles_and_labels(together):
    assert together.figures == figures_named(["all"])
    canvas = draw_sheet(together)
    assert "W 11 × 6, AdamW, bfloat16" in canvas.get_suptitle()
    axes = titled(canvas)
    titles = [ax.get_title("left").replace("\n", " ") for ax in axes]
    assert titles == [FIGURES[name].title for name in ALONE]
    assert all(ax.get_xlabel() and ax.get_ylabel() for ax in axes)


@pytest.mark.parametrize("name", ALONE)
def test_missing_variables_and_rows_are_named(name, run):
    figure, missing = FIGURES[name], NEEDS.get(name, "W")
    with pytest.raises(VariableNotRecorded, match=rf"\b{missing}\b"):
        figure(run.drop_vars(missing))
    rows = figure.computation.rows
    for few in range(rows):
        message = f"{name} needs at least {rows} rows, and the run has {few}"
        with pytest.raises(InvalidArgument, match=message):
            figure(run.isel(step=slice(few)))


def test_a_run_that_has_just_begun_is_drawn(run):
    for rows in (1, 2, 3):
        figures = [FIGURES[name] for name in ALONE if FIGURES[name].computation.rows == rows]
        draw_sheet(collect([run.isel(step=slice(rows))], figures, Options()), style="dark")


@pytest.mark.nightly
@pytest.mark.parametrize("name", ALONE)
def test_one_token_nan_no_dead_ones_none_known_and_none_that_move(name, run):
    one = run.isel(token=[3])
    drawn(name, one.assign(W=one.W.where(one.step < 5)))
    drawn(name, run.isel(token=(~run.is_dead.values).nonzero()[0]))
    drawn(name, run.drop_vars("is_dead"))
    still = drawn(name, run.assign(W=run.W.where(False, 1.0)))  # nothing ever moves
    FigureCanvasAgg(still.figure).draw()


def test_options_that_a_figure_does_not_have_are_refused(run):
    flat, few = Canvas().add_subplot(), run.isel(step=slice(9))
    for name, options, message in (
        ("loss", {"colour_map": "jet"}, "'colour_map'.* options among other, style"),
        ("loss", {"style": "blue"}, "expected light or dark"),
        ("loss", {"log": "z"}, "got log='z'"),
        ("loss", {"population": "dead"}, "has no populations"),
        ("loss", {"lattice": "float32"}, "has no lattice"),
        ("loss", {"metric": "rms"}, "not a figure of layers"),
        ("loss", {"labels": ["a", "b"]}, "got 2 labels, expected one per run"),
        ("loss", {"other": few, "labels": ["a", "a"]}, "different steps"),
        ("loss", {"ax": flat, "size": (3, 2)}, "size needs a new figure"),
        ("sky", {"ax": flat}, "got rectilinear axes, expected mollweide; make"),
        ("trajectory", {"plane": "top"}, "got plane='top'"),
        ("heatmap", {"log": "y"}, "leave out log"),
        ("regimes", {"other": run}, "cannot show these runs in one axes"),
        ("speed", {"population": "undead"}, "got the population 'undead'"),
        ("divergence", {}, "divergence compares runs, got one"),
    ):
        with pytest.raises(InvalidArgument, match=message):
            FIGURES[name](run, **options)


def test_figures_without_their_variables_are_left_out_with_a_reason(run):
    names = ["loss", "grad_norms", "regimes", "moments"]
    options = Options(lattice="float16")  # which some of them do not have
    few = run.drop_vars(["grad", "exp_avg"])
    found = collect([few], figures_named(names), options, leave_out=True)
    assert set(found.left_out) == {"grad_norms", "moments"}
    assert "grad" in found.left_out["grad_norms"]
    assert len(titled(draw_sheet(found))) == 2
    with pytest.raises(InvalidArgument, match="none of these figures can be drawn: loss: loss nee"):
        collect([run.isel(step=slice(0))], figures_named(["all"]), Options(), leave_out=True)


def test_title_size_and_scales(run):
    alone, two = sheet([run], "loss", labels=["mine"]), sheet([run], "loss", "speed")
    assert draw_sheet(alone).axes[0].get_title("left").startswith("Training loss\nmine · ")
    canvas = draw_sheet(alone, title="Mine", size=(3, 2), log="x")
    assert canvas.axes[0].get_title("left") == "Mine"
    assert canvas.get_size_inches().tolist() == [3, 2]
    assert (canvas.axes[0].get_xscale(), canvas.axes[0].get_yscale()) == ("log", "linear")
    assert draw_sheet(two, title="Mine").get_suptitle() == "Mine"
    with pytest.raises(InvalidArgument, match="for several figures; draw a single figure"):
        draw_sheet(two, log="y")


def test_a_sheet_is_saved_in_each_format(run, tmp_path):
    canvas = draw_sheet(sheet([run], "loss"), style="dark")
    for ending, begin in (("png", b"\x89PNG"), ("svg", b"<?xm"), ("pdf", b"%PDF")):
        assert save(canvas, tmp_path / f"loss.{ending}", dpi=50).read_bytes()[:4] == begin
    with pytest.raises(RunExists):
        save(canvas, tmp_path / "loss.png")
    save(canvas, tmp_path / "loss.png", overwrite=True, dpi=50)
    for name, message in (("loss.bmp", "one of the extensions"), ("a.png", "got 5 dpi")):
        with pytest.raises(InvalidArgument, match=message):
            save(canvas, tmp_path / name, dpi=5)
    assert {file.name for file in tmp_path.iterdir()} == {"loss.png", "loss.svg", "loss.pdf"}


def test_kinds_by_name():
    def names(*given):
        return [figure.name for figure in figures_named(given)]

    assert names("discontinuities", "loss", "discontinuities") == ["discontinuities", "loss"]
    assert names("loss", "all") == ALONE
    assert names("last-motion", "last_motion") == ["last_motion"]
    assert len(figures_named(["all"], runs=2)) == len(FIGURES)
    assert FIGURES["freeze-cause"] is FIGURES["freeze_cause"]
    assert "freezecause" not in FIGURES
    with pytest.raises(
        InvalidArgument, match=r"'flm' \(did you mean 'film'\?\), .* of all, loss,.*, film$"
    ):
        figures_named(["flm"])


def test_the_first_figure_of_a_notebook_leaves_it_interactive(run, monkeypatch):
    make = pyplot.figure

    def load_backend(*args, **kwargs):
        matplotlib.interactive(True)
        return make(*args, **kwargs)

    monkeypatch.setitem(matplotlib.rcParams, "interactive", False)
    monkeypatch.setattr(pyplot, "figure", load_backend)
    assert FIGURES["loss"](run, style="dark").figure.get_facecolor()[:3] == (0, 0, 0)
    assert matplotlib.is_interactive()
    assert run.traj.plot.sky().name == "mollweide"


@pytest.fixture
def several(run):
    """Make runs of two seeds of each setting, the gradients of each multiplied by a number."""
    small = run[["W", "grad", "loss", "exp_avg", "exp_avg_sq"]]

    def make(*factors: float, settings: int = 2) -> list[xr.Dataset]:
        return [
            small.assign(grad=small.grad * factor).assign_attrs(
                config={
                    "training": {"seed": number % 2},
                    "data": {"sigma": None if number // 2 % settings else 0.1},
                }
            )
            for number, factor in enumerate(factors)
        ]

    return make


def dead_norms(run):
    return analysis.grad_norms(run).isel(token=run.is_dead.values).mean("token").values[1:]


def test_runs_are_grouped_and_labeled_by_what_differs(several):
    def groups(runs, labels=None):
        return [(group.label, group.members) for group in run_groups(runs, labels)]

    four = groups(several(1, 3, 5, 9))
    assert [(set(label.split(", ")), members) for label, members in four] == [
        ({f"sigma={sigma}", f"seed={seed}"}, (number,))
        for number, (sigma, seed) in enumerate([(0.1, 0), (0.1, 1), ("unset", 0), ("unset", 1)])
    ]
    assert groups(several(1)) == [("", (0,))]
    # Many runs are grouped by all but their seed.
    assert groups(several(*range(MOST_CURVES + 1))) == [
        ("sigma=0.1 (5 runs)", (0, 1, 4, 5, 8)), ("sigma=unset (4 runs)", (2, 3, 6, 7)),
    ]  # fmt: skip
    assert groups(several(*range(9), settings=1)) == [("9 runs", tuple(range(9)))]
    assert groups(several(1, 3, 5), ["a", "b", "a"]) == [
        ("a (2 runs)", (0, 2)),
        ("b (1 run)", (1,)),
    ]


def test_few_runs_have_a_line_each_and_a_covered_one_is_wider(several, run):
    runs = several(1, 1.0001, 3)
    found = sheet(runs, "grad_norms", labels=["a", "b", "c"], population="dead")
    (ax,) = draw_sheet(found).axes
    norms = dead_norms(runs[0])
    for line, factor in zip(ax.lines, (1, 1.0001, 3), strict=False):
        np.testing.assert_allclose(line.get_ydata(), norms * factor, rtol=1e-5)
    assert not ax.collections
    assert labels_of(ax) == ["a", "b", "c"]
    widths = [line.get_linewidth() for line in ax.lines[:3]]
    assert widths[0] > widths[1] == widths[2]
    assert notes(ax).startswith("shown: dead tokens ")
    assert notes(ax).endswith("wider, as others cover it: a under b")
    (ax,) = draw_sheet(sheet([run, run], "lattice_displacement", labels=["a", "b"])).axes
    below, above = (patch.get_linewidth() for patch in ax.patches[::2])
    assert below > above
    assert labels_of(ax)[:2] == ["a", "b (same as no. 1)"]


def test_mean_and_spread_of_many_end_where_values_do(several):
    factors = (1, 3, 30)
    (ax,) = draw_sheet(sheet(several(*factors), "grad_norms", labels=["x"] * 3)).axes
    norms = dead_norms(several(1)[0])
    np.testing.assert_allclose(ax.lines[0].get_ydata(), norms * np.mean(factors), rtol=1e-5)
    high = norms * (np.mean(factors) + np.std(factors, ddof=1))
    drawn = ax.collections[0].get_paths()[0].vertices[:, 1]
    np.testing.assert_allclose(drawn.max(), high.max(), rtol=1e-5)
    assert drawn.min() == 0, "no norm is below"


@pytest.mark.nightly
def test_every_figure_that_averages(several):
    runs = [run.isel(step=slice(9)) for run in several(1, 2, 3)]
    axes = titled(draw_sheet(collect(runs, AVERAGED, Options(), labels=["x"] * 3)))
    shown = [notes(ax).count("standard deviation between runs") for ax in axes]
    assert shown == [1] * len(AVERAGED)


def test_a_mean_has_the_dimensions_and_the_nan_of_what_it_is_of(several):
    speeds = [analysis.speed(run).to_dataset(name="speed").compute() for run in several(1, 2)]
    speeds[1].speed[3] = np.nan
    mean, (low, high) = mean_and_spread(speeds, (0, np.inf))
    xr.testing.assert_equal(mean.speed, speeds[0].speed.where(speeds[1].speed.notnull()))
    xr.testing.assert_equal(low, high)


def test_a_sheet_has_a_panel_for_what_does_not_go_into_one(several):
    runs = several(*range(20))
    assert len(titled(draw_sheet(sheet(runs[:2], "loss", "regimes", labels=["x", "y"])))) == 1 + 2
    (ax,) = titled(draw_sheet(sheet(runs, "loss")))
    assert ax.get_title("left").startswith("Training loss\n20 runs")
    labels = [f"sigma={number // 2}" for number in range(19)]
    axes = titled(draw_sheet(sheet(runs[:19], "loss", labels=labels)))
    parts = [ax.get_title("left").splitlines()[1] for ax in axes]
    assert parts == [*(f"sigma={number} (2 runs)" for number in range(9)), "sigma=9 (1 run)"]
    assert "mean over runs" not in notes(axes[-1])
    for run, name in zip(runs, ("first", "second"), strict=False):
        run.encoding["source"] = f"/runs/{name}.zarr"
    axes = titled(draw_sheet(sheet(runs[:2], "regimes", labels=["x", "x"])))
    assert [ax.get_title("left").splitlines()[1] for ax in axes] == ["x (first)", "x (second)"]


def legend_of(labels, width=8, layout="constrained"):
    canvas = Canvas(figsize=(width, 5), layout=layout)
    ax = canvas.subplots()
    for label in labels:
        ax.plot([1, 2], label=label)
    set_title(ax, "title " * 20)
    with in_style("light"):
        add_legend(ax, ["a note"])
    canvas.draw_without_rendering()
    return ax, ax.get_legend()


def test_a_legend_is_below_the_axes_if_a_layout_makes_room_and_texts_are_wrapped():
    # One long label does not make one column.
    labels = ["short"] * 6 + ["a label that takes half of the width of the figure"]
    ax, legend = legend_of(labels)
    assert len({text.get_window_extent().x0 for text in legend.get_texts()}) >= 3
    assert legend.get_window_extent().x1 <= ax.bbox.x1
    assert 0 <= legend.get_window_extent().y0 <= legend.get_window_extent().y1 < ax.bbox.y0
    ax, legend = legend_of(labels, layout=None)
    assert legend.get_window_extent().y0 > ax.bbox.y0
    ax, legend = legend_of(["setting=1, " * 12], width=3)
    assert "\n" in legend.get_texts()[0].get_text()
    assert ax.title.get_window_extent().width <= ax.figure.bbox.width


def test_a_short_logarithmic_axis_has_plain_numbers():
    ax = Canvas().subplots()
    set_log(ax, "y")
    for low, label in ((0.15, "0.2"), (1e-9, r"$\mathdefault{10^{-6}}$")):
        ax.set_ylim(low, 3.5)
        ax.figure.draw_without_rendering()
        assert label in {tick.get_text() for tick in ax.get_yticklabels(which="both")}
