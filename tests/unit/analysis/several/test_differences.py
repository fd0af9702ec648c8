from __future__ import annotations

import numpy as np

from trajstore.analysis.several_runs import differences


def test_bits_are_counted_and_equal_ones_are_no_distance() -> None:
    nan, infinity = np.float32("nan"), np.float32("inf")
    first = np.array([[0.0, 1.0, nan, infinity], [0.0, 1.0, 2.0, 3.0]], "f4")
    second = np.array([[-0.0, 1.0, nan, infinity], [0.0, 4.0, 2.0, 7.0]], "f4")
    found = differences(first, second)
    assert found["differing"].tolist() == [1, 2]
    assert found["square"].tolist() == [0, 25]
    assert np.isnan(differences(first, first[::-1])["square"]).all()
