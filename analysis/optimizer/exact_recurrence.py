"""Adam's moments without rounding of their state: the recurrence in float64.

m ← β₁·m + (1 − β₁)·g and v ← β₂·v + (1 − β₂)·g² (Kingma and Ba, arXiv:1412.6980, algorithm 1), of
the gradient g as the optimizer takes it. The module uses NumPy, or a compiled loop over its arrays,
but not dask.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from trajstore.analysis.scan.block_tasks import Array, Wide
from trajstore.compiled_loop import CompiledLoop, memory_of, rows_in_one_piece
from trajstore.values.optimizer_rule import OptimizerRule

_LOOP = CompiledLoop("trajstore.analysis.optimizer.exact_recurrence", "follow_rows")


DECAY_RATES = {"exp_avg": "beta1", "exp_avg_sq": "beta2"}
"""Name of the decay rate β of each moment."""

_TOGETHER = 4096  # elements per batch, so that the previous row stays in the cache


def follow_rows(
    gradient: npt.NDArray[Any],
    gradient_stride: int,
    squared: bool,
    betas: Wide,
    before: Wide,
    taken: npt.NDArray[np.bool_],
    out: Wide,
    out_stride: int,
) -> None:
    """Compute a moving average over several rows: the loop of `follow`, for numba.

    Indices are unsigned, because the compiler does not vectorize loops with indices that may be
    negative and count from the end. Each operation rounds like NumPy's, in the same order. Only the
    sign of a NaN may differ.

    Parameters
    ----------
    gradient : ndarray, 1-D
        Memory of the rows.
    gradient_stride, out_stride : int
        Elements between the starts of consecutive rows.
    squared : bool
        True for the average of the squares.
    betas : ndarray of float64, 1-D
        Decay rate β in the step of each row.
    before : ndarray of float64, 1-D
        The previous row, with the length of all rows.
    taken : ndarray of bool, 1-D
        Rows that update the average.
    out : ndarray of float64, 1-D
        Memory for the result.
    """
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
            beta = betas[row]
            weight = 1 - beta
            source = np.uint64(row * gradient_stride + first)
            if squared:
                for at in range(count):
                    value = np.float64(gradient[source + at])
                    out[target + at] = out[target + at] * beta + (value * value) * weight
            else:
                for at in range(count):
                    value = np.float64(gradient[source + at])
                    out[target + at] = out[target + at] * beta + value * weight


@np.errstate(all="ignore")  # NaN and infinity are valid results
def follow(
    moment: str,
    betas: Wide,
    before: Array,
    gradient: Array,
    taken: npt.NDArray[np.bool_],
    out: Wide,
) -> None:
    """Compute a moment over several steps.

    Parameters
    ----------
    moment : str
        One of `MOMENTS`.
    betas : ndarray of float64, (row)
        Its decay rate β in each step.
    before : ndarray, (token, hidden)
        The moment before the first step.
    gradient : ndarray, (row, token, hidden)
        Gradient as the optimizer takes it.
    taken : ndarray of bool, (row)
        False for skipped steps, which leave the moment unchanged.
    out : ndarray of float64, (row, token, hidden)
        Receives the moment after each step.
    """
    known = gradient.dtype in (np.float32, np.float64)  # float types of numba
    if known and _LOOP.is_worth(gradient.size) and rows_in_one_piece(gradient, out):
        done = _LOOP.run(
            memory_of(gradient),
            gradient.strides[0] // gradient.itemsize,
            moment == "exp_avg_sq",
            np.array(betas),  # writeable: numba compiles again for other flags
            np.ascontiguousarray(before, np.float64).ravel(),
            taken,
            memory_of(out),
            out.strides[0] // out.itemsize,
        )
        if done:
            return
    state, change = before.astype(np.float64), np.empty(before.shape)
    for row, (step, beta) in enumerate(zip(taken, betas, strict=True)):
        if step:
            # The result is newly allocated memory; access it as rarely as possible.
            _target(moment, gradient[row], change)
            change *= 1 - beta
            np.multiply(state, beta, out=out[row])
            out[row] += change
        else:
            out[row] = state
        state = out[row]


@np.errstate(all="ignore")
def intended_change(rule: OptimizerRule, moment: str, before: Array, gradient: Array) -> Wide:
    """Intended change of a moment in a step: (1 − β)(g − m), or (1 − β)(g² − v).

    Parameters
    ----------
    rule : OptimizerRule
    moment : str
        One of `MOMENTS`.
    before : ndarray, any shape
        The moment before the step.
    gradient : ndarray, same shape
        Gradient as the optimizer takes it.
    """
    change = np.empty(gradient.shape)
    _target(moment, gradient, change)
    change -= before
    change *= 1 - getattr(rule, DECAY_RATES[moment])
    return change


def _target(moment: str, gradient: Array, out: Wide) -> None:
    """Write the averaged value, g or g², into `out`."""
    np.copyto(out, gradient)
    if moment == "exp_avg_sq":
        out *= out
