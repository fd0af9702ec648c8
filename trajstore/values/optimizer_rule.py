"""One step of an optimizer, element by element, in the bits that torch computes on the CPU.

The operations and their order are those of `torch.optim` for one tensor (`_single_tensor_adam`,
`_single_tensor_sgd`). Of a 16-bit parameter each intermediate result is computed in float32 and
rounded; the optimizers of `trajstore.trainers.rounded_optimizer` compute in float32 and round once.
torch adds the product of a fused multiply-add unrounded; the same sum is made here in float64.
Each element depends on itself alone, so a part of a matrix gives that part of the result.
"""

from __future__ import annotations

import decimal
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from decimal import Decimal
from functools import lru_cache
from typing import Any, Literal, Self

import numpy as np
import numpy.typing as npt

from trajstore.errors import InvalidArgument
from trajstore.values.rounding import cast

__all__ = ["OptimizerRule", "Rates"]

Array = npt.NDArray[Any]

_DIGITS = decimal.Context(
    prec=60, rounding=decimal.ROUND_HALF_EVEN, Emin=-(10**6), Emax=10**6, clamp=0, traps=[]
)

_ADAM = ("Adam", "AdamW")
_SGD = "SGD"


@dataclass(frozen=True, kw_only=True)
class Rates:
    """Numbers of one step.

    Attributes
    ----------
    step : int
        From 1 on.
    lr : float
        Learning rate.
    clip : float
        Factor of the gradient; NaN counts as 1.
    """

    step: int
    lr: float
    clip: float


