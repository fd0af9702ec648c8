"""Stored values as the bits of a type that a file asks for, and how many had to be rounded."""

from __future__ import annotations

import sys
from typing import Any

import numpy as np
import numpy.typing as npt

from trajstore.bits import NativeType, narrow, widen

__all__ = ["as_bfloat16", "convert", "is_bfloat16"]

Array = npt.NDArray[Any]

# Where in a uint32 the half lies that bfloat16 keeps.
_UPPER, _LOWER = (1, 0) if sys.byteorder == "little" else (0, 1)


def is_bfloat16(values: Array) -> bool:
    """Whether every float32 value, given by its uint32 bits, is one of bfloat16, bit for bit."""
    return not int(np.bitwise_or.reduce(values, axis=None)) & 0xFFFF


def as_bfloat16(values: Array) -> Array:
    """Upper halves of uint32 bits of float32 that are known to be bfloat16.

    Returns
    -------
    ndarray of uint16, same shape
    """
    if values.ndim == 0:
        return (values >> np.uint32(16)).astype(np.uint16)
    return np.ascontiguousarray(_halves(values)[..., _UPPER::2])


def convert(stored: Array, held: NativeType, wanted: NativeType) -> tuple[Array, int]:
    """Bits of `wanted` for stored values of `held`.

    Exact wherever `wanted` holds the values; else rounded to nearest, ties to even, as a cast of
    torch does.

    Parameters
    ----------
    stored : ndarray of ``held.stored``
    held, wanted : NativeType

    Returns
    -------
    bits : ndarray of ``wanted.bits``, same shape
    changed : int
        Values that were rounded.
    """
    if wanted.name == held.name:
        if held.name != "bfloat16":
            return narrow(stored, held), 0
        wide = np.ascontiguousarray(stored, np.float32).view(np.uint32)
        # narrow says what is wrong with values that are not what their attribute claims.
        return (as_bfloat16(wide), 0) if is_bfloat16(wide) else (narrow(stored, held), 0)
    if wanted.stored == held.stored and wanted.itemsize == wanted.stored.itemsize:
        return np.ascontiguousarray(stored, wanted.stored).view(wanted.bits), 0
    if wanted.stored.itemsize > held.stored.itemsize:
        return stored.astype(wanted.stored).view(wanted.bits), 0
    with np.errstate(over="ignore", under="ignore", invalid="ignore"):
        values = np.ascontiguousarray(stored, np.float32)
        if wanted.name == "bfloat16":
            bits = _rounded_to_bfloat16(values.view(np.uint32))
        elif wanted.name == "float16":
            bits = values.astype(np.float16).view(np.uint16)
        else:
            bits = values.view(np.uint32)
    back = widen(bits, wanted)
    both_nan = np.isnan(back) & np.isnan(stored)
    return bits, int(np.count_nonzero((back != stored) & ~both_nan))


def _halves(values: Array) -> Array:
    return np.ascontiguousarray(values).view(np.uint16)


def _rounded_to_bfloat16(wide: Array) -> Array:
    even = (wide >> np.uint32(16)) & np.uint32(1)
    rounded = (wide + np.uint32(0x7FFF) + even) >> np.uint32(16)
    # Adding to a NaN may carry into its sign: keep its upper payload, and make it quiet.
    quiet = (wide >> np.uint32(16)) | np.uint32(0x40)
    is_nan = (wide & np.uint32(0x7FFFFFFF)) > np.uint32(0x7F800000)
    return np.where(is_nan, quiet, rounded).astype(np.uint16)
