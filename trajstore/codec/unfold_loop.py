"""The loop of `trajstore.codec.delta.unfold`, as numba compiles it: Python, without its objects.

Indices are unsigned, as a compiler does not put loops into vectors whose indices may be negative
and then count from the end.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

__all__ = ["unfold_rows"]

Bits = npt.NDArray[Any]

_TOGETHER = 2048  # values whose sums stay in the nearest cache


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
