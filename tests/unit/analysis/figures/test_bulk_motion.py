"""Points are the speeds of `bulk_thermal`."""

from __future__ import annotations

import numpy as np
from matplotlib.figure import Figure as Canvas

from trajstore import analysis
from trajstore.analysis.figures import FIGURES


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
    later = run.W.isel(step=11) + np.float32(2) * (run.step > 15)  # all at once, at step 16
    steps = run.assign(W=run.W.where(run.step < 12, later).drop_attrs())
    found = analysis.bulk_thermal(steps, "live").compute()
    rest = int(((found.bulk_speed == 0) & (found.thermal_speed == 0)).sum())
    alike = int(((found.bulk_speed > 0) & (found.thermal_speed == 0)).sum())
    assert rest >= 10
    assert alike == 1
    ax = FIGURES["bulk-thermal"](steps, Canvas().subplots())
    told = [text.get_text() for text in ax.get_legend().get_texts()]
    expected = f"{22 - rest - alike} shown, {rest} at rest, 1 all moving exactly alike"
    assert f"live tokens: of 22 steps {expected}" in told
