"""What each frame of a film shows, and its files; figures of training show what was recorded."""

from __future__ import annotations

import numpy as np
import pytest
import xarray as xr
from bits_and_calls import parameter_table
from drawn_figures import drawn, notes
from matplotlib import rc_context
from matplotlib.colors import LogNorm
from matplotlib.figure import Figure as Canvas
from matplotlib.text import Text
from PIL import Image

from trajstore import analysis
from trajstore.analysis.figures import FIGURES, Options, RunStyle, figures_of
from trajstore.analysis.figures.film import _chosen_rows, film, save_film
from trajstore.analysis.figures.training import MOST_CELLS
from trajstore.analysis.scan.scan import Scan
from trajstore.analysis.several_quantities import compute_named
from trajstore.errors import InvalidArgument, RunExists, VariableNotRecorded
from trajstore.populations import row_vectors
from trajstore.schema import EVALUATION


def made(run, **options):
    """A film that may be deleted without being shown."""
    animation = film(run, **options)
    animation._draw_was_started = True
    return animation


def texts_of(animation, frame):
    """Step, number of frozen tokens and cursor of a frame."""
    animation._draw_frame(frame)
    plane, below = animation._fig.axes
    frozen = animation._fig.legends[0].get_texts()[-1].get_text()
    return plane.texts[0].get_text(), frozen, np.unique(below.lines[1].get_xdata()).tolist()


def test_each_frame_shows_its_row(run):
    position = analysis.pca(run, components=2).scores.values
    since = analysis.freeze(run, min_unchanged=3).frozen_since.values
    dead = run.is_dead.values
    animation = made(run, min_unchanged=3)
    assert animation._save_count == 23
    plane, below = animation._fig.axes
    for row in (0, 12, 22):
        still = (since >= 0) & (since <= row)
        counts = f"frozen ({(dead & still).sum()} dead, {(~dead & still).sum()} live)"
        assert texts_of(animation, row) == (f"step {row}", counts, [row])
        groups = (dead & ~still, dead & still, ~dead & ~still, ~dead & still)
        for dots, members in zip(plane.lines, groups, strict=False):
            np.testing.assert_array_equal(dots.get_xydata(), position[row, members])
        for lines, members in zip(plane.collections, groups[::2], strict=True):
            tails = np.array(lines.get_segments())
            expected = position[max(0, row - 6) : row + 1, members].transpose(1, 0, 2)
            np.testing.assert_array_equal(tails, expected)
    assert still.any()
    np.testing.assert_allclose(np.diff(plane.get_xlim()), 1.1 * np.ptp(position[..., 0]))
    np.testing.assert_array_equal(below.lines[0].get_ydata(), run.loss.values)
    dead, frozen_dead, live, frozen_live, _ = plane.lines
    fronts = [line.zorder for line in (frozen_live, frozen_dead, live, dead)]
    assert fronts == sorted(fronts)
    assert live.get_color() == frozen_live.get_markeredgecolor() != dead.get_color()


def test_frames_are_chosen_by_motion_or_evenly():
    position = np.zeros((101, 2, 2), np.float32)
    position[1:11, :, 0] = np.arange(1, 11)[:, None]  # at first fast, then slow
    position[11:, :, 0] = 10 + np.arange(90)[:, None] / 90
    assert _chosen_rows(position, 12, False).tolist() == [*range(11), 100]
    assert _chosen_rows(position, 5, True).tolist() == [0, 25, 50, 75, 100]
    assert _chosen_rows(position * np.nan, 5, False).tolist() == [0, 100]
    assert _chosen_rows(position, 200, False).tolist() == [*range(101)]


def test_windows_and_populations(run):
    animation = made(run, frames="even:4", steps="5:15", population="live", style="dark")
    texts = [texts_of(animation, frame) for frame in range(4)]
    assert texts == [(f"step {step}", "frozen (0)", [step]) for step in (5, 8, 11, 14)]
    assert animation._fig.get_facecolor()[:3] == (0, 0, 0)
    np.testing.assert_array_equal(
        animation._fig.axes[1].lines[0].get_ydata(), run.loss.values[5:15]
    )
    within = made(run, steps="5:15", within=True)._fig.axes[0].get_title("left")
    assert "computed from steps 5 to 14 alone" in " ".join(within.split())


