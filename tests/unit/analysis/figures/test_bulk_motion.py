"""Points are the speeds of `bulk_thermal`."""

from __future__ import annotations

import numpy as np
from matplotlib.figure import Figure as Canvas

import analysis
from analysis.figures import FIGURES


def test_speeds(run):
    expected = analysis.bulk_thermal(run)
    ax = FIGURES["bulk-thermal"](run, Canvas().subplots())
    for points, population in zip(ax.collections, ("dead", "live"), strict=True):
        part = expected.sel(population=population).compute()
        moving = (part.bulk_speed > 0) & (part.thermal_speed > 0)
        np.testing.assert_array_equal(points.get_offsets()[:, 0], part.thermal_speed[moving])
        np.testing.assert_array_equal(points.get_offsets()[:, 1], part.bulk_speed[moving])
        np.testing.assert_array_equal(points.get_array(), part.step[moving])


def test_steps_that_a_logarithmic_axis_cannot_show_are_told(run):
    still = run.assign(W=run.W.where(run.step < 12, run.W.isel(step=11)))
    ax = FIGURES["bulk-thermal"](still, Canvas().subplots())
    off = int((analysis.bulk_thermal(still, "live").bulk_speed == 0).sum())
    assert off >= 11
    assert f"live tokens: {off} of 22" in ax.texts[0].get_text()