@dataclass(frozen=True, kw_only=True)
class OptimizerRule:
    """How an optimizer makes its next row: W and the moments from the row before and the gradient.

    Attributes
    ----------
    kind : {'adam', 'sgd'}
    beta1, beta2, eps : float
        Of Adam; 0 for SGD.
    weight_decay : float
    decoupled : bool
        Whether the decay acts on W instead of the gradient.
    maximize : bool
        Whether the gradient is taken with the other sign.
    rounds_once : bool
        Whether only the results are rounded, not the intermediate values.
    """

    kind: Literal["adam", "sgd"]
    beta1: float
    beta2: float
    eps: float
    weight_decay: float
    decoupled: bool
    maximize: bool
    rounds_once: bool

    @classmethod
    def of(cls, optimizer: Mapping[str, Any] | None) -> Self:
        """Rule of a run.

        Parameters
        ----------
        optimizer : mapping
            ``class`` and ``hyperparameters``, as in the attribute ``optimizer`` of a run.

        Raises
        ------
        InvalidArgument
            If the optimizer is unknown, has no rule, or lacks a hyperparameter.
        """
        if not optimizer:
            raise InvalidArgument("the run does not name its optimizer")
        full = str(optimizer.get("class", ""))
        name = full.rpartition(".")[2]
        plain = name.removeprefix("Rounded")
        given = optimizer.get("hyperparameters") or {}
        if plain not in (*_ADAM, _SGD):
            raise InvalidArgument(f"no rule is known for the optimizer {full!r}")
        needed = ("momentum", "weight_decay") if plain == _SGD else ("betas", "eps", "weight_decay")
        missing = [key for key in needed if key not in given]
        if missing:
            raise InvalidArgument(f"the hyperparameters of {full!r} lack {', '.join(missing)}")
        if given.get("rounding", "nearest") != "nearest":
            raise InvalidArgument(f"{full!r} rounds at random")
        if given.get("momentum"):
            raise InvalidArgument(f"{full!r} has a momentum buffer, which is not recorded")
        betas = (0.0, 0.0) if plain == _SGD else given["betas"]
        return cls(
            kind="sgd" if plain == _SGD else "adam",
            beta1=float(betas[0]),
            beta2=float(betas[1]),
            eps=float(given.get("eps", 0.0)),
            weight_decay=float(given["weight_decay"]),
            decoupled=bool(given.get("decoupled_weight_decay", plain == "AdamW")),
            maximize=bool(given.get("maximize", False)),
            rounds_once=plain != name or bool(given.get("fused")),
        )

    def facts(self) -> dict[str, Any]:
        """The rule as JSON values, for `from_facts`."""
        return dict(vars(self))

    @classmethod
    def from_facts(cls, facts: Mapping[str, Any]) -> Self:
        """The rule that `facts` describes.

        Raises
        ------
        ValueError
            If it describes none.
        """
        types = {"kind": str, "decoupled": bool, "maximize": bool, "rounds_once": bool}
        numbers = {"beta1", "beta2", "eps", "weight_decay"}
        if facts.keys() != types.keys() | numbers:
            raise ValueError(f"no optimizer's rule has {dict(facts)!r}")
        for name, value in facts.items():
            kinds: Any = types.get(name, (int, float))
            if not isinstance(value, kinds) or (name in numbers and isinstance(value, bool)):
                raise ValueError(f"no optimizer's rule has {name} = {value!r}")
        if facts["kind"] not in ("adam", "sgd"):
            raise ValueError(f"no optimizer's rule has kind = {facts['kind']!r}")
        given: dict[str, Any] = {
            name: float(value) if name in numbers else value for name, value in facts.items()
        }
        return cls(**given)

    def corrections(self, step: int) -> tuple[float, float]:
        """Bias corrections of Adam: 1 - beta1^step, and the square root of 1 - beta2^step.

        The second is NaN where it would be imaginary.
        """
        second = 1 - _power(self.beta2, step)
        return 1 - _power(self.beta1, step), math.sqrt(second) if second >= 0 else math.nan

    @property
    def state(self) -> tuple[str, ...]:
        """Names of the recorded variables that a step makes, W first."""
        return ("W", "exp_avg", "exp_avg_sq") if self.kind == "adam" else ("W",)

    @np.errstate(all="ignore")  # NaN and infinity are results
    def next_row(
        self,
        before: Mapping[str, Array],
        grad: Array,
        natives: Mapping[str, str],
        rates: Rates,
    ) -> dict[str, Array]:
        """What one step makes of a row.

        Parameters
        ----------
        before : mapping of str to ndarray of stored values, any shape
            Each of `state`.
        grad : ndarray of stored values, same shape
            Before clipping.
        natives : mapping of str to str
            Native types of `state` and ``grad``.
        rates : Rates

        Returns
        -------
        dict of str to ndarray of stored values
        """
        lr = rates.lr
        grad = self._taken(grad, rates.clip, natives["grad"])
        rounded: Callable[[Array, str], Array] = cast
        if self.rounds_once:
            wide = np.result_type(*before.values(), grad)
            before = {name: values.astype(wide) for name, values in before.items()}
            grad = grad.astype(wide)
            rounded = _unrounded
        W, native = before["W"], natives["W"]
        if self.weight_decay and self.decoupled:
            W = rounded(W * _scalar(1 - lr * self.weight_decay, W), native)
        elif self.weight_decay:
            # torch.add rounds its factor to the type of the parameter first.
            decay = rounded(np.array([self.weight_decay], W.dtype), native)[0]
            grad = rounded(_fused(W, decay, grad), native)
        if self.kind == "sgd":
            rate = rounded(np.array([-lr], W.dtype), native)[0]
            made = {"W": _fused(grad, rate, W)}
        else:
            made = self._adam(W, before, grad, natives, rates, rounded)
        return {name: cast(values, natives[name]) for name, values in made.items()}

    def _adam(
        self,
        W: Array,
        before: Mapping[str, Array],
        grad: Array,
        natives: Mapping[str, str],
        rates: Rates,
        rounded: Callable[[Array, str], Array],
    ) -> dict[str, Array]:
        first, second = natives["exp_avg"], natives["exp_avg_sq"]
        exp_avg, exp_avg_sq = before["exp_avg"], before["exp_avg_sq"]
        weight = 1 - self.beta1
        if weight < 0.5:
            exp_avg = rounded(_fused(grad - exp_avg, weight, exp_avg), first)
        else:
            exp_avg = rounded(_fused(exp_avg - grad, self.beta1, grad), first)
        exp_avg_sq = rounded(exp_avg_sq * _scalar(self.beta2, exp_avg_sq), second)
        scaled = grad * _scalar(1 - self.beta2, grad)
        exp_avg_sq = rounded(_sum(scaled, grad, exp_avg_sq), second)
        correction, root = self.corrections(rates.step)
        if not correction or not root > 0:  # of β = 1: torch raises
            nan = np.full_like(W, np.nan)
            return {"W": nan, "exp_avg": exp_avg, "exp_avg_sq": exp_avg_sq}
        below = rounded(np.sqrt(exp_avg_sq), second)
        below = rounded(below / _scalar(root, below), second)
        below = rounded(below + rounded(_scalar(self.eps, below), second), second)
        scale = _scalar(-rates.lr / correction, exp_avg)
        W = W + scale * exp_avg / below
        return {"W": W, "exp_avg": exp_avg, "exp_avg_sq": exp_avg_sq}

    def _taken(self, grad: Array, clip: float, native: str) -> Array:
        """The gradient as the optimizer takes it."""
        factor = _scalar(clip, grad)
        if factor != 1 and not np.isnan(factor):
            grad = cast(grad * factor, native)
        return -grad if self.maximize else grad


@lru_cache(maxsize=1 << 12)
def _power(base: float, exponent: int) -> float:
    """The nearest float64; that of the C library differs between machines."""
    return float(_DIGITS.power(Decimal(base), exponent))


def _unrounded(values: Array, native: str) -> Array:
    return values


def _scalar(value: float, like: Array) -> Any:
    return like.dtype.type(value)


def _fused(values: Array, factor: float, added: Array) -> Array:
    """Values · factor + added, rounded once to the type of `added`."""
    return _sum(values, _scalar(factor, values), added)


def _sum(one: Array, other: Any, added: Array) -> Array:
    """One · other + added, rounded once: exact in float64 but for the last sum."""
    if added.dtype != np.float32:
        return np.asarray(one * other + added)
    product: Array = np.multiply(one, other, dtype=np.float64)
    product += added
    return product.astype(np.float32)
