"""Several figures together, and files."""

from __future__ import annotations

import matplotlib
import pytest
from matplotlib import pyplot
from matplotlib.axes import Axes
from matplotlib.figure import Figure as Canvas

from trajstore.analysis.figures import FIGURES, Options, collect, draw_sheet, figures_named, save
from trajstore.analysis.several_quantities import ACROSS_RUNS, QUANTITIES
from trajstore.analysis.several_quantities import ALONE as OWN_OPTIONS
from trajstore.errors import InvalidArgument, RunExists, VariableNotRecorded
from trajstore.schema import VARIABLES


def test_all_at_once_show_what_each_shows_alone(run):
    found = collect([run], figures_named(["all"]), Options())
    assert found.figures == figures_named(["all"])
    for name, (data,) in found.data.items():
        alone = collect([run], [FIGURES[name]], Options()).data[name][0]
        assert alone.identical(data), name


def test_figures_without_their_variables_are_left_out_with_a_reason(run):
    run = run.drop_vars(["grad", "exp_avg"])
    found = collect([run], figures_named(["all"]), Options(), leave_out=True)
    moments = {"moments", "moment_sizes", "moment_tracks"}
    assert set(found.left_out) == {"grad_norms", "freeze_cause", *moments}
    assert "grad" in found.left_out["grad_norms"]
    axes = [ax for part in draw_sheet(found).subfigs for ax in part.axes if ax.get_title("left")]
    assert len(axes) == len(figures_named(["all"])) - len(found.left_out)
    with pytest.raises(InvalidArgument, match="none of these figures can be drawn: loss: loss nee"):
        collect([run.isel(step=slice(0, 0))], figures_named(["all"]), Options(), leave_out=True)


def test_only_a_single_figure_takes_log(run):
    found = collect([run], figures_named(["loss", "speed"]), Options())
    with pytest.raises(InvalidArgument, match="for several figures; draw a single figure"):
        draw_sheet(found, log="y")
    alone = collect([run], figures_named(["loss"]), Options())
    assert draw_sheet(alone, log="y").axes[0].get_yscale() == "log"


def test_a_custom_title_and_size(run):
    alone = collect([run], figures_named(["loss"]), Options(), labels=["mine"])
    assert draw_sheet(alone).axes[0].get_title("left").startswith("Training loss\nmine · ")
    canvas = draw_sheet(alone, title="Mine", size=(3, 2))
    assert canvas.axes[0].get_title("left") == "Mine"
    assert canvas.get_size_inches().tolist() == [3, 2]
    sheet = collect([run], figures_named(["loss", "speed"]), Options())
    assert draw_sheet(sheet, title="Mine").get_suptitle() == "Mine"
    with pytest.raises(InvalidArgument, match="got 2 labels, expected one per run"):
        collect([run], figures_named(["loss"]), Options(), labels=["a", "b"])


@pytest.mark.parametrize("ending", ["png", "svg", "pdf"])
def test_a_sheet_is_saved_in_each_format(ending, run, tmp_path):
    canvas = draw_sheet(collect([run], figures_named(["loss"]), Options()), style="dark")
    path = save(canvas, tmp_path / f"loss.{ending}", dpi=50)
    assert path.read_bytes()[:4] in (b"\x89PNG", b"<?xm", b"%PDF")
    with pytest.raises(RunExists, match="already exists"):
        save(canvas, path)
    save(canvas, path, overwrite=True, dpi=50)
    assert [file.name for file in tmp_path.iterdir()] == [path.name]
    with pytest.raises(InvalidArgument, match="one of the extensions"):
        save(canvas, tmp_path / "loss.bmp")
    with pytest.raises(InvalidArgument, match="got 5 dpi"):
        save(canvas, tmp_path / "other.png", dpi=5)


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
OF_EACH_KIND = {
    (FIGURES[name].runs.overlays, FIGURES[name].options): name for name in ALONE
}.values()


def axes_of(name):
    return Canvas().add_subplot(projection=FIGURES[name].projection)


def drawn(name, ds, **options):
    ax = axes_of(name)
    assert FIGURES[name](ds, ax, **options) is ax
    ax.figure.canvas.draw()
    return ax


@pytest.mark.parametrize("name", ALONE)
def test_it_draws_titled_and_labelled_into_the_axes_it_is_given(name, run):
    ax = drawn(name, run, style="dark" if name in ("loss", "regimes") else "light")
    assert isinstance(ax, Axes)
    assert "W 11 × 6, AdamW, bfloat16" in ax.get_title("left")
    assert ax.get_xlabel()
    assert ax.get_ylabel()


