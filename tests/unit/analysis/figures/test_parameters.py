"""The figure of the parameters shows what was recorded of them."""

from __future__ import annotations

import numpy as np
from matplotlib.figure import Figure as Canvas

from trajstore.analysis.figures import FIGURES


def test_every_parameter_at_every_step(run, monkeypatch):
    ax = FIGURES["parameters"](run, Canvas().subplots())
    (mesh,) = ax.collections
    shown = mesh.get_array().reshape(3, -1)
    np.testing.assert_array_equal(shown, run.param_update_lost.values[1:].T)
    assert [label.get_text() for label in ax.get_yticklabels()] == run.parameter.values.tolist()
    monkeypatch.setattr("trajstore.analysis.figures.parameters._CELLS", 10)
    ax = FIGURES["parameters"](run, Canvas().subplots())
    thinned = ax.collections[0].get_array().reshape(3, -1)
    np.testing.assert_array_equal(thinned, run.param_update_lost.values[1::7].T)
    assert "every 7th step" in ax.texts[0].get_text()
