"""Adam's moments without the rounding of their state: the recurrence itself, in float64.

What enters is the gradient as the optimizer took it, of the gradient's own type: clipping
multiplies it in place before the optimizer sees it, and rounds (`torch.nn.utils.clip_grad_norm_`).
What the optimizer then does is float64: m ← β₁·m + (1 − β₁)·g and v ← β₂·v + (1 − β₂)·g² (Kingma
and Ba, arXiv:1412.6980, algorithm 1), with g negated under `maximize` and coupled weight decay
added to it, as `torch.optim.Adam` does. NumPy, or a compiled loop over its arrays; no dask.
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
"""By the names of the variables that hold them."""

_LOOP = CompiledLoop("trajstore.analysis.optimizer.moment_rule", "follow_rows")


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
    """Carry a moving average over several rows: the loop of `MomentRule.follow`, for numba.

    Indices are unsigned, as a compiler does not put loops into vectors whose indices may be
    negative and then count from the end. Each operation rounds as NumPy's does, in the same order;
    only the sign of a NaN may be another.

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


@dataclass(frozen=True, kw_only=True)
class MomentRule:
    """How Adam or AdamW carries its moments on.

    Attributes
    ----------
    update : AdamRule
        From the moments to the change of W, without any rounding on the way.
    coupled_decay : float
        Weight decay that is added to the gradient; 0 where it is decoupled.
    maximize : bool
        The optimizer takes the gradient with the other sign.
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
            As `AdamRule.of`; and for amsgrad.
        """
        update = AdamRule.of(optimizer)
        if update.amsgrad:
            raise InvalidArgument(
                "the run was trained with amsgrad, which divides by the largest second moment so "
                "far, and that is not recorded; the moments are followed without amsgrad only"
            )
        given = (optimizer or {})["hyperparameters"]
        return cls(
            update=replace(update, stepwise=False),
            # The update knows the decay only where it is decoupled.
            coupled_decay=0.0 if update.weight_decay else float(given["weight_decay"]),
            maximize=bool(given.get("maximize", False)),
        )

    @np.errstate(all="ignore")  # NaN and infinity are answers, not mishaps
    def gradient(self, grad: Array, clip: Array, W: Array | None, native: str) -> Array:
        """What the moments take in.

        Parameters
        ----------
        grad : ndarray of stored values, (row, token, hidden)
            Before clipping.
        clip : ndarray, (row, 1, 1)
            What clipping multiplied it by.
        W : ndarray of stored values, same shape as `grad`, optional
            Before the step; only coupled weight decay needs it.
        native : str
            Type of the gradient.

        Returns
        -------
        ndarray, same shape
            Of the type of `grad`, and `grad` itself where nothing is done to it; of float64 with
            coupled weight decay.
        """
        # A factor of another type is rounded to the one that torch multiplies in.
        factor = clip.astype(grad.dtype)
        clipped = np.flatnonzero(factor != 1)  # NaN is among them
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
        """Change of a moment that a step asks for: (1 − β)(g − m), or (1 − β)(g² − v).

        Parameters
        ----------
        moment : str
            Of `MOMENTS`.
        before : ndarray, any shape
            The moment before the step.
        gradient : ndarray, same shape
            As `gradient` gives it.
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
        """Carry a moment over several steps.

        Parameters
        ----------
        moment : str
            Of `MOMENTS`.
        before : ndarray, (token, hidden)
            Before the first of them.
        gradient : ndarray, (row, token, hidden)
            As `gradient` gives it.
        taken : ndarray of bool, (row)
            Where it is False, no step was taken and the moment stays.
        out : ndarray of float64, (row, token, hidden)
            Receives the moment after each step.
        """
        beta = self._beta(moment)
        known = gradient.dtype in (np.float32, np.float64)  # of floats, to numba
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
                # The result is fresh memory, and gone through as seldom as can be.
                self._target(moment, gradient[row], change)
                change *= 1 - beta
                np.multiply(state, beta, out=out[row])
                out[row] += change
            else:
                out[row] = state
            state = out[row]

    def _beta(self, moment: str) -> float:
        """How much of a moment a step keeps."""
        return self.update.beta1 if moment == "exp_avg" else self.update.beta2

    def _target(self, moment: str, gradient: Array, out: Wide) -> None:
        """What the moment is the moving average of, into `out`."""
        np.copyto(out, gradient)
        if moment == "exp_avg_sq":
            out *= out
