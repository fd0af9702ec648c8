"""The lattice of values of a native type: its spacing, and the order of its points.

The functions take the *stored* form (float32 for 16-bit types) and return results for the native
type. Between 1 and the next bfloat16 there are 65,536 float32 values, so the spacing of float32
would be too small by this factor.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from trajstore.errors import InvalidArgument
from trajstore.values.native_types import NATIVE_TYPES, NativeType

Array = npt.NDArray[Any]


def lattice_type(native: str) -> NativeType:
    """Native type with the given name.

    Raises
    ------
    InvalidArgument
        If the type is not supported.
    """
    try:
        return NATIVE_TYPES[native]
    except KeyError:
        raise InvalidArgument(
            f"got type {native!r}, expected one of {', '.join(NATIVE_TYPES)} in the attribute "
            "native_dtype"
        ) from None


def unsigned_view(stored: Array) -> Array:
    """Bits of float32 or float64 values, of any memory layout, as unsigned integers."""
    return stored.view(f"u{stored.dtype.itemsize}")


def binade(stored: Array, native: str) -> Array:
    """Largest power of two ≤ each magnitude, at least the smallest normal; inf for inf and NaN.

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
    if power.min(initial=least) < least:  # rare; the check is faster than np.maximum
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
        NaN if the value is infinite or NaN.
    """
    power = binade(stored, native)
    power *= stored.dtype.type(lattice_type(native).epsilon)
    power[np.isinf(power)] = np.nan
    return power


def ordinal_dtype(native: str) -> np.dtype[Any]:
    """Signed integer type that holds every difference of two ordinals.

    Raises
    ------
    InvalidArgument
        For float64, whose differences need 65 bits.
    """
    lattice_type(native)
    if native == "float64":
        raise InvalidArgument(
            "the number of float64 values between two values does not fit into 64-bit integers; "
            "use metric='ulp' for this run"
        )
    return np.dtype("int64" if native == "float32" else "int32")


def ordinal(stored: Array, native: str) -> Array:
    """Signed index of each value among all values of the native type, in order.

    −0.0 and +0.0 have index 0. Neighboring values have consecutive indices. Infinities follow the
    largest finite values, and NaN follows infinities.

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
