"""Bits of the native types: widening, rounding, spacing, ordinals, and tensors."""

from __future__ import annotations

import re
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from trajstore.errors import InvalidArgument
from trajstore.values.native_types import (
    NATIVE_TYPES,
    NativeType,
    as_bfloat16,
    as_bits,
    cast,
    convert,
    is_bfloat16,
    is_nan,
    is_of_type,
    is_zero_or_nan,
    narrow,
    native_type,
    ordinal,
    ordinal_dtype,
    spacing,
    widen,
)

EVERY = np.arange(1 << 16, dtype=np.uint16)
BFLOAT16 = (EVERY.astype(np.uint32) << 16).view(np.float32)
SIXTEEN = {"bfloat16": ml_dtypes.bfloat16, "float16": np.float16}


@pytest.mark.parametrize("native", NATIVE_TYPES.values(), ids=list(NATIVE_TYPES))
def test_facts_of_a_type_are_those_that_others_tell(native: NativeType) -> None:
    reported = ml_dtypes.finfo(SIXTEEN.get(native.name, native.name))
    assert native.mantissa_bits == reported.nmant
    assert native.exponent_bits == reported.nexp
    assert native.least_normal == float(reported.smallest_normal)
    assert native.epsilon == float(reported.eps)
    one = native.bias << reported.nmant
    patterns = [native.sign_mask, native.infinity_bits, native.nan_bits, one]
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
def test_widening_is_the_numeric_cast_and_keeps_every_bit_pattern(name: str, dtype: type) -> None:
    native = native_type(name)
    wide, expected = widen(EVERY, native), EVERY.view(dtype).astype(np.float32)
    np.testing.assert_array_equal(wide, expected)  # NaN equals NaN here
    assert (np.signbit(wide) == np.signbit(expected)).all()
    bits, changed = convert(wide, native, NATIVE_TYPES["float32"])
    assert (bits == wide.view(np.uint32)).all()
    assert changed == 0
    assert (narrow(wide, native) == EVERY).all()


def test_as_bits_takes_each_form_of_the_same_values() -> None:
    native = native_type("bfloat16")
    values = np.array([0.5, -1.0, 3.0], ml_dtypes.bfloat16)
    expected = values.view(np.uint16)
    for form in (values, expected, values.astype(np.float32)):
        assert (as_bits(form, native, "W") == expected).all()
    assert as_bits(0.5, native, "W") == expected[0]
    native = native_type("float32")
    assert as_bits(np.float32(2), native, "loss").shape == ()
    strided = np.arange(12, dtype=np.float32).reshape(3, 4).T
    assert (as_bits(strided, native, "W").view(np.float32) == strided).all()


@pytest.mark.parametrize(
    ("type_name", "values"),
    [
        ("bfloat16", [np.float32([0.1]), np.float64([0.5]), np.float16([1])]),
        ("float16", [np.float32([70000]), np.float32([2**-25])]),
        ("float32", [np.int64([1]), np.float64([0.5]), 0.1, np.uint16([1]), 1e300]),
    ],
)
def test_as_bits_refuses_what_it_would_have_to_round(type_name: str, values: list[Any]) -> None:
    for value in values:
        with pytest.raises(InvalidArgument, match=r"^W: "):
            as_bits(value, native_type(type_name), "W")


def test_an_unknown_type_names_the_known_ones() -> None:
    with pytest.raises(InvalidArgument, match=re.escape(", ".join(NATIVE_TYPES))):
        native_type("float8")


@pytest.mark.parametrize(("name", "dtype"), SIXTEEN.items())
def test_rounding_is_to_nearest_even_and_counted(name: str, dtype: type) -> None:
    random = np.random.default_rng(0).integers(0, 1 << 32, 200_000, dtype=np.uint32)
    ties = ((np.arange(1 << 16, dtype=np.uint32)) << 16) | 0x8000
    wide = np.concatenate([random, ties, ties + 1, ties - 1]).view(np.float32)
    bits, changed = convert(wide, NATIVE_TYPES["float32"], NATIVE_TYPES[name])
    with np.errstate(all="ignore"):
        expected = wide.astype(dtype)
    nan = np.isnan(wide)
    assert (bits[~nan] == expected.view(np.uint16)[~nan]).all()
    assert np.isnan(bits.view(dtype)[nan].astype(np.float32)).all()
    back = cast(wide.reshape(2, -1), name).ravel()
    assert (back.view(np.uint32) == widen(bits, NATIVE_TYPES[name]).view(np.uint32)).all()
    assert changed == np.count_nonzero((back != wide) & ~nan)
    assert is_of_type(back, name)
    assert not is_of_type(wide, name)
    assert is_of_type(wide, "float32")
    assert is_of_type(back[~nan].astype(np.float64), name)
    assert not is_of_type(wide[~nan].astype(np.float64), name)


