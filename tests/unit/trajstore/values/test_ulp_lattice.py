from __future__ import annotations

import numpy as np
import pytest

from trajstore.errors import InvalidArgument
from trajstore.values.native_types import ordinal, ordinal_dtype, spacing

PATTERNS = np.arange(1 << 16, dtype=np.uint16)
BFLOAT16 = (PATTERNS.astype(np.uint32) << 16).view(np.float32)


def test_spacing_of_every_bfloat16_is_the_distance_to_its_larger_neighbor():
    # Positive patterns in order are the values in order.
    finite = np.abs(BFLOAT16[:0x7F80].astype(np.float64))
    expected = np.append(np.diff(finite), 2.0**120)  # the next value would be 2^128
    for sign in (0, 0x8000):
        got = spacing(BFLOAT16[sign : sign + 0x7F80], "bfloat16")
        np.testing.assert_array_equal(got, expected)
    assert np.isnan(spacing(BFLOAT16[0x7F80:0x8000], "bfloat16")).all()
    assert np.isnan(spacing(BFLOAT16[0xFF80:], "bfloat16")).all()
    assert spacing(np.zeros(1, np.float32), "bfloat16")[0] == np.float32(2.0**-133)


def test_spacing_of_every_float16_is_that_of_numpy():
    values = PATTERNS.view(np.float16)
    values = values[np.abs(values) < np.finfo(np.float16).max]  # numpy needs a next value
    # At negative powers of two, numpy means the neighbor nearer to zero.
    expected = np.spacing(np.abs(values)).astype(np.float32)
    np.testing.assert_array_equal(spacing(values.astype(np.float32), "float16"), expected)


@pytest.mark.parametrize("name", ["float32", "float64"])
def test_spacing_of_wide_types_is_that_of_numpy(name):
    width = np.dtype(name).itemsize
    patterns = np.random.default_rng(0).integers(0, 2 ** (8 * width - 1), 10_000, f"u{width}")
    values = patterns.view(name)
    values = values[np.abs(values) < np.finfo(name).max]
    values = np.append(values, np.array([0, 1, np.finfo(name).tiny / 2], name))
    np.testing.assert_array_equal(spacing(values, name), np.abs(np.spacing(values)))


def test_ordinals_of_every_bfloat16_count_the_values_in_order():
    finite = np.isfinite(BFLOAT16)
    distinct = np.unique(BFLOAT16[finite].astype(np.float64))  # −0 and +0 are one
    rank = np.searchsorted(distinct, BFLOAT16[finite].astype(np.float64))
    got = ordinal(BFLOAT16[finite], "bfloat16")
    np.testing.assert_array_equal(got - got.min(), rank)
    assert ordinal(np.float32([0.0, -0.0]), "bfloat16").tolist() == [0, 0]
    assert (np.diff(ordinal(BFLOAT16[0x7F7E:0x7F82], "bfloat16")) == 1).all()  # inf, then NaN


def test_ordinals_of_every_float16_count_the_values_in_order():
    values = PATTERNS.view(np.float16)
    values = values[np.isfinite(values)]
    rank = np.searchsorted(np.unique(values.astype(np.float64)), values.astype(np.float64))
    got = ordinal(values.astype(np.float32), "float16")
    np.testing.assert_array_equal(got - got.min(), rank)


def test_ordinals_of_float32_follow_nextafter():
    rng = np.random.default_rng(1)
    values = rng.integers(0, 1 << 32, 5_000, np.uint32).view(np.float32)
    values = np.append(values[np.isfinite(values)], np.float32([0, -0.0, 1, -1]))
    up = np.nextafter(values, np.float32(np.inf))
    assert (ordinal(up, "float32") - ordinal(values, "float32") == 1).all()


def test_a_type_without_a_lattice_is_named():
    with pytest.raises(InvalidArgument, match=r"'int8'.*bfloat16"):
        spacing(np.zeros(1, np.float32), "int8")
    with pytest.raises(InvalidArgument, match="64-bit"):
        ordinal_dtype("float64")
