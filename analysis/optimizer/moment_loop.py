"""The loop of `trajstore.analysis.optimizer.moment_rule.MomentRule.follow`, as numba compiles it.

Indices are unsigned, as a compiler does not put loops into vectors whose indices may be negative
and then count from the end. Each operation rounds as NumPy's does, in the same order; only
the sign of a NaN may be another.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

__all__ = ["follow_rows"]

Wide = npt.NDArray[np.float64]

_TOGETHER = 4096  # elements of a row: those of the row before are still in the cache


def follow_rows(
    gradient: npt.NDArray[Any],
    gradient_stride: int,
    squared: bool,
    beta: float,
    before: Wide,
    taken: npt.NDArray[np.bool_],
    out: Wide,
    out_stride: int,
) -> None:
    """Carry a moving average over several rows.

    Parameters
    ----------
    gradient : ndarray, 1-D
        Memory in which the rows lie.
    gradient_stride, out_stride : int
        Elements from one row to the next.
    squared : bool
        Whether it is the average of the squares.
    beta : float
        What is kept of it at each step.
    before : ndarray of float64, 1-D
        The row before, whose length is that of all rows.
    taken : ndarray of bool, 1-D
        Rows that change it.
    out : ndarray of float64, 1-D
        Memory that receives the rows.
    """
    weight = 1 - beta
    for first in range(0, before.size, _TOGETHER):
        count = np.uint64(min(_TOGETHER, before.size - first))
        for row in range(taken.size):
            target = np.uint64(row * out_stride + first)
            if row == 0:
                start = np.uint64(first)
                for at in range(count):
                    out[target + at] = before[start + at]
            else:
                last = np.uint64((row - 1) * out_stride + first)
                for at in range(count):
                    out[target + at] = out[last + at]
            if not taken[row]:
                continue
            source = np.uint64(row * gradient_stride + first)
            if squared:
                for at in range(count):
                    value = np.float64(gradient[source + at])
                    out[target + at] = out[target + at] * beta + (value * value) * weight
            else:
                for at in range(count):
                    value = np.float64(gradient[source + at])
                    out[target + at] = out[target + at] * beta + value * weight