def test_float64_is_rounded_to_float32_and_counted() -> None:
    values = np.array([0.1, 0.5, np.nan, np.inf])
    bits, changed = convert(values, NATIVE_TYPES["float64"], NATIVE_TYPES["float32"])
    assert (bits.view(np.float32)[[0, 1, 3]] == values.astype(np.float32)[[0, 1, 3]]).all()
    assert changed == 1


def test_one_value_that_is_not_bfloat16_is_found() -> None:
    wide = widen(EVERY, NATIVE_TYPES["bfloat16"]).view(np.uint32).reshape(256, 256)
    assert is_bfloat16(wide)
    assert (as_bfloat16(wide).ravel() == EVERY).all()
    wide = wide.copy()
    wide[255, 255] |= 1
    assert not is_bfloat16(wide)
    native = NATIVE_TYPES["bfloat16"]
    with pytest.raises(InvalidArgument, match="1 of 65536"):
        convert(wide.view(np.float32), native, native)


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


@pytest.mark.parametrize("name", ["float16", "float32", "float64"])
def test_spacing_is_that_of_numpy(name):
    width = np.dtype(name).itemsize
    values = EVERY.view(np.float16)
    if width > 2:
        patterns = np.random.default_rng(0).integers(0, 2 ** (8 * width - 1), 10_000, f"u{width}")
        values = np.append(patterns.view(name), np.array([0, 1, np.finfo(name).tiny / 2], name))
    values = values[np.abs(values) < np.finfo(name).max]  # numpy needs a next value
    # At negative powers of two, numpy means the neighbor nearer to zero.
    expected = np.spacing(np.abs(values))
    stored = values.astype(np.float32) if width == 2 else values
    np.testing.assert_array_equal(spacing(stored, name), expected)


@pytest.mark.parametrize("name", SIXTEEN)
def test_ordinals_count_the_values_in_order(name):
    values = widen(EVERY, native_type(name))
    finite = values[np.isfinite(values)]
    rank = np.searchsorted(np.unique(finite), finite)  # −0 and +0 are one
    got = ordinal(finite, name)
    np.testing.assert_array_equal(got - got.min(), rank)
    assert ordinal(np.float32([0.0, -0.0]), name).tolist() == [0, 0]
    infinity = native_type(name).infinity_bits
    last = values[infinity - 2 : infinity + 2]  # to infinity, then NaN
    assert (np.diff(ordinal(last, name)) == 1).all()


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


@pytest.mark.torch
@pytest.mark.parametrize("name", NATIVE_TYPES)
def test_a_tensor_gives_its_bits(name: str) -> None:
    torch, native = pytest.importorskip("torch"), native_type(name)
    tensor = torch.tensor([[0.5, -0.0], [float("nan"), float("inf")]], dtype=getattr(torch, name))
    bits = as_bits(tensor.T, native, "W")
    assert bits.dtype == native.bits
    signed = tensor.view(getattr(torch, f"int{8 * bits.itemsize}")).numpy()
    assert (bits == signed.view(bits.dtype).T).all()


@pytest.mark.torch
def test_a_tensor_of_another_type_is_refused_unless_its_values_are_exact() -> None:
    torch, native = pytest.importorskip("torch"), native_type("bfloat16")
    for other in (torch.tensor([1]), torch.tensor([1.0]).half()):
        with pytest.raises(InvalidArgument, match=r"got (int64|float16)"):
            as_bits(other, native, "W")
    assert as_bits(torch.tensor([1.5]), native, "W").tolist() == [0x3FC0]
