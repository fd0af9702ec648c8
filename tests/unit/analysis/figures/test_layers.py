"""The map of layers, its order and colors, chosen layers, and labels of the rows of a parameter."""

from __future__ import annotations

import numpy as np
import pytest
import xarray as xr
from matplotlib.colors import LogNorm
from matplotlib.figure import Figure as Canvas
from matplotlib.text import Text
from parameter_tables import parameter_table

from trajstore.analysis.figures import FIGURES
from trajstore.analysis.registry import answer
from trajstore.errors import InvalidArgument
from trajstore.populations import row_vectors

KINDS = ("attn.weight", "mlp.weight")


@pytest.fixture
def model() -> xr.Dataset:
    """Norms of two kinds of five layers, in the order of a model."""
    names = ["gpt.wte", *(f"gpt.h.{layer}.{kind}" for layer in range(5) for kind in KINDS)]
    norms = np.arange(4 * 11, dtype="f4").reshape(4, 11)
    return xr.Dataset(
        {"param_norm": (("step", "parameter"), norms)}, {"step": np.arange(4), "parameter": names}
    )


def test_a_map_groups_layers_by_kind(model, monkeypatch):
    ax = FIGURES["layers"](model, Canvas().subplots())
    (mesh,) = ax.collections
    shown = mesh.get_array().reshape(11, 4)
    order = [0, *range(1, 11, 2), *range(2, 11, 2)]
    np.testing.assert_array_equal(shown, model.param_norm.values.T[order])
    labels = [label.get_text() for label in ax.get_yticklabels()]
    assert labels[:3] == ["wte", "h.0.attn.weight", "h.1.attn.weight"]
    assert isinstance(mesh.norm, LogNorm)
    assert [line.get_ydata()[0] for line in ax.lines] == [0.5, 5.5]
    assert "zeros, not shown: 1 layers × steps" in ax.get_legend().get_title().get_text()
    monkeypatch.setattr("trajstore.analysis.figures.training.NAMES", 10)
    ax = FIGURES["layers"](model, Canvas().subplots())
    assert [label.get_text() for label in ax.get_yticklabels()] == [
        "wte", "h.*.attn.weight", "h.*.mlp.weight",
    ]  # fmt: skip
    assert ax.get_yticks().tolist() == [0, 3, 8]


def test_chosen_layers_are_curves(model):
    ax = model.traj.plot.layers(parameters="*.3.mlp.weight, *wte", steps="1:")
    assert [line.get_label() for line in ax.lines] == ["wte", "h.3.mlp.weight"]
    np.testing.assert_array_equal(ax.lines[1].get_ydata(), model.param_norm[1:, 8])
    assert ax.get_ylabel() == "Frobenius norm of each parameter"
    with pytest.raises(InvalidArgument, match=r"parameter=\*.9.\*, which no layer matches; .*wte"):
        model.traj.plot.layers(parameters="*.9.*")
    with pytest.raises(InvalidArgument, match="speed is not a figure of layers, got metric='rms'"):
        FIGURES["speed"](model, metric="rms")


def test_metrics_of_few_steps_without_vectors(monkeypatch):
    """An update, thinned; a vector has no spectral norm."""
    table = parameter_table({"w": [3, 2], "b": [4]})
    params = np.random.default_rng(0).normal(size=(9, 10)).astype("f4")
    ds = xr.Dataset(
        {"params": (("step", "element"), params)}, {"step": np.arange(9)}, {"parameters": table}
    )
    monkeypatch.setattr("trajstore.analysis.figures.training._COLUMNS", 3)
    ax = FIGURES["layers"](ds, Canvas().subplots(), metric="update:spectral")
    (line,) = ax.lines
    changes = np.diff(params[:, :6].astype("f8"), axis=0).reshape(-1, 3, 2)
    expected = [np.linalg.norm(changes[row - 1], 2) for row in (3, 6)]
    np.testing.assert_allclose(line.get_ydata(), [np.nan, *expected])
    notes = ax.get_legend().get_title().get_text()
    assert "1 of every 3 steps" in notes
    assert "not shown: 1 without finite values" in notes


def test_rows_of_a_parameter_are_not_called_tokens(run):
    one = run.drop_vars("is_dead").rename(token="row", hidden="column")
    one.attrs["recording"] = {"parameter": "h.0.token.weight"}
    for name in ("grad_norms", "regimes", "heatmap", "clusters", "speed_density", "trajectory"):
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
        answer(row_vectors(one), ["regimes"], by_population=True)
