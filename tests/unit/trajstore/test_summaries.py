from __future__ import annotations

import numpy as np
import pytest

from trajstore.summaries import step_norm, token_norm, ulp_hops, ulp_l1, vector_norm

ORDERS = [1, 2, np.inf]


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("hidden", [1, 7, 64, 200, 768])
def test_norms_are_those_of_numpy_in_float64(order, hidden):
    vectors = np.random.default_rng(0).normal(size=(5, 4, hidden)).astype(np.float32)
    expected = np.linalg.norm(vectors.astype(np.float64), ord=order, axis=-1)
    np.testing.assert_allclose(vector_norm(vectors, order), expected, rtol=1e-14)
    assert token_norm(vectors, order).dtype == np.float32


@pytest.mark.parametrize("order", ORDERS)
def test_a_norm_does_not_depend_on_what_lies_around_the_vector(order):
    vectors = np.random.default_rng(1).normal(size=(6, 5, 100)).astype(np.float32)
    whole = vector_norm(vectors, order)
    strided = np.asfortranarray(vectors)
    np.testing.assert_array_equal(vector_norm(strided, order), whole)
    for row, token in np.ndindex(6, 5):
        np.testing.assert_array_equal(vector_norm(vectors[row, token], order), whole[row, token])


def test_norms_answer_with_nan_and_infinity():
    vectors = np.float32([[np.nan, 1], [np.inf, 1], [3e38, 3e38]])
    for order in ORDERS:
        assert np.isnan(token_norm(vectors, order)[0])
        assert token_norm(vectors, order)[1] == np.inf
    assert token_norm(vectors, 2)[2] == np.inf  # more than float32 holds
    assert token_norm(vectors.astype(np.float64), 2)[2] == pytest.approx(np.sqrt(2) * 3e38)


def test_summaries_of_motion_by_hand():
    earlier = np.float32([[1.0, 0.0, -1.0], [np.inf, np.nan, 2.0], [np.nan, 1.0, 1.0]])
    later = np.float32([[1.0 + 2**-7, -0.0, -1.0 + 2**-8], [np.inf, np.nan, 2.0], [1.0, 1.0, 1.0]])
    np.testing.assert_array_equal(
        ulp_hops(earlier, later, "bfloat16"), [[1, 0, 0.5], [0, 0, 0], [np.nan, 0, 0]]
    )
    np.testing.assert_array_equal(ulp_l1(earlier, later, "bfloat16"), np.float32([1.5, 0, np.nan]))
    expected = np.float32(np.hypot(2**-7, 2**-8))
    np.testing.assert_array_equal(step_norm(earlier, later), np.float32([expected, np.nan, np.nan]))


def test_hops_from_zero_are_counted_in_the_smallest_spacing():
    hops = ulp_hops(np.float32([0.0]), np.float32([1.0]), "bfloat16")
    assert hops[0] == 2.0**133
    assert ulp_l1(np.float32([[0.0]]), np.float32([[1.0]]), "bfloat16")[0] == np.inf
