from __future__ import annotations

import numpy as np
import pytest

from trajstore.analysis.optimizer.moment_sizes import CLASSES, quantiles_of_counts, ratio_classes

LEVELS = np.array([0, 0.05, 0.5, 0.95, 1])


def counted(ratios: np.ndarray) -> np.ndarray:
    return np.bincount(ratio_classes(ratios), minlength=CLASSES)


@pytest.mark.parametrize("size", [1, 2, 7, 1000])
@pytest.mark.parametrize("spread", [1e-6, 1e-2, 1.0, 1e5])
def test_quantiles_are_right_to_a_part_of_their_distance_from_1(spread, size):
    ratios = 1 + spread * np.random.default_rng(0).standard_normal(size)
    got = quantiles_of_counts(counted(ratios), LEVELS) - 1
    expected = np.quantile(ratios - 1, LEVELS, method="lower")
    np.testing.assert_allclose(got, expected, rtol=1 / 32, atol=2.0**-24)


def test_classes_are_in_the_order_of_the_ratios():
    ratios = np.array([-np.inf, -1e9, -5, 0, 0.5, 1 - 2e-7, 1, 1 + 2e-7, 1.01, 30, 1e6, np.inf])
    found = ratio_classes(ratios)
    assert (np.diff(found) >= 0).all()
    assert found.min() == 0
    assert ratio_classes(np.array([np.nan])) == CLASSES - 1
    assert found.max() < CLASSES - 1
    representatives = [
        float(quantiles_of_counts(counted(np.array([r])), np.array([0.5]))[0]) for r in ratios
    ]
    assert representatives[0] == representatives[1] == -np.inf
    assert representatives[6] == 1
    assert representatives[-1] == np.inf
