"""The lattice of values that a native type can hold: its spacing, and its points in order.

Works on the *stored* form (float32 for 16-bit types), but speaks of the native type: between 1 and
the next bfloat16 lie 65,536 float32 values, and asking float32 for its spacing would give steps
that many times too small.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from trajstore.errors import InvalidArgument

__all__ = ["binade", "mantissa_bits", "ordinal", "ordinal_dtype", "spacing", "unsigned_view"]

Array = npt.NDArray[Any]

_MANTISSA_BITS = {"bfloat16": 7, "float16": 10, "float32": 23, "float64": 52}
_LEAST_NORMAL = {
    "bfloat16": 2.0**-126,
    "float16": 2.0**-14,
    "float32": 2.0**-126,
    "float64": 2.0**-1022,
}
_EXPONENT_MASK = {4: 0x7F800000, 8: 0x7FF0000000000000}


def mantissa_bits(native: str) -> int:
    """Explicit bits of the mantissa of a native type.

    Raises
    ------
    InvalidArgument
        If no run can hold that type.
    """
    try:
        return _MANTISSA_BITS[native]
    except KeyError:
        raise InvalidArgument(
            f"there is no lattice for values of type {native!r}; expected one of "
            f"{', '.join(_MANTISSA_BITS)} in the attribute native_dtype"
        ) from None


def unsigned_view(stored: Array) -> Array:
    """Bits of float32 or float64 values, of any memory layout, as unsigned integers."""
    return stored.view(f"u{stored.dtype.itemsize}")


def binade(stored: Array, native: str) -> Array:
    """Power of two at or below each magnitude, at least the smallest normal one; inf for inf, NaN.

    Parameters
    ----------
    stored : ndarray of float32 or float64
    native : str

    Returns
    -------
    ndarray, same type and shape
        2^(max(E, 1) − bias), E the biased exponent.
    """
    bits = unsigned_view(stored)
    power: Array = (bits & bits.dtype.type(_EXPONENT_MASK[bits.itemsize])).view(stored.dtype)
    least = stored.dtype.type(_LEAST_NORMAL[native])
    if power.min(initial=least) < least:  # rare, and looking is faster than raising
        np.maximum(power, least, out=power)
    return power


def spacing(stored: Array, native: str) -> Array:
    """Distance from each magnitude to the next larger value of the native type.

    For bfloat16 that is 2^(max(E, 1) − 134), E the biased exponent: 2^−133 at zero and for
    subnormals.

    Parameters
    ----------
    stored : ndarray of float32 or float64
    native : str

    Returns
    -------
    ndarray, same type and shape
        NaN where the value is infinite or NaN.
    """
    scale = stored.dtype.type(2.0 ** -mantissa_bits(native))
    power = binade(stored, native)
    power *= scale
    power[np.isinf(power)] = np.nan
    return power


def ordinal_dtype(native: str) -> np.dtype[Any]:
    """Signed integers that hold every difference of two ordinals.

    Raises
    ------
    InvalidArgument
        For float64, whose differences need 65 bits.
    """
    mantissa_bits(native)
    if native == "float64":
        raise InvalidArgument(
            "distances counted in float64 values do not fit into 64-bit integers; "
            "use metric='ulp' for this run"
        )
    return np.dtype("int64" if native == "float32" else "int32")


def ordinal(stored: Array, native: str) -> Array:
    """Place of each value among all values of the native type, in their order.

    −0.0 and +0.0 are the same point, 0; neighbouring values have neighbouring numbers; infinities
    come behind the largest finite values, and NaN behind them.

    Parameters
    ----------
    stored : ndarray of float32
    native : {'bfloat16', 'float16', 'float32'}

    Returns
    -------
    ndarray of int32 (16-bit types) or int64, same shape
    """
    dtype = ordinal_dtype(native)
    if native == "float16":
        with np.errstate(invalid="ignore", over="ignore"):
            bits = stored.astype(np.float16).view(np.uint16).astype(dtype)
        sign = 15
    else:
        shift = 16 if native == "bfloat16" else 0
        bits = (unsigned_view(stored) >> np.uint32(shift)).astype(dtype)
        sign = 31 - shift
    magnitude: Array = bits & ((1 << sign) - 1)
    np.negative(magnitude, out=magnitude, where=(bits >> sign) != 0)
    return magnitude
