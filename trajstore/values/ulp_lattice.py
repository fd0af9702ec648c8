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
from trajstore.values.native_types import NATIVE_TYPES, NativeType

__all__ = ["binade", "lattice_type", "ordinal", "ordinal_dtype", "spacing", "unsigned_view"]

Array = npt.NDArray[Any]


def lattice_type(native: str) -> NativeType:
    """Native type of that name, whose values are the points.

    Raises
    ------
    InvalidArgument
        If no run can hold that type.
    """
    try:
        return NATIVE_TYPES[native]
    except KeyError:
        raise InvalidArgument(
            f"there is no lattice for values of type {native!r}; expected one of "
            f"{', '.join(NATIVE_TYPES)} in the attribute native_dtype"
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
    exponent = NATIVE_TYPES[stored.dtype.name].infinity_bits
    power: Array = (unsigned_view(stored) & exponent).view(stored.dtype)
    least = stored.dtype.type(lattice_type(native).least_normal)
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
    power = binade(stored, native)
    power *= stored.dtype.type(lattice_type(native).epsilon)
    power[np.isinf(power)] = np.nan
    return power


def ordinal_dtype(native: str) -> np.dtype[Any]:
    """Signed integers that hold every difference of two ordinals.

    Raises
    ------
    InvalidArgument
        For float64, whose differences need 65 bits.
    """
    lattice_type(native)
    if native == "float64":
        raise InvalidArgument(
            "distances counted in float64 values do not fit into 64-bit integers; "
            "use metric='ulp' for this run"
        )
    return np.dtype("int64" if native == "float32" else "int32")


def ordinal(stored: Array, native: str) -> Array:
    """Place of each value among all values of the native type, in their order.

    −0.0 and +0.0 are the same point, 0; neighboring values have neighboring numbers; infinities
    come behind the largest finite values, and NaN behind them.

    Parameters
    ----------
    stored : ndarray of float32
    native : {'bfloat16', 'float16', 'float32'}

    Returns
    -------
    ndarray of int32 (16-bit types) or int64, same shape
    """
    dtype, points = ordinal_dtype(native), lattice_type(native)
    if native == "float16":
        with np.errstate(invalid="ignore", over="ignore"):
            bits = stored.astype(np.float16).view(np.uint16).astype(dtype)
    else:
        bits = (unsigned_view(stored) >> np.uint32(points.spare_bits)).astype(dtype)
    magnitude: Array = bits & (points.sign_mask - 1)
    np.negative(magnitude, out=magnitude, where=(bits & points.sign_mask) != 0)
    return magnitude