def test_runs_without_loss_or_with_many_tokens(make_run):
    W = np.random.default_rng(0).normal(size=(3, 501, 2)).astype("f4")
    animation = made(make_run(W, native="float32", is_dead=np.arange(501) < 200))
    animation._draw_frame(2)
    (plane,) = animation._fig.axes
    assert [lines.get_segments() for lines in plane.collections] == [[], []]


def test_moving_pictures_frames_and_a_player(run, tmp_path):
    animation = made(run, frames="even:2", size=(2, 2))
    reports, path = [], tmp_path / "film.gif"
    path.write_text("mine")
    with pytest.raises(RunExists, match="already exists; choose another path, or replace it"):
        save_film(animation, path)
    assert path.read_text() == "mine"
    for ending in ("gif", "webp"):
        path = tmp_path / f"film.{ending}"
        save_film(animation, path, overwrite=True, report=lambda *of: reports.append(of))
        with Image.open(path) as picture:
            assert (picture.format.lower(), picture.n_frames) == (ending, 2)
            assert picture.convert("RGB").getpixel((1, 1)) == (255, 255, 255)
            assert picture.size == (220, 220)
    assert reports == [(0, 2), (1, 2)] * 2
    folder, still = tmp_path / "frames", tmp_path / "film.png"
    save_film(animation, folder)
    save_film(animation, still)
    first, second, last = (
        np.asarray(Image.open(path)) for path in (*sorted(folder.iterdir()), still)
    )
    assert not np.array_equal(first, second)
    np.testing.assert_array_equal(second, last)
    with pytest.raises(RunExists, match="is a folder; choose another path"):
        save_film(animation, folder, overwrite=True)
    assert len([*tmp_path.iterdir()]) == 4, "nothing else is left"


@pytest.mark.nightly
def test_a_notebook_shows_a_player(run):
    assert "<script" in made(run, frames="even:2", size=(2, 2))._repr_html_()


def test_wrong_options_and_outputs_write_no_film(run, tmp_path):
    for ds, options, message in (
        (run, {"frames": 1}, "got frames=1, expected a number from 2 to 1,000, or even:NUMBER"),
        (run, {"frames": "odd:5"}, "got frames='odd:5'"),
        (run, {"steps": "3"}, "film needs at least 2 rows, and the window has 1"),
        (run, {"lattice": "bfloat16"}, "film has no lattice"),
        (run, {"speed": 2}, "got 'speed'"),
        (run.expand_dims(run=2), {}, "film shows one run, got 2; choose one"),
    ):
        with pytest.raises(InvalidArgument, match=message):
            film(ds, **options)
    with rc_context({"animation.ffmpeg_path": "not installed"}):
        for name, message in (
            ("film.avi", r"extensions \.gif, .* or a folder without"),
            ("film.mp4", r"ffmpeg, .* or write \.gif or \.webp"),
        ):
            with pytest.raises(InvalidArgument, match=message):
                save_film(None, tmp_path / name)
    assert list(tmp_path.iterdir()) == []


def test_logits(run):
    expected = analysis.logit_stats(run).isel(step=slice(1, None))
    ax = drawn("logit_stats", run)
    np.testing.assert_array_equal(ax.lines[0].get_ydata(), expected.entropy)
    (right,) = (other for other in ax.figure.axes if other is not ax)
    np.testing.assert_array_equal(right.lines[0].get_ydata(), expected.dead_mass)
    heights = ax.collections[0].get_paths()[0].vertices[:, 1]
    assert np.isin([*expected.logit_max, *expected.logit_min], heights).all()
    whole = run.assign_attrs(recording={"vocabulary": 11})
    with pytest.raises(InvalidArgument, match="all 11 tokens of the vocabulary, got 3"):
        drawn("logit_stats", whole.isel(token=slice(0, 3)))


