"""Differences along the steps: floating-point histories as small integers.

From one optimizer step to the next most values of a history keep their exponent and high mantissa
bits, or do not change at all. Along the first axis of a chunk (step), `fold`

1. takes the difference of each value's bits, in its native type, to the bits of the row before,
   modulo 2^width; the first row stays;
2. folds the sign of the difference into its lowest bit (zigzag), so that small differences have
   high bits of zero whichever way they point.

What comes out are unsigned integers of the native width. Exact for every bit pattern.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import numpy.typing as npt

from trajstore.codec.scratch_memory import scratch
from trajstore.compiled_loop import CompiledLoop, memory_of, values_side_by_side
from trajstore.values.native_types import NativeType, widen

__all__ = ["fold", "unfold", "unfold_rows"]

Bits = npt.NDArray[Any]

_GROUP = 1 << 20  # bytes that one call of NumPy goes over: more calls, more waiting of threads

_LOOP = CompiledLoop("trajstore.codec.delta", "unfold_rows")

_TOGETHER = 2048  # values whose sums stay in the nearest cache

_SHORT = 256  # values of a row, so few that calling NumPy for each takes longer than adding them


def fold(bits: Bits, out: Bits) -> None:
    """Differences along the first axis, with folded signs; some rows at a time.

    Parameters
    ----------
    bits : ndarray of unsigned integers, (step, …)
    out : ndarray, same shape and type
        Receives the result.
    """
    signed = np.dtype(f"i{bits.itemsize}")
    highest = 8 * bits.itemsize - 1
    length = _rows_of_a_group(bits)
    signs = scratch.array("signs", (length, *bits.shape[1:]), signed)
    np.copyto(out[:1], bits[:1])
    for first in range(0, len(bits), length):
        group = out[first : first + length]
        begin = max(first, 1)
        stop = first + len(group)
        np.subtract(bits[begin:stop], bits[begin - 1 : stop - 1], out=out[begin:stop])
        difference, sign = group.view(signed), signs[: len(group)]
        np.right_shift(difference, highest, out=sign)  # arithmetic: 0 or −1
        np.add(difference, difference, out=difference)
        np.bitwise_xor(difference, sign, out=difference)


def unfold(folded: Bits, native: NativeType, out: Bits, start: int = 0) -> None:
    """Inverse of `fold`, and stored form of the bits; some rows at a time.

    Parameters
    ----------
    folded : ndarray of ``native.bits``, (step, …)
        May be overwritten: a second array of its size would not stay in the cache.
    native : NativeType
    out : ndarray of unsigned integers of the stored or the native width, (step, …)
        Receives the bits of the stored values of the rows from `start` on, or the native bits.
    start : int
        Rows that are only added up.
    """
    if not _unfold_compiled(folded, native, out, start):
        _unfold_by_numpy(folded, native, out, start)


def _unfold_compiled(folded: Bits, native: NativeType, out: Bits, start: int) -> bool:
    """Do what `unfold` does, where there is a compiled loop that can; whether it was done."""
    widened = out.itemsize != native.itemsize
    if (widened and not native.is_cut_off) or not _LOOP.is_worth(folded.size):
        return False
    taken = folded[start:]  # of the same shape as what comes out
    axis, width = values_side_by_side(taken, out)
    rows = math.prod(taken.shape[1 : axis + 1])
    if not width or (axis and rows > taken.shape[axis]):
        return False  # more than one axis of rows
    return _LOOP.run(
        memory_of(folded),
        _strides(folded, axis),
        memory_of(out),
        _strides(out, axis),
        (len(folded), rows, width),
        start,
        out.dtype.type(native.spare_bits if widened else 0),
    )


def _strides(array: Bits, axis: int) -> tuple[int, int]:
    """Values from one step to the next, and from one row to the next."""
    row = array.strides[axis] if axis else 0
    return array.strides[0] // array.itemsize, row // array.itemsize


def unfold_rows(
    folded: Bits,
    folded_strides: tuple[int, int],
    out: Bits,
    out_strides: tuple[int, int],
    shape: tuple[int, int, int],
    start: int,
    shift: Any,
) -> None:
    """Add up folded differences along the first of three axes, of which the last is contiguous.

    numba compiles this. Indices are unsigned, as a compiler does not put loops into vectors whose
    indices may be negative and then count from the end.

    Parameters
    ----------
    folded, out : ndarray of unsigned integers, 1-D
        Memory in which the values lie, from the first to the last.
    folded_strides, out_strides : tuple of int
        Values from one step to the next, and from one row of them to the next.
    shape : tuple of int
        Steps, rows of a step, values of a row.
    start : int
        Steps that are only added up.
    shift : unsigned integer of the type of `out`
        How far the sums are shifted to the left in it.
    """
    steps, rows, width = shape
    native, stored = folded.dtype.type, out.dtype.type
    zero, one = native(0), native(1)
    sums = np.empty(_TOGETHER, folded.dtype)
    for row in range(rows):
        for first in range(0, width, _TOGETHER):
            count = np.uint64(min(_TOGETHER, width - first))
            for at in range(count):
                sums[at] = zero
            for step in range(start):
                source = np.uint64(step * folded_strides[0] + row * folded_strides[1] + first)
                for at in range(count):
                    value = folded[source + at]
                    sums[at] += (value >> one) ^ (zero - (value & one))
            for step in range(start, steps):
                source = np.uint64(step * folded_strides[0] + row * folded_strides[1] + first)
                target = np.uint64((step - start) * out_strides[0] + row * out_strides[1] + first)
                for at in range(count):
                    value = folded[source + at]
                    total = native(sums[at] + ((value >> one) ^ (zero - (value & one))))
                    sums[at] = total
                    out[target + at] = stored(total) << shift


def _unfold_by_numpy(folded: Bits, native: NativeType, out: Bits, start: int) -> None:
    if not folded.flags.c_contiguous:
        ordered = scratch.array("ordered", folded.shape, folded.dtype)
        np.copyto(ordered, folded)
        folded = ordered
    one = native.bits.type(1)
    length = _rows_of_a_group(folded)
    signs = scratch.array("signs", (length, *folded.shape[1:]), native.bits)
    before: Bits | None = None  # what the rows so far add up to
    for first in range(0, len(folded), length):
        bits = folded[first : first + length]
        sign = signs[: len(bits)]
        np.bitwise_and(bits, one, out=sign)
        np.negative(sign, out=sign)  # modulo 2^width: 0 or all ones
        np.right_shift(bits, one, out=bits)
        np.bitwise_xor(bits, sign, out=bits)
        if before is not None:
            bits[:1] += before
        passed = min(max(start - first, 0), len(bits))
        if passed:
            before = np.add.reduce(bits[:passed], axis=0, keepdims=True, dtype=native.bits)
            bits = bits[passed:]
            if not len(bits):
                continue
            bits[:1] += before
        _add_up(bits)
        before = bits[-1:]
        place = out[first + passed - start :][: len(bits)]
        if out.itemsize == native.itemsize:
            np.copyto(place, bits)
        else:
            widen(bits, native, out=place)


def _rows_of_a_group(bits: Bits) -> int:
    return max(1, min(len(bits), _GROUP // max(1, bits[:1].nbytes)))


def _add_up(bits: Bits) -> None:
    """Add to each row all that are before it."""
    if bits[:1].size < _SHORT:  # NumPy's own way is slow for rows, but one call
        np.add.accumulate(bits, axis=0, out=bits)
        return
    for at in range(1, len(bits)):
        here = bits[at : at + 1]  # a view also where a row is a single number
        np.add(here, bits[at - 1 : at], out=here)
