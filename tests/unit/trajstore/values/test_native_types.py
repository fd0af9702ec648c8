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
SIXTEEN = {"bfloat16": ml_dtypes.bfloat16, "float16": np.float16}


@pytest.mark.parametrize("native", NATIVE_TYPES.values(), ids=list(NATIVE_TYPES))
def test_facts_of_a_type_are_those_that_others_tell(native: NativeType) -> None:
    reported = ml_dtypes.finfo(SIXTEEN.get(native.name, native.name))
    assert native.least_normal == float(reported.smallest_normal)
    assert native.epsilon == float(reported.eps)
    one = native.bias << reported.nmant
    patterns = [native.sign_mask, native.infinity_bits, native.nan_bits, one]
    values = widen(np.array(patterns, native.bits), native)
    assert repr(values.tolist()) == "[-0.0, inf, nan, 1.0]"


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
    bits, changed = convert(
        np.array([0.1, np.inf]), NATIVE_TYPES["float64"], NATIVE_TYPES["float32"]
    )
    assert (bits.view(np.float32).tolist(), changed) == ([np.float32(0.1), np.inf], 1)


def values_of(name: str) -> Any:
    """Every number of a 16-bit type, random ones of others; without infinities."""
    dtype = np.dtype(SIXTEEN.get(name, name))
    values = EVERY.view(dtype)
    if dtype.itemsize > 2:
        random = np.random.default_rng(0).integers(0, 256, 10_000 * dtype.itemsize, np.uint8)
        edges = np.array([0, -0.0, 1, -1, ml_dtypes.finfo(name).smallest_normal / 2], dtype)
        values = np.append(random.view(dtype), edges)
    with np.errstate(invalid="ignore"):
        return values[np.isfinite(values)]


@pytest.mark.parametrize("name", NATIVE_TYPES)
def test_spacing_is_the_distance_to_the_larger_neighbor(name: str) -> None:
    values, native = values_of(name), native_type(name)
    stored = values.astype(native.stored)
    sizes = np.abs(values[np.abs(values) < ml_dtypes.finfo(values.dtype).max])
    expected = np.nextafter(sizes, np.array(np.inf, sizes.dtype)).astype("f8") - sizes.astype("f8")
    np.testing.assert_array_equal(spacing(sizes.astype(native.stored), name), expected)
    assert (spacing(-stored, name) == spacing(stored, name)).all()
    ends = [ml_dtypes.finfo(values.dtype).max, np.inf, -np.inf, np.nan]
    largest, *others = spacing(np.array(ends, native.stored), name)
    assert largest == expected.max()
    assert np.isnan(others).all()


@pytest.mark.parametrize("name", ["bfloat16", "float16", "float32"])
def test_ordinals_count_the_values_in_order(name: str) -> None:
    values = values_of(name)
    with np.errstate(over="ignore"):
        up = np.nextafter(values, np.array(np.inf, values.dtype))
    before, after = (ordinal(each.astype(np.float32), name) for each in (values, up))
    assert (after - before == 1).all()  # −0 and +0 are one
    assert ordinal(np.float32([0.0, -0.0]), name).tolist() == [0, 0]
    native = native_type(name)
    last = np.array([native.infinity_bits + at for at in (-1, 0, 1)], native.bits)
    assert (np.diff(ordinal(widen(last, native), name)) == 1).all()  # to infinity, then NaN


def test_types_that_are_unknown_or_have_no_lattice_are_named() -> None:
    with pytest.raises(InvalidArgument, match=re.escape(", ".join(NATIVE_TYPES))):
        native_type("float8")
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
