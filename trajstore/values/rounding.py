"""Rounding to a native type, as bits or in the stored form."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from trajstore.errors import FlushedSubnormals
from trajstore.values.native_types import (
    NATIVE_TYPES,
    NativeType,
    is_bfloat16,
    is_nan,
    narrow,
    widen,
)
from trajstore.values.ulp_lattice import unsigned_view

Array = npt.NDArray[Any]

_BFLOAT16 = NATIVE_TYPES["bfloat16"]
_SPARE = np.uint32(_BFLOAT16.spare_bits)
_SPARE_MASK = (1 << _BFLOAT16.spare_bits) - 1

_LEAST_NORMAL, _HALF = np.uint32(1 << 23).view(np.float32), np.float32(0.5)
_HALF_OF_LEAST = 1 << 22  # the bits of a subnormal number


def convert(stored: Array, held: NativeType, wanted: NativeType) -> tuple[Array, int]:
    """Bits of `wanted` for stored values of `held`.

    Exact if `wanted` holds the values, otherwise rounded to nearest, ties to even, like a torch
    cast.

    Parameters
    ----------
    stored : ndarray of ``held.stored``
    held, wanted : NativeType

    Returns
    -------
    bits : ndarray of ``wanted.bits``, same shape
    changed : int
        Number of values that were rounded.
    """
    if wanted.name == held.name:
        return narrow(stored, held), 0
    if wanted.itemsize == wanted.stored.itemsize >= held.stored.itemsize:
        return np.asarray(stored, wanted.stored, order="C").view(wanted.bits), 0
    if wanted.name == "float16":  # the cast itself gives the bits
        with np.errstate(over="ignore", under="ignore", invalid="ignore"):
            bits = stored.astype(np.float32, copy=False).astype(np.float16).view(np.uint16)
        values = widen(bits, wanted)
    else:
        values = cast(stored, wanted.name)
        bits = narrow(values, wanted)
    changed = (values != stored) & ~np.isnan(stored)
    return bits, int(np.count_nonzero(changed))


def cast(stored: Array, native: str) -> Array:
    """Values cast to a native type, in the stored form of that type.

    Parameters
    ----------
    stored : ndarray of float32 or float64
    native : str

    Returns
    -------
    ndarray, same shape
        Nearest values, ties to even. Values beyond the largest become infinity; values below the
        smallest become 0 with their sign. NaN keeps the part of its payload that the type holds.
        A float64 is rounded to float32 first, as in torch.
    """
    wanted = NATIVE_TYPES[native]
    with np.errstate(over="ignore", under="ignore", invalid="ignore"):
        values: Array = np.ascontiguousarray(stored).astype(wanted.stored, copy=False)
        values = values.reshape(np.shape(stored))
        if native == "float16":
            return values.astype(np.float16).astype(wanted.stored)
    if native != "bfloat16":
        return values
    wide = unsigned_view(values)
    rounded = _to_even(wide)
    nan = is_nan(wide, NATIVE_TYPES["float32"])
    if nan.any():
        rounded = np.where(nan, wide | np.uint32(_BFLOAT16.nan_bits << int(_SPARE)), rounded)
    rounded &= ~np.uint32(_SPARE_MASK)
    return rounded.view(np.float32)


def result_bits(values: Array, native: NativeType) -> Array:
    """Bits of computed values in a native type, the same on every machine.

    Parameters
    ----------
    values : ndarray of ``native.stored``
        Rounded as by `cast`. A NaN becomes the quiet NaN without sign and payload, which otherwise
        depend on the processor.
    native : NativeType
    """
    bits = narrow(cast(values, native.name), native)
    nan = is_nan(bits, native)
    return np.where(nan, bits.dtype.type(native.nan_bits), bits) if nan.any() else bits


def check_subnormals() -> None:
    """Refuse to compute bits in a thread that replaces subnormal numbers by 0.

    Threads inherit that from the thread that starts them.

    Raises
    ------
    FlushedSubnormals
        If so.
    """
    with np.errstate(under="ignore"):
        kept = _LEAST_NORMAL * _HALF
    if kept.view(np.uint32) != _HALF_OF_LEAST:
        raise FlushedSubnormals(
            "rows of the encoding `compact` need exact arithmetic, but this thread replaces "
            "subnormal numbers by 0; call torch.set_flush_denormal(False) before"
        )


def is_of_type(stored: Array, native: str) -> bool:
    """True if every value is exactly representable in a native type. Any NaN counts as such.

    Parameters
    ----------
    stored : ndarray of floating-point numbers
    native : str
    """
    if is_within(stored.dtype, native):
        return True
    # Fast path: one pass over the bits accepts bfloat16 values without NaN.
    if native == "bfloat16" and stored.dtype == np.float32 and is_bfloat16(unsigned_view(stored)):
        return True
    with np.errstate(invalid="ignore"):
        return bool(((cast(stored, native) == stored) | np.isnan(stored)).all())


def is_within(stored: npt.DTypeLike, native: str) -> bool:
    """True if a native type holds every value of a type, so that no check is needed.

    Examples
    --------
    >>> is_within("float16", "float32"), is_within("float16", "bfloat16")
    (True, False)
    """
    dtype = np.dtype(stored)
    return dtype.name == native or dtype.itemsize < NATIVE_TYPES[native].itemsize


def _to_even(wide: Array) -> Array:
    """Bits of float32 with the nearest bfloat16 in their upper half; invalid for NaN."""
    # Add half of the last kept bit, minus one if that bit is even.
    rounded: Array = wide >> _SPARE
    # In place: allocating a large temporary array costs more than the computation.
    rounded &= np.uint32(1)
    rounded += np.uint32(_SPARE_MASK >> 1)
    rounded += wide
    return rounded
