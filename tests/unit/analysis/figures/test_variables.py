"""Variables over the steps: the numbers that are drawn, and what is refused."""

from __future__ import annotations

import numpy as np
import pytest
import xarray as xr
from matplotlib.figure import Figure as Canvas

from trajstore.analysis.figures import FIGURES, figures_of
from trajstore.errors import InvalidArgument, VariableNotRecorded
from trajstore.schema import EVALUATION


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
    for name, error, message in (
        ("text", InvalidArgument, "text has texts, and figures show numbers"),
        ("attention", InvalidArgument, r"at most 2 others; .* ds.isel\(query=0\).traj.plot.att"),
    ):
        with pytest.raises(error, match=message):
            getattr(results.traj.plot, name)()
    with pytest.raises(InvalidArgument, match="cannot show these runs in one axes"):
        results.traj.plot.entropy(other=results)
    with pytest.raises(VariableNotRecorded, match="text_loss"):
        results.traj.plot.text_loss(other=results.drop_vars("text_loss"))
    with pytest.raises(AttributeError, match="has no 'freeze'; it has attention, cosine"):
        results.traj.plot.freeze  # noqa: B018


def test_loss(run):
    ax = FIGURES["loss"](run, Canvas().subplots())
    np.testing.assert_array_equal(ax.lines[0].get_ydata(), run.loss)
    assert (
        "3.000 at step 1, 2.000 at step 22" not in ax.get_legend().get_title().get_text()
    )  # row 0 is NaN
    assert "2.955 at step 1, 2.000 at step 22" in ax.get_legend().get_title().get_text()


def test_every_parameter_at_every_step(run, monkeypatch):
    ax = FIGURES["param_update_lost"](run, Canvas().subplots())
    (mesh,) = ax.collections
    shown = mesh.get_array().reshape(3, -1)
    np.testing.assert_array_equal(shown, run.param_update_lost.values[1:].T)
    assert [label.get_text() for label in ax.get_yticklabels()] == run.parameter.values.tolist()
    monkeypatch.setattr("trajstore.analysis.figures.training.MOST_CELLS", 10)
    ax = FIGURES["param_update_lost"](run, Canvas().subplots())
    thinned = ax.collections[0].get_array().reshape(3, -1)
    np.testing.assert_array_equal(thinned, run.param_update_lost.values[1::7].T)
    assert "1 of every 7 steps" in ax.get_legend().get_title().get_text()