@pytest.mark.parametrize("name", ALONE)
def test_what_is_missing_is_named(name, run):
    missing = NEEDS.get(name, "W")
    with pytest.raises(VariableNotRecorded, match=rf"\b{missing}\b"):
        FIGURES[name](run.drop_vars(missing), axes_of(name))


@pytest.mark.parametrize("name", ALONE)
def test_a_run_that_has_just_begun(name, run):
    with pytest.raises(InvalidArgument, match=f"{name} needs at least . rows, and the run has 0"):
        FIGURES[name](run.isel(step=slice(0, 0)), axes_of(name))
    rows = FIGURES[name].computation.rows
    if rows > 1:
        with pytest.raises(InvalidArgument, match=f"at least {rows} rows, and the run has 1"):
            FIGURES[name](run.isel(step=[0]), axes_of(name))
    drawn(name, run.isel(step=slice(0, rows)))


@pytest.mark.nightly
@pytest.mark.parametrize("name", ALONE)
def test_one_token_nan_no_dead_ones_none_known_and_none_that_move(name, run):
    one = run.isel(token=[3])
    drawn(name, one.assign(W=one.W.where(one.step < 5)))
    drawn(name, run.isel(token=(~run.is_dead.values).nonzero()[0]))
    drawn(name, run.drop_vars("is_dead"))
    drawn(name, run.assign(W=run.W.where(False, 1.0)))  # nothing ever moves


@pytest.mark.parametrize("name", OF_EACH_KIND)
def test_options_that_it_does_not_have_are_refused(name, run):
    figure = FIGURES[name]
    with pytest.raises(InvalidArgument, match=r"'colour_map'.* options among other, style"):
        figure(run, colour_map="jet")
    with pytest.raises(InvalidArgument, match="expected light or dark"):
        figure(run, axes_of(name), style="blue")
    with pytest.raises(InvalidArgument, match="population"):
        figure(run, population="undead")
    other = {"other": run.isel(step=slice(0, 9))} if figure.runs.overlays else {}
    if not figure.runs.overlays:
        with pytest.raises(InvalidArgument, match="cannot show these runs in one axes"):
            figure(run, other=run)
    if "log" in figure.options:
        ax = drawn(name, run, log="x", **other)
        assert (ax.get_xscale(), ax.get_yscale()) == ("log", "linear")
        with pytest.raises(InvalidArgument, match="got log='z'"):
            figure(run, log="z")
    else:
        with pytest.raises(InvalidArgument, match="leave out log"):
            figure(run, log="y")


def test_a_sky_needs_axes_of_its_projection(run):
    with pytest.raises(InvalidArgument, match="got rectilinear axes, expected mollweide; make"):
        run.traj.plot.sky(Canvas().subplots())
    assert run.traj.plot.sky().name == "mollweide"


def test_kinds_by_name():
    assert [
        figure.name for figure in figures_named(["discontinuities", "loss", "discontinuities"])
    ] == [
        "discontinuities",
        "loss",
    ]
    assert [figure.name for figure in figures_named(["loss", "all"])] == ALONE
    assert len(figures_named(["all"], runs=2)) == len(FIGURES)
    assert [figure.name for figure in figures_named(["last-motion", "last_motion"])] == [
        "last_motion"
    ]
    assert FIGURES["freeze-cause"] is FIGURES["freeze_cause"]
    assert "freezecause" not in FIGURES
    with pytest.raises(KeyError):
        FIGURES["freezecause"]
    with pytest.raises(InvalidArgument, match=r"got 'lss' .*'loss'.* one or more of all, loss"):
        figures_named(["lss"])
    with pytest.raises(
        InvalidArgument, match=r"'flm' \(did you mean 'film'\?\), .* loss,.*, film$"
    ):
        figures_named(["flm"])


def test_a_figure_of_one_quantity_has_its_name():
    drawn_otherwise = {
        "heatmap", "last_motion", "moment_tracks", "moments", "spectrum", "speed_density",
        "trajectory",
    }  # fmt: skip
    quantities = {*QUANTITIES, *OWN_OPTIONS, *ACROSS_RUNS, *VARIABLES}
    assert {name for name in FIGURES if name not in quantities} == drawn_otherwise


def test_the_first_figure_of_a_notebook_leaves_it_interactive(run, monkeypatch):
    make = pyplot.figure

    def load_backend(*args, **kwargs):
        matplotlib.interactive(True)
        return make(*args, **kwargs)

    monkeypatch.setitem(matplotlib.rcParams, "interactive", False)
    monkeypatch.setattr(pyplot, "figure", load_backend)
    assert FIGURES["loss"](run, style="dark").figure.get_facecolor()[:3] == (0, 0, 0)
    assert matplotlib.is_interactive()