def test_moments(run):
    expected = analysis.moment_plane(run).compute()
    ax = drawn("moments", run, population="dead")
    mesh = ax.collections[0]
    part = expected.sel(population="dead")
    np.testing.assert_array_equal(mesh.get_array().filled(0), part["count"].values.T)
    line = expected.threshold.sel(quantile=0.5)
    np.testing.assert_array_equal(ax.lines[0].get_ydata(), line)
    np.testing.assert_array_equal(ax.lines[0].get_xdata(), expected.root)


KINDS = ("attn.weight", "mlp.weight")


def model(layers):
    """Norms of two kinds of layers, in the order of a model."""
    names = ["gpt.wte", *(f"gpt.h.{layer}.{kind}" for layer in range(layers) for kind in KINDS)]
    norms = np.arange(4 * len(names), dtype="f4").reshape(4, -1)
    return xr.Dataset(
        {"param_norm": (("step", "parameter"), norms)}, {"step": np.arange(4), "parameter": names}
    )


def test_a_map_groups_layers_by_kind():
    few = model(5)
    ax = drawn("layers", few)
    (mesh,) = ax.collections
    order = [0, *range(1, 11, 2), *range(2, 11, 2)]
    shown = mesh.get_array().reshape(11, 4)
    np.testing.assert_array_equal(shown, few.param_norm.values.T[order])
    labels = [label.get_text() for label in ax.get_yticklabels()]
    assert labels[:3] == ["wte", "h.0.attn.weight", "h.1.attn.weight"]
    assert isinstance(mesh.norm, LogNorm)
    assert [line.get_ydata()[0] for line in ax.lines] == [0.5, 5.5]
    assert "zeros, not shown: 1 layers × steps" in notes(ax)
    ax = drawn("layers", model(20))  # too many to name each
    labels = [label.get_text() for label in ax.get_yticklabels()]
    assert labels == ["wte", "h.*.attn.weight", "h.*.mlp.weight"]
    assert ax.get_yticks().tolist() == [0, 10.5, 30.5]


def test_chosen_layers_are_curves():
    few = model(5)
    ax = few.traj.plot.layers(parameters="*.3.mlp.weight, *wte", steps="1:")
    assert [line.get_label() for line in ax.lines] == ["wte", "h.3.mlp.weight"]
    np.testing.assert_array_equal(ax.lines[1].get_ydata(), few.param_norm[1:, 8])
    with pytest.raises(InvalidArgument, match=r"parameter=\*.9.\*, which no layer matches; .*wte"):
        few.traj.plot.layers(parameters="*.9.*")


def test_metrics_of_few_steps_without_vectors():
    """An update, thinned; a vector has no spectral norm."""
    table = parameter_table({"w": [3, 2], "b": [4]})
    params = np.random.default_rng(0).normal(size=(401, 10)).astype("f4")
    ds = xr.Dataset(
        {"params": (("step", "element"), params)}, {"step": np.arange(401)}, {"parameters": table}
    )
    ax = drawn("layers", ds, metric="update:spectral")
    (line,) = ax.lines
    changes = np.diff(params[:, :6].astype("f8"), axis=0).reshape(-1, 3, 2)
    expected = np.linalg.norm(changes[2::3], 2, (1, 2))
    np.testing.assert_allclose(line.get_ydata(), [np.nan, *expected])
    assert "1 of every 3 steps" in notes(ax)
    assert "not shown: 1 without finite values" in notes(ax)


def test_rows_of_a_parameter_are_not_called_tokens(run):
    one = run.drop_vars("is_dead").rename(token="row", hidden="column")
    one.attrs["recording"] = {"parameter": "h.0.token.weight"}
    for name in ("grad_norms", "heatmap", "trajectory"):
        canvas = Canvas(layout="constrained")
        one.traj.plot.__getattr__(name)(canvas.subplots())
        texts = [text.get_text() for text in canvas.findobj(Text)]
        said = [text for text in texts if "oken" in text.replace("h.0.token.weight", "")]
        assert said == [], name
        assert any("arameter row" in text for text in texts), name
        assert any("h.0.token.weight 11 × 6" in text for text in texts), name
    found = one.traj.freeze()
    assert set(found.dims) == {"row", "population", "step"}
    assert one.traj.compute(["velocity"]).velocity.dims == ("step", "row", "column")
    with pytest.raises(InvalidArgument, match="does not have one number per parameter row"):
        compute_named(row_vectors(one), ["regimes"], by_population=True)


