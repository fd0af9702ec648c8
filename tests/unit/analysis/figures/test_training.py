"""Figures of training show the numbers of the analysis and what was recorded."""

from __future__ import annotations

import numpy as np
import pytest
import xarray as xr
from bits_and_calls import parameter_table
from matplotlib.colors import LogNorm
from matplotlib.figure import Figure as Canvas
from matplotlib.text import Text

from trajstore import analysis
from trajstore.analysis.figures import FIGURES, Options, RunStyle, figures_of
from trajstore.analysis.figures.training import MOST_CELLS
from trajstore.analysis.scan.scan import Scan
from trajstore.analysis.several_quantities import compute_named
from trajstore.errors import InvalidArgument, VariableNotRecorded
from trajstore.populations import row_vectors
from trajstore.schema import EVALUATION


def drawn(name, ds, **options):
    return FIGURES[name](ds, Canvas().subplots(), **options)


def notes(ax):
    return ax.get_legend().get_title().get_text().replace("\n", " ")


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
