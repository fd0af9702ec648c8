"""Moving averages that stay in a native type, norms, and summaries of motion."""

from __future__ import annotations

from functools import reduce
from operator import add
from typing import Any

import numpy as np
import pytest

from trajstore.errors import InvalidArgument
from trajstore.values.norms import (
    MovingAverage,
    every_normal_value,
    hidden_sum,
    share_left,
    step_norm,
    token_norm,
    ulp_hops,
    ulp_l1,
    vector_norm,
)


@pytest.mark.parametrize(
    ("native", "beta", "form", "factor", "share"),
    [
        ("bfloat16", 0.999, "product", 0, 1),
        ("bfloat16", 0.997, "product", 0, 0.2969),
        ("bfloat16", 0.0, "lerp", 2, 0),
        ("bfloat16", 0.998, "lerp", 0, 0.9532),
        ("bfloat16", 0.99, "once", 2, 0),
        ("bfloat16", 0.999, "once", 2, 1),
        ("bfloat16", 0.999, "product", 2, 0.9609),  # of values whose double is finite
        ("float16", 0.999, "product", 2, 0),
        ("float32", 0.999, "product", 2, 0),
        ("float32", 0.999999, "once", 0, 0),
        ("float32", 1 - 1e-8, "product", 0, 1),
    ],
)
def test_the_share_of_values_that_stay(
    native: str, beta: float, form: Any, factor: float, share: float
) -> None:
    average = MovingAverage(native=native, beta=beta, form=form)
    assert share_left(average, factor) == pytest.approx(share, abs=1e-4 * (0 < share < 1))


def test_all_normal_values_are_tried_but_float32_is_judged_by_one_power_of_two() -> None:
    """Some values remain unchanged only for a step below four spacings."""
    assert sum(part.size for part in every_normal_value("float16")) == 30 << 10
    parts = [*every_normal_value("float32")]
    assert sum(part.size for part in parts) == 1 << 23
    assert (parts[0][0], parts[-1][-1]) == (1, np.nextafter(np.float32(2), np.float32(1)))
    values = np.concatenate(parts[:8])
    for form in ("lerp", "product", "once"):
        average = MovingAverage(native="float32", beta=1 - 2.0**-20, form=form)
        for target in (np.zeros_like(values), 2 * values):
            assert (average.after(values, target) != values).all()
    with pytest.raises(InvalidArgument, match="float64 has too many"):
        next(every_normal_value("float64"))


ORDERS = [1, 2, np.inf]


def in_order(values):
    """The order of summation in the docstring of `hidden_sum`."""
    length = len(values)
    if length > 128:
        first = length // 2 // 8 * 8
        return in_order(values[:first]) + in_order(values[first:])
    whole = length // 8 * 8
    total = 0.0
    if whole:
        # Not `sum`, which compensates rounding errors since Python 3.12.
        a, b, c, d, e, f, g, h = (reduce(add, values[lane:whole:8]) for lane in range(8))
        total = ((a + b) + (c + d)) + ((e + f) + (g + h))
    for value in values[whole:]:
        total += value
    return total


def test_sums_have_the_documented_order():
    # A NumPy with another order would give values that differ from recorded ones.
    rng = np.random.default_rng(2)
    for length in [*range(300), 768, 1000, 1024, 4096, 5000, 8193, 10_000, 50_257]:
        values = rng.normal(size=(2, 3, length)) * 2.0 ** rng.integers(-40, 40, (2, 3, length))
        got = hidden_sum(np.asfortranarray(values))
        assert got.tolist() == [[in_order(v.tolist()) for v in row] for row in values], length


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("hidden", [1, 7, 64, 200, 768])
def test_norms_are_those_of_numpy_wherever_the_vectors_lie(order, hidden):
    vectors = np.random.default_rng(0).normal(size=(5, 4, hidden)).astype(np.float32)
    expected = np.linalg.norm(vectors.astype(np.float64), ord=order, axis=-1)
    whole = vector_norm(vectors, order)
    np.testing.assert_allclose(whole, expected, rtol=1e-14)
    assert token_norm(vectors, order).dtype == np.float32
    np.testing.assert_array_equal(vector_norm(np.asfortranarray(vectors), order), whole)
    for at in np.ndindex(5, 4):
        np.testing.assert_array_equal(vector_norm(vectors[at], order), whole[at])


@pytest.mark.parametrize("name", ["float32", "float64"])
def test_a_summary_that_is_nan_has_neither_sign_nor_payload(name):
    quiet = np.array(np.nan, name)
    values = np.array([[-np.nan], [np.inf]], name)
    values.view(f"u{quiet.itemsize}")[0] |= 5
    others = np.array([[1], [np.inf]], name)
    norm, hops = token_norm(values)[:1], ulp_l1(others, values, name)[:1]
    for got in (norm, step_norm(others, values), hops):
        assert {one.tobytes() for one in got} == {quiet.tobytes()}


def test_a_rounded_norm_is_that_of_the_sum_in_order_also_halfway_between_two_numbers():
    # The root of the large squares is halfway between two float32. The order of summation decides
    # if the small squares are added together, or lost one by one.
    rng = np.random.default_rng(3)
    vector = np.float32([16_777_216, 5_792, 84, 10, 3, 2, *[0.15] * 6, *[0] * 52])
    assert np.sqrt(np.square(vector[:6], dtype=float).sum()) == 2**24 + 1
    vectors = np.stack([rng.permutation(vector) for _ in range(500)])
    expected = vector_norm(vectors).astype(np.float32)
    assert len(set(expected.tolist())) == 2
    np.testing.assert_array_equal(token_norm(vectors), expected)
    np.testing.assert_array_equal(step_norm(np.zeros_like(vectors), vectors), expected)
    assert token_norm(vectors[0]) == expected[0]


def test_norms_answer_with_nan_and_infinity():
    vectors = np.float32([[np.nan, 1], [np.inf, 1], [3e38, 3e38]])
    for order in ORDERS:
        np.testing.assert_array_equal(token_norm(vectors, order)[:2], [np.nan, np.inf])
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
    zero, one, huge = np.float32([[0.0]]), np.float32([[1.0]]), np.float64([[1.7e308]])
    assert ulp_hops(zero, one, "bfloat16")[0, 0] == 2.0**133  # in the smallest spacing
    assert ulp_l1(zero, one, "bfloat16")[0] == np.inf
    assert step_norm(-huge, huge)[0] == ulp_l1(0 * huge, huge, "float64")[0] == np.inf
