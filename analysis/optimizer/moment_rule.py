"""Adam's moments without rounding of their state: the recurrence in float64.

The input is the gradient of the optimizer in its own type: clipping multiplies it in place before
the optimizer step, and rounds (`torch.nn.utils.clip_grad_norm_`). The recurrence is computed in
float64: m ← β₁·m + (1 − β₁)·g and v ← β₂·v + (1 − β₂)·g² (Kingma and Ba, arXiv:1412.6980,
algorithm 1). As in `torch.optim.Adam`, `maximize` negates g, and coupled weight decay is added to
it. The module uses NumPy, or a compiled loop over its arrays, but not dask.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from trajstore.analysis.optimizer.update_rule import AdamRule
from trajstore.compiled_loop import CompiledLoop, memory_of, rows_in_one_piece
from trajstore.errors import InvalidArgument
from trajstore.values.rounding import round_to

__all__ = ["MOMENTS", "MomentRule", "follow_rows"]

Array = npt.NDArray[Any]
Wide = npt.NDArray[np.float64]

MOMENTS = ("exp_avg", "exp_avg_sq")
"""Names of the variables that hold the moments."""

_LOOP = CompiledLoop("trajstore.analysis.optimizer.moment_rule", "follow_rows")


_TOGETHER = 4096  # elements per batch, so that the previous row stays in the cache


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
    """Compute a moving average over several rows: the loop of `MomentRule.follow`, for numba.

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
    beta : float
        Decay rate β.
    before : ndarray of float64, 1-D
        The previous row, with the length of all rows.
    taken : ndarray of bool, 1-D
        Rows that update the average.
    out : ndarray of float64, 1-D
        Memory for the result.
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


@dataclass(frozen=True, kw_only=True)
class MomentRule:
    """The recurrence of the moments of Adam or AdamW.

    Attributes
    ----------
    update : AdamRule
        The update rule without intermediate rounding.
    coupled_decay : float
        Weight decay that is added to the gradient; 0 if it is decoupled.
    maximize : bool
        True if the optimizer negates the gradient.
    """

    update: AdamRule
    coupled_decay: float
    maximize: bool

    @classmethod
    def of(cls, optimizer: Mapping[str, Any] | None) -> MomentRule:
        """Rule of a run.

        Parameters
        ----------
        optimizer : mapping
            ``class`` and ``hyperparameters``, as in the attribute ``optimizer`` of a run.

        Raises
        ------
        VariableNotRecorded, InvalidArgument
            As for `AdamRule.of`; and for amsgrad.
        """
        update = AdamRule.of(optimizer)
        if update.amsgrad:
            raise InvalidArgument(
                "got a run trained with amsgrad, which is not supported: it divides by the largest "
                "second moment so far, which is not recorded"
            )
        given = (optimizer or {})["hyperparameters"]
        return cls(
            update=replace(update, stepwise=False),
            # The update has a weight decay only if it is decoupled.
            coupled_decay=0.0 if update.weight_decay else float(given["weight_decay"]),
            maximize=bool(given.get("maximize", False)),
        )

    @np.errstate(all="ignore")  # NaN and infinity are valid results
    def gradient(self, grad: Array, clip: Array, W: Array | None, native: str) -> Array:
        """The gradient that enters the moments.

        Parameters
        ----------
        grad : ndarray of stored values, (row, token, hidden)
            Gradient before clipping.
        clip : ndarray, (row, 1, 1)
            Factor of the clipping.
        W : ndarray of stored values, same shape as `grad`, optional
            W before the step, for coupled weight decay only.
        native : str
            Type of the gradient.

        Returns
        -------
        ndarray, same shape
            Of the type of `grad`, and `grad` itself if nothing changes; float64 with coupled weight
            decay.
        """
        # torch rounds the factor to the type of the multiplication.
        factor = clip.astype(grad.dtype)
        clipped = np.flatnonzero(factor != 1)  # includes NaN
        taken = grad
        if clipped.size:
            taken = grad.copy()
            taken[clipped] = round_to(grad[clipped] * factor[clipped], native)
        if self.maximize:
            taken = -taken
        if W is None:
            return taken
        return np.asarray(taken + self.coupled_decay * W.astype(np.float64))

    @np.errstate(all="ignore")
    def intended(self, moment: str, before: Array, gradient: Array) -> Wide:
        """Intended change of a moment in a step: (1 − β)(g − m), or (1 − β)(g² − v).

        Parameters
        ----------
        moment : str
            One of `MOMENTS`.
        before : ndarray, any shape
            The moment before the step.
        gradient : ndarray, same shape
            Result of `gradient`.
        """
        change = np.empty(gradient.shape)
        self._target(moment, gradient, change)
        change -= before
        change *= 1 - self._beta(moment)
        return change

    @np.errstate(all="ignore")
    def follow(
        self, moment: str, before: Array, gradient: Array, taken: npt.NDArray[np.bool_], out: Wide
    ) -> None:
        """Compute a moment over several steps.

        Parameters
        ----------
        moment : str
            One of `MOMENTS`.
        before : ndarray, (token, hidden)
            The moment before the first step.
        gradient : ndarray, (row, token, hidden)
            Result of `gradient`.
        taken : ndarray of bool, (row)
            False for skipped steps, which leave the moment unchanged.
        out : ndarray of float64, (row, token, hidden)
            Receives the moment after each step.
        """
        beta = self._beta(moment)
        known = gradient.dtype in (np.float32, np.float64)  # float types of numba
        if known and _LOOP.is_worth(gradient.size) and rows_in_one_piece(gradient, out):
            done = _LOOP.run(
                memory_of(gradient),
                gradient.strides[0] // gradient.itemsize,
                moment == "exp_avg_sq",
                beta,
                np.ascontiguousarray(before, np.float64).ravel(),
                taken,
                memory_of(out),
                out.strides[0] // out.itemsize,
            )
            if done:
                return
        state, change = before.astype(np.float64), np.empty(before.shape)
        for row, step in enumerate(taken):
            if step:
                # The result is newly allocated memory; access it as rarely as possible.
                self._target(moment, gradient[row], change)
                change *= 1 - beta
                np.multiply(state, beta, out=out[row])
                out[row] += change
            else:
                out[row] = state
            state = out[row]

    def _beta(self, moment: str) -> float:
        """Decay rate of a moment."""
        return self.update.beta1 if moment == "exp_avg" else self.update.beta2

    def _target(self, moment: str, gradient: Array, out: Wide) -> None:
        """Write the averaged value, g or g², into `out`."""
        np.copyto(out, gradient)
        if moment == "exp_avg_sq":
            out *= out
