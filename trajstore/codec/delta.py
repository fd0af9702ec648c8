"""Differences along the steps, which turn floating-point histories into small integers.

Between two optimizer steps most values keep their exponent and high mantissa bits, or do not change
at all. Along the first axis of a chunk (step), `fold`

1. subtracts from the bits of each value, in its native type, the bits of the row before, modulo
   2^width; the first row is unchanged;
2. folds the sign of the difference into its lowest bit (zigzag), so that small differences of
   either sign have high bits of zero.

The result is unsigned integers of the native width, and exact for every bit pattern.

Each thread reuses the memory of intermediate results (`scratch`): fresh memory costs as much as the
computation in it.
"""

from __future__ import annotations

import math
import threading
from typing import Any

import numpy as np
import numpy.typing as npt

from trajstore.threads import CompiledLoop, memory_of, values_side_by_side
from trajstore.values.native_types import NativeType, widen

_SMALL = 16 << 10  # bytes that the allocator provides without a system call


class _Scratch(threading.local):
    def __init__(self) -> None:
        self._buffers: dict[str, npt.NDArray[np.uint8]] = {}

    def array(self, name: str, shape: tuple[int, ...], dtype: npt.DTypeLike) -> npt.NDArray[Any]:
        """Uninitialized array of this thread, valid until the next call with the same name.

        Parameters
        ----------
        name : str
            Purpose of the array. Arrays of different names do not overlap.
        shape : tuple of int
        dtype : data-type
        """
        dtype = np.dtype(dtype)
        size = math.prod(shape) * dtype.itemsize
        if size <= _SMALL:
            return np.empty(shape, dtype)
        buffer = self._buffers.get(name)
        if buffer is None or buffer.size < size:
            buffer = self._buffers[name] = np.empty(size, np.uint8)
        return buffer[:size].view(dtype).reshape(shape)


scratch = _Scratch()
"""Scratch memory; each thread has its own."""

Bits = npt.NDArray[Any]

_GROUP = 1 << 20  # bytes that one call of NumPy processes; threads wait longer with more calls

_LOOP = CompiledLoop("trajstore.codec.delta", "unfold_rows")

_TOGETHER = 2048  # values whose sums fit into the L1 cache

_SHORT = 256  # values of a row; below this, a NumPy call takes longer than the addition


def fold(bits: Bits, out: Bits) -> None:
    """Compute differences along the first axis, with folded signs, a group of rows at a time.

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
    """Invert `fold`, and write the stored form of the bits, a group of rows at a time.

    Parameters
    ----------
    folded : ndarray of ``native.bits``, (step, …)
        May be overwritten, as a second array of its size would not fit into the cache.
    native : NativeType
    out : ndarray of unsigned integers of the stored or the native width, (step, …)
        Receives the bits of the stored values of the rows from `start`, or the native bits.
    start : int
        Number of first rows that are summed and not written.
    """
    if not _unfold_compiled(folded, native, out, start):
        _unfold_by_numpy(folded, native, out, start)


def _unfold_compiled(folded: Bits, native: NativeType, out: Bits, start: int) -> bool:
    """Run `unfold` in the compiled loop; return False if the loop does not support the arrays."""
    widened = out.itemsize != native.itemsize
    if (widened and not native.is_cut_off) or not _LOOP.is_worth(out.size):
        return False
    taken = folded[start:]  # has the shape of `out`
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
    """Strides in values: between steps, and between rows."""
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
    """Sum folded differences along the first of three axes, of which the last is contiguous.

    numba compiles this function. Indices are unsigned: a negative index counts from the end, and
    compilers do not vectorize loops with such indices.

    Parameters
    ----------
    folded, out : ndarray of unsigned integers, 1-D
        Memory that contains the values, from the first to the last.
    folded_strides, out_strides : tuple of int
        Strides in values: between steps, and between rows of a step.
    shape : tuple of int
        Numbers of steps, rows of a step, and values of a row.
    start : int
        Number of first steps that are summed and not written.
    shift : unsigned integer of the type of `out`
        Number of bits by which the sums are shifted to the left.
    """
    steps, rows, width = shape
    native, stored = folded.dtype.type, out.dtype.type
    zero, low_bit = native(0), native(1)
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
                    sums[at] += (value >> low_bit) ^ (zero - (value & low_bit))
            for step in range(start, steps):
                source = np.uint64(step * folded_strides[0] + row * folded_strides[1] + first)
                target = np.uint64((step - start) * out_strides[0] + row * out_strides[1] + first)
                for at in range(count):
                    value = folded[source + at]
                    total = native(sums[at] + ((value >> low_bit) ^ (zero - (value & low_bit))))
                    sums[at] = total
                    out[target + at] = stored(total) << shift


def _unfold_by_numpy(folded: Bits, native: NativeType, out: Bits, start: int) -> None:
    if not folded.flags.c_contiguous:
        ordered = scratch.array("ordered", folded.shape, folded.dtype)
        np.copyto(ordered, folded)
        folded = ordered
    low_bit = native.bits.type(1)
    length = _rows_of_a_group(folded)
    signs = scratch.array("signs", (length, *folded.shape[1:]), native.bits)
    before: Bits | None = None  # sum of the rows so far
    for first in range(0, len(folded), length):
        bits = folded[first : first + length]
        sign = signs[: len(bits)]
        np.bitwise_and(bits, low_bit, out=sign)
        np.negative(sign, out=sign)  # modulo 2^width: 0 or all ones
        np.right_shift(bits, low_bit, out=bits)
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
    """Add to each row all rows before it."""
    if bits[:1].size < _SHORT:  # one call, but slow for long rows
        np.add.accumulate(bits, axis=0, out=bits)
        return
    for at in range(1, len(bits)):
        here = bits[at : at + 1]  # a view, even if a row is a single number
        np.add(here, bits[at - 1 : at], out=here)
