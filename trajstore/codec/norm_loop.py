"""The loop of `trajstore.codec.chunk_norms`, as numba compiles it: Python, without its objects.

Indices are unsigned, as a compiler does not put loops into vectors whose indices may be negative
and then count from the end.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

__all__ = ["measure_vectors"]

# Values that stay in the nearest cache, as bits and as what they stand for: no power of two, as the
# processor confuses addresses that are multiples of 4 KiB apart.
_TOGETHER = 768


def measure_vectors(
    folded: npt.NDArray[Any],
    stride: int,
    shape: tuple[int, int, int],
    start: int,
    shift: Any,
    slack: float,
    out: npt.NDArray[np.float32],
    unsure: npt.NDArray[np.uint8],
) -> None:
    """Add up folded differences along the steps, and measure the vectors that result.

    Parameters
    ----------
    folded : ndarray of unsigned integers, 1-D
        Memory in which the differences lie: of a step, side by side.
    stride : int
        Values from one step to the next.
    shape : tuple of int
        Steps, vectors of a step, values of a vector.
    start : int
        Steps that are only added up.
    shift : uint32
        How far the bits are shifted to the left in those of a float32.
    slack : float
        By how much two lengths may differ whose squares are added up in different order, relative.
    out : ndarray of float32, 1-D
        Receives the lengths, of the steps from `start` on.
    unsure : ndarray of uint8, (1)
        Receives 1 where that may round one of them otherwise.
    """
    steps, vectors, width = shape
    native = folded.dtype.type
    zero, one = native(0), native(1)
    together = max(1, _TOGETHER // width)
    sums = np.empty(together * width, folded.dtype)
    bits = np.empty(together * width, np.uint32)
    values = bits.view(np.float32)
    lengths = np.empty(together)
    less, more = 1 - slack, 1 + slack
    doubts = 0
    for first in range(0, vectors, together):
        held = min(together, vectors - first)
        count = np.uint64(held * width)
        for at in range(count):
            sums[at] = zero
        for step in range(steps):
            source = np.uint64(step * stride + first * width)
            for at in range(count):
                value = folded[source + at]
                total = native(sums[at] + ((value >> one) ^ (zero - (value & one))))
                sums[at] = total
                bits[at] = np.uint32(total) << shift
            if step < start:
                continue
            for vector in range(held):
                begin = np.uint64(vector * width)
                squares = 0.0
                for at in range(np.uint64(width)):
                    wide = np.float64(values[begin + at])
                    squares += wide * wide
                lengths[vector] = np.sqrt(squares)
            target = np.uint64((step - start) * vectors + first)
            for at in range(np.uint64(held)):
                length = lengths[at]
                low = np.float32(length * less)
                doubts += length == length and low != np.float32(length * more)
                out[target + at] = low if length == length else np.float32(np.nan)
    unsure[0] = doubts > 0
