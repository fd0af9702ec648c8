from __future__ import annotations

import math

import numpy as np
import pytest

from trajstore.watching.measures import BoundedCurve


@pytest.mark.parametrize("rows", [1, 8, 1000])
def test_the_means_are_those_of_the_values_however_many_there_are(rows: int) -> None:
    values = np.random.default_rng(rows).standard_normal(rows)
    curve = BoundedCurve(bins=8)
    for start in range(0, rows, 3):
        curve.add(start, values[start : start + 3])
    means = curve.means(8)
    span = 1
    while rows > span * 8:
        span *= 2
    wanted = [values[start : start + span].mean() for start in range(0, rows, span)]
    assert np.allclose(means, wanted)
    assert curve.last == values[-1]
    assert (curve.least, curve.largest) == (values.min(), values.max())


def test_rows_may_come_in_any_order_and_some_not_at_all() -> None:
    curve = BoundedCurve(bins=8)
    curve.add(4, [4, 5])
    curve.add(0, [0, 1])
    assert np.array_equal(curve.means(6), [0, 1, np.nan, np.nan, 4, 5], equal_nan=True)
    assert curve.last == 5
    assert np.array_equal(curve.means(3), [0.5, np.nan, 4.5], equal_nan=True)


def test_a_loss_of_nan_is_not_averaged() -> None:
    curve = BoundedCurve(bins=4)
    assert curve.means(10).size == 0
    assert np.isnan([curve.last, curve.least]).all()
    curve.add(0, [2.0, 4.0, np.nan, np.inf])
    assert curve.last == np.inf
    assert (curve.least, curve.largest) == (2, 4)
    assert np.array_equal(curve.means(2), [3, np.nan], equal_nan=True)
    curve.add(4, [np.nan])
    assert math.isnan(curve.last)
