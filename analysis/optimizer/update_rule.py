"""Adam's update rule: the change of W from the recorded moments.

The rule and its order of operations are those of `torch.optim.Adam` and `AdamW`: decoupled weight
decay first, then W − lr/(1 − β₁ᵗ)·m / (√v/√(1 − β₂ᵗ) + ε). In a 16-bit type, each intermediate
result is rounded as in the optimizer, except the final sum that gives the next W. The optimizers of
`rounded_optimizer` do not round intermediate results: they compute in float32, or in float64 if W
or the moments are float64. The module uses NumPy only, not dask.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from trajstore.errors import InvalidArgument, VariableNotRecorded
from trajstore.values.rounding import round_to

__all__ = ["AdamRule", "next_weights"]

Array = npt.NDArray[Any]

_RULES = ("Adam", "AdamW")
_ROUNDED = tuple(f"Rounded{name}" for name in _RULES)


@dataclass(frozen=True, kw_only=True)
class AdamRule:
    """Hyperparameters of Adam or AdamW.

    Attributes
    ----------
    beta1, beta2, eps : float
    weight_decay : float
        Decoupled weight decay. Coupled decay is part of the gradient, and thus of the moments.
    amsgrad : bool
        True if the rule divides by the largest second moment so far.
    stepwise : bool
        True if intermediate results are rounded to the native type, as in all torch kernels except
        the fused ones.
    """

    beta1: float
    beta2: float
    eps: float
    weight_decay: float
    amsgrad: bool
    stepwise: bool

    @classmethod
    def of(cls, optimizer: Mapping[str, Any] | None) -> AdamRule:
        """Rule of a run.

        Parameters
        ----------
        optimizer : mapping
            ``class`` and ``hyperparameters``, as in the attribute ``optimizer`` of a run.

        Raises
        ------
        VariableNotRecorded
            If the optimizer is not recorded.
        InvalidArgument
            If the optimizer is not Adam, AdamW, RoundedAdam or RoundedAdamW, or a hyperparameter is
            missing.
        """
        if not optimizer:
            raise VariableNotRecorded(
                "the run has no attribute optimizer, so its update rule is unknown; pass "
                "optimizer={'class': 'AdamW', 'hyperparameters': {'betas': …, 'eps': …, …}}"
            )
        name = str(optimizer.get("class", "")).rpartition(".")[2]
        if name not in _RULES + _ROUNDED:
            raise InvalidArgument(
                f"got the optimizer {optimizer.get('class')!r}, expected one of "
                f"{', '.join(_RULES + _ROUNDED)}"
            )
        given = optimizer.get("hyperparameters", {})
        missing = [key for key in ("betas", "eps", "weight_decay") if key not in given]
        if missing:
            raise InvalidArgument(
                f"hyperparameters of the optimizer are missing: {', '.join(missing)}"
            )
        decoupled = given.get("decoupled_weight_decay", name.endswith("AdamW"))
        return cls(
            beta1=float(given["betas"][0]),
            beta2=float(given["betas"][1]),
            eps=float(given["eps"]),
            weight_decay=float(given["weight_decay"]) if decoupled else 0.0,
            amsgrad=bool(given.get("amsgrad", False)),
            stepwise=name in _RULES and not given.get("fused"),
        )

    def change(
        self,
        W: Array,
        exp_avg: Array,
        exp_avg_sq: Array,
        lr: npt.NDArray[np.float64],
        step: npt.NDArray[np.int64],
        native: str,
    ) -> Array:
        """Change of W according to the rule.

        Parameters
        ----------
        W : ndarray of stored values, (row, token, hidden)
            W before the step.
        exp_avg, exp_avg_sq : ndarray of stored values, same shape
            Moments after the step. With `amsgrad`, the second is the largest so far.
        lr, step : ndarray, (row, 1, 1) or any shape that broadcasts
            Learning rate, and number of the step.
        native : str
            Type of W.

        Returns
        -------
        ndarray of float32 (float64 if W or the moments are), same shape
        """
        kind = np.result_type(W, exp_avg).type
        with np.errstate(invalid="ignore", divide="ignore", over="ignore", under="ignore"):
            scale = -lr / (1 - self.beta1**step)
            root = np.sqrt(1 - self.beta2**step)
            below = self._staged(np.sqrt(exp_avg_sq), native)
            below = self._staged(below / root.astype(kind), native)
            eps = self._staged(np.array([self.eps], kind), native)[0]  # torch rounds it first
            below = self._staged(below + eps, native)
            change: Array = scale.astype(kind) * exp_avg / below
            if self.weight_decay:
                decayed = self._staged(W * (1 - lr * self.weight_decay).astype(kind), native)
                # In float64 the difference of neighbors and the sum are nearly exact, so that
                # the result is rounded once.
                change = (np.subtract(decayed, W, dtype=np.float64) + change).astype(kind)
        return change

    def _staged(self, values: Array, native: str) -> Array:
        return round_to(values, native) if self.stepwise else values


def next_weights(W: Array, change: Array, native: str) -> Array:
    """W + change, rounded once.

    Parameters
    ----------
    W : ndarray of stored values, any shape
    change : ndarray, same shape
        Result of `AdamRule.change`.
    native : str
        Type of W.
    """
    with np.errstate(over="ignore", invalid="ignore"):
        return round_to((W.astype(np.float64) + change).astype(W.dtype), native)