@pytest.fixture
def results():
    rng = np.random.default_rng(0)
    return xr.Dataset(
        {
            "text_loss": ("step", [4.5, -3.0, 2.0], {"units": "nat"}),
            "entropy": (("step", "layer", "head"), rng.random((3, 2, 3))),
            "cosine": (("step", "token", "one"), rng.random((3, 9, 1))),
            "attention": (("step", "layer", "head", "query"), rng.random((3, 2, 3, 4))),
            "text": ("step", np.array(["a", "b", "c"], object)),
        },
        {"step": [0, 10, 20], "token": np.arange(9) * 2},
        {EVALUATION: {"run": "whole.zarr", "function": "loss of a text"}},
    )


def test_results_of_an_evaluation(results):
    assert dir(results.traj.plot) == sorted(results.data_vars)
    ax = results.traj.plot.text_loss(other=results)
    np.testing.assert_array_equal([line.get_ydata() for line in ax.lines], [results.text_loss] * 2)
    assert ax.get_ylabel() == "text_loss / nat"
    assert "2 runs · loss of a text, whole.zarr" in ax.get_title("left")
    ax = results.traj.plot.entropy(steps="10:")
    drawn = {line.get_label(): line.get_ydata() for line in ax.lines}
    assert list(drawn)[2:4] == ["layer 0, head 2", "layer 1, head 0"]
    np.testing.assert_array_equal(drawn["layer 0, head 2"], results.entropy[1:, 0, 2])
    ax = results.traj.plot.cosine()
    np.testing.assert_array_equal(
        ax.collections[0].get_array().reshape(9, 3), results.cosine[..., 0].T
    )
    assert ax.get_yticklabels()[-1].get_text() == "token 16"
    merged = xr.Dataset({"W": ("step", [0, 1, 2])}, {"step": [0, 10, 20]}).merge(results)
    assert {*FIGURES, "entropy"} < {*figures_of(merged)}
    assert "W" not in figures_of(merged)


def test_a_variable_without_a_figure_is_an_error(results):
    many, without = {"other": results}, {"other": results.drop_vars("text_loss")}
    for name, options, error, message in (
        ("text", {}, InvalidArgument, "text has texts, and figures show numbers"),
        ("attention", {}, InvalidArgument, r"at most 2 others; .* ds.isel\(query=0\).traj.plot"),
        ("entropy", many, InvalidArgument, "cannot show these runs in one axes"),
        ("text_loss", without, VariableNotRecorded, "text_loss"),
        ("freeze", {}, AttributeError, "has no 'freeze'; it has attention, cosine"),
    ):
        with pytest.raises(error, match=message):
            getattr(results.traj.plot, name)(**options)


def test_loss(run):
    ax = drawn("loss", run)
    np.testing.assert_array_equal(ax.lines[0].get_ydata(), run.loss)
    assert "2.955 at step 1, 2.000 at step 22" in notes(ax), "row 0 is NaN"


def test_every_parameter_at_every_step(run):
    ax = drawn("param_update_lost", run)
    (mesh,) = ax.collections
    shown = mesh.get_array().reshape(3, -1)
    np.testing.assert_array_equal(shown, run.param_update_lost.values[1:].T)
    assert [label.get_text() for label in ax.get_yticklabels()] == run.parameter.values.tolist()
    steps = MOST_CELLS // 8
    large = xr.Dataset(
        {"param_update_lost": (("step", "parameter"), np.broadcast_to(0.5, (steps, 20)))},
        {"step": np.arange(steps), "parameter": [f"p.{number}" for number in range(20)]},
    )
    figure, look = FIGURES["param_update_lost"], RunStyle()
    (data,) = figure.data([Scan(large)], Options())
    assert data.step.values.tolist() == list(range(1, steps, 3))
    figure.draw(Canvas().subplots(), data.isel(step=slice(2)), look)
    assert look.notes == ["1 of every 3 steps"]
