from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

from trajstore.errors import InvalidArgument
from trajstore.values.native_types import (
    NATIVE_TYPES,
    as_bfloat16,
    cast,
    convert,
    is_bfloat16,
    is_of_type,
    narrow,
    widen,
)

EVERY_16_BITS = np.arange(1 << 16, dtype=np.uint16)


@pytest.mark.parametrize("name", ["bfloat16", "float16"])
def test_widening_keeps_every_bit_pattern(name: str) -> None:
    native, wide = NATIVE_TYPES[name], NATIVE_TYPES["float32"]
    stored = widen(EVERY_16_BITS, native)
    bits, changed = convert(stored, native, wide)
    assert (bits == stored.view(np.uint32)).all()
    assert changed == 0
    assert (narrow(stored, native) == EVERY_16_BITS).all()


@pytest.mark.parametrize(
    ("name", "dtype"), [("bfloat16", ml_dtypes.bfloat16), ("float16", np.float16)]
)
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
    wide = widen(EVERY_16_BITS, NATIVE_TYPES["bfloat16"]).view(np.uint32).reshape(256, 256)
    assert is_bfloat16(wide)
    assert (as_bfloat16(wide).ravel() == EVERY_16_BITS).all()
    wide = wide.copy()
    wide[255, 255] |= 1
    assert not is_bfloat16(wide)
    native = NATIVE_TYPES["bfloat16"]
    with pytest.raises(InvalidArgument, match="1 of 65536"):
        convert(wide.view(np.float32), native, native)
