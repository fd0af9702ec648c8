from __future__ import annotations

import re

import ml_dtypes
import numpy as np
import pytest

from trajstore.errors import InvalidArgument
from trajstore.values.native_types import (
    NATIVE_TYPES,
    NativeType,
    as_bits,
    is_nan,
    is_zero_or_nan,
    native_type,
    widen,
)

EVERY = np.arange(1 << 16, dtype=np.uint16)
SIXTEEN = {"bfloat16": ml_dtypes.bfloat16, "float16": np.float16}


@pytest.mark.parametrize("native", NATIVE_TYPES.values(), ids=list(NATIVE_TYPES))
def test_facts_of_a_type_are_those_that_others_tell(native: NativeType) -> None:
    reported = ml_dtypes.finfo(SIXTEEN.get(native.name, native.name))
    assert native.mantissa_bits == reported.nmant
    assert native.exponent_bits == reported.nexp
    assert native.least_normal == float(reported.smallest_normal)
    assert native.epsilon == float(reported.eps)
    patterns = [
        native.sign_mask,
        native.infinity_bits,
        native.nan_bits,
        native.bias << reported.nmant,
    ]
    values = widen(np.array(patterns, native.bits), native)
    assert repr(values.tolist()) == "[-0.0, inf, nan, 1.0]"
    special = widen(np.array([native.infinity_bits - 1], native.bits), native)
    assert special[0] == float(reported.max)


@pytest.mark.parametrize("name", ["bfloat16", "float16", "float32", "float64"])
def test_nan_and_zero_are_found_from_their_bits(name: str) -> None:
    native = native_type(name)
    bits = EVERY
    if native.itemsize > 2:  # every sign and exponent, and no mantissa, a low one or a high one
        bits = (EVERY.astype(native.bits) << (8 * native.itemsize - 16)) | (EVERY & 1)
    values = widen(bits, native)
    np.testing.assert_array_equal(is_nan(bits, native), np.isnan(values))
    np.testing.assert_array_equal(is_zero_or_nan(bits, native), np.isnan(values) | (values == 0))


@pytest.mark.parametrize(("name", "dtype"), SIXTEEN.items())
def test_widening_agrees_with_the_numeric_cast(name: str, dtype: type) -> None:
    cast = EVERY.view(dtype).astype(np.float32)
    wide = widen(EVERY, native_type(name))
    np.testing.assert_array_equal(wide, cast)  # NaN equals NaN here
    assert (np.signbit(wide) == np.signbit(cast)).all()


def test_as_bits_takes_each_form_of_the_same_values() -> None:
    native = native_type("bfloat16")
    values = np.array([0.5, -1.0, 3.0], ml_dtypes.bfloat16)
    expected = values.view(np.uint16)
    for form in (values, expected, values.astype(np.float32)):
        assert (as_bits(form, native, "W") == expected).all()
    assert as_bits(0.5, native, "W") == expected[0]


@pytest.mark.parametrize(
    ("value", "type_name"),
    [
        (np.float32([0.1]), "bfloat16"),
        (np.float64([0.5]), "bfloat16"),
        (np.int64([1]), "float32"),
        (np.float64([0.5]), "float32"),
        (0.1, "float32"),
        (np.uint16([1]), "float32"),
        (np.float16([1]), "bfloat16"),
        (np.float32([70000]), "float16"),
        (np.float32([2**-25]), "float16"),
        (1e300, "float32"),
    ],
)
def test_as_bits_refuses_what_it_would_have_to_round(value: object, type_name: str) -> None:
    with pytest.raises(InvalidArgument, match=r"^W: "):
        as_bits(value, native_type(type_name), "W")


def test_as_bits_keeps_the_shape_of_scalars_and_strided_arrays() -> None:
    native = native_type("float32")
    assert as_bits(np.float32(2), native, "loss").shape == ()
    strided = np.arange(12, dtype=np.float32).reshape(3, 4).T
    assert (as_bits(strided, native, "W").view(np.float32) == strided).all()


def test_an_unknown_type_names_the_known_ones() -> None:
    with pytest.raises(InvalidArgument, match=re.escape(", ".join(NATIVE_TYPES))):
        native_type("float8")
