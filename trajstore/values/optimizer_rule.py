"""One step of an optimizer, element by element, in the bits that torch computes on the CPU.

The operations and their order are those of `torch.optim` for one tensor (`_single_tensor_adam`,
`_single_tensor_sgd`). Of a 16-bit parameter each intermediate result is computed in float32 and
rounded; the optimizers of `trajstore.trainers.rounded_optimizer` compute in float32 and round once.
torch adds the product of a fused multiply-add unrounded; the same sum is made here in float64.
Each element depends on itself alone, so a part of a matrix gives that part of the result.

`OptimizerRule` is for a matrix, `VectorRule` for the vectors that join all other parameters. There
each parameter is a segment of elements. Its optimizer group defines the rule and the learning rate,
and the optimizer counts its steps: none in a step in which it has no gradient.
"""

from __future__ import annotations

import decimal
import itertools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from decimal import Decimal
from functools import lru_cache
from numbers import Real
from typing import Any, Literal, Self

import numpy as np
import numpy.typing as npt

from trajstore.arguments import checks_types
from trajstore.errors import InvalidArgument
from trajstore.provenance import OptimizerAttributes, RunAttributes
from trajstore.values.native_types import cast

Array = npt.NDArray[Any]

_DIGITS = decimal.Context(
    prec=60, rounding=decimal.ROUND_HALF_EVEN, Emin=-(10**6), Emax=10**6, clamp=0, traps=[]
)

MOMENTS = ("exp_avg", "exp_avg_sq")
"""Names of the variables that hold Adam's moments."""

LARGEST = "max_exp_avg_sq"
"""Name of the largest second moment so far, which amsgrad divides by. The rule carries it."""

MOMENTUM = "momentum_buffer"
"""Name of the variable that holds the momentum of SGD."""

ADAM = ("Adam", "AdamW")
"""Names of the classes with Adam's rule, without the prefix ``Rounded``."""

_SGD = "SGD"

NUMBERS = np.dtype([(name, np.float64) for name in ("beta1", "beta2", "eps", "weight_decay")])
"""Numbers of Adam's rule that may change from step to step."""

SETTINGS = (*(NUMBERS.names or ()), "momentum", "dampening")
"""Names of the numbers of any rule that may change from step to step."""


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
    numbers : tuple of (str, float)
        Those of `SETTINGS` that differ from the rule's.
    """

    step: int
    lr: float
    clip: float
    numbers: tuple[tuple[str, float], ...] = ()


@dataclass(frozen=True, kw_only=True)
class OptimizerRule:
    """Rule by which W and the moments follow from the row before and the gradient.

    Attributes
    ----------
    kind : {'adam', 'sgd'}
    beta1, beta2, eps : float
        Of Adam; 0 for SGD.
    weight_decay : float
    decoupled : bool
        True if the decay acts on W instead of the gradient.
    maximize : bool
        True if the gradient is taken with the other sign.
    rounds_once : bool
        True if only the results are rounded, not the intermediate values.
    amsgrad : bool
        True if Adam divides by the largest second moment so far.
    momentum, dampening : float
        Of SGD.
    nesterov : bool
        True if SGD looks ahead along its momentum.
    """

    kind: Literal["adam", "sgd"]
    beta1: float
    beta2: float
    eps: float
    weight_decay: float
    decoupled: bool
    maximize: bool
    rounds_once: bool
    amsgrad: bool
    momentum: float = 0.0
    dampening: float = 0.0
    nesterov: bool = False

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
            If the optimizer is unknown, has no rule, or lacks a hyperparameter or its number.
        """
        if not optimizer:
            raise InvalidArgument("the run does not name its optimizer")
        described = OptimizerAttributes.of(optimizer)
        full, plain, given = described.path, described.rule, described.hyperparameters
        if plain not in (*ADAM, _SGD):
            raise InvalidArgument(f"no rule is known for the optimizer {full!r}")
        needed = ("momentum", "weight_decay") if plain == _SGD else ("betas", "eps", "weight_decay")
        missing = [key for key in needed if key not in given]
        if missing:
            raise InvalidArgument(f"the hyperparameters of {full!r} lack {', '.join(missing)}")
        try:
            betas = (0.0, 0.0) if plain == _SGD else given["betas"]
            return cls(
                kind="sgd" if plain == _SGD else "adam",
                beta1=float(betas[0]),
                beta2=float(betas[1]),
                eps=float(given.get("eps", 0.0)),
                weight_decay=float(given["weight_decay"]),
                decoupled=bool(given.get("decoupled_weight_decay", plain == "AdamW")),
                maximize=bool(given.get("maximize", False)),
                rounds_once=plain != described.name or bool(given.get("fused")),
                amsgrad=bool(given.get("amsgrad", False)),
                momentum=float(given.get("momentum") or 0.0),
                dampening=float(given.get("dampening") or 0.0),
                nesterov=bool(given.get("nesterov", False)),
            )
        except (TypeError, ValueError, LookupError, OverflowError) as error:
            raise InvalidArgument(
                f"the hyperparameters of {full!r} are not numbers: {given}"
            ) from error

    def facts(self) -> dict[str, Any]:
        """The rule as JSON values, for `from_facts`."""
        facts = dict(vars(self))
        if not self.momentum:
            for name in ("momentum", "dampening", "nesterov"):
                del facts[name]
        return facts

    @classmethod
    def from_facts(cls, facts: Mapping[str, Any]) -> Self:
        """The rule that `facts` describes.

        Raises
        ------
        ValueError
            If it describes none.
        """
        given = {name: float(fact) if type(fact) is int else fact for name, fact in facts.items()}
        try:
            return checks_types(cls)(**given)
        except (TypeError, InvalidArgument) as error:
            raise ValueError(f"no optimizer's rule has {dict(facts)!r}: {error}") from None

    def at(self, numbers: npt.NDArray[np.void] | np.void) -> Self:
        """The rule of rows with other numbers, for all methods but `next_row`.

        Parameters
        ----------
        numbers : ndarray of `NUMBERS`, or one element
            Broadcasts like the learning rate.
        """
        if numbers.size > 1 and (numbers == numbers.flat[0]).all():
            numbers = numbers.flat[0]
        given: dict[str, Any] = {name: numbers[name] for name in NUMBERS.names or ()}
        return replace(self, **given)

    def in_step(self, rates: Rates) -> Self:
        """The rule with the numbers of a step."""
        numbers: dict[str, Any] = dict(rates.numbers)
        return replace(self, **numbers) if numbers else self

    def changing(
        self, names: Sequence[str], recorded: npt.NDArray[Any]
    ) -> dict[str, npt.NDArray[Any]]:
        """``settings``, float64 (setting, row), by hyperparameters of rows; empty if none changes.

        Row 0 gets the numbers of the rule, and so does each row whose number is unknown.

        Parameters
        ----------
        names : sequence of str
        recorded : ndarray of float64, (row, hyperparameter)
        """
        made = np.empty((len(SETTINGS), len(recorded)))
        for name, row in zip(SETTINGS, made, strict=True):
            row[:] = getattr(self, name)
            # Without a momentum at first, there is no state of it.
            if name in names and (self.momentum or name in (NUMBERS.names or ())):
                values = recorded[1:, names.index(name)]
                np.copyto(row[1:], values, where=np.isfinite(values))
        return {"settings": made} if (made != made[:, :1]).any() else {}

    def numbers(
        self, rates: Mapping[str, npt.NDArray[Any]], rows: int
    ) -> list[tuple[tuple[str, float], ...]]:
        """`Rates.numbers` of each row.

        Parameters
        ----------
        rates : mapping of str to ndarray
            With the result of `changing`, perhaps of another group's rule. A number that differs
            from that of row 0 does not follow it.
        rows : int
        """
        if "settings" not in rates:
            return [()] * rows
        columns = rates["settings"].reshape(len(SETTINGS), -1).tolist()
        pairs = [p for p in zip(SETTINGS, columns, strict=True) if p[1][0] == getattr(self, p[0])]
        return [tuple((name, column[row]) for name, column in pairs) for row in range(rows)]

    @property
    def state(self) -> tuple[str, ...]:
        """Names of the recorded variables that a step makes, W first."""
        kept = MOMENTS if self.kind == "adam" else (MOMENTUM,) if self.momentum else ()
        return ("W", *kept)

    @property
    def carried(self) -> tuple[str, ...]:
        """Names of the state that no run records."""
        return (LARGEST,) if self.amsgrad else ()

    @property
    def coupled_decay(self) -> float:
        """Weight decay that is added to the gradient; 0 if it acts on W."""
        return 0.0 if self.decoupled else self.weight_decay

    def corrections(self, step: npt.ArrayLike) -> tuple[Any, Any]:
        """Bias corrections of Adam: 1 - beta1^step, and the square root of 1 - beta2^step.

        Parameters
        ----------
        step : int or ndarray of int
            Number of steps that the optimizer took.

        Returns
        -------
        float64 or ndarray of float64, shape of `step`
            NaN where they are 0 or imaginary: torch raises there.
        """
        inputs = np.stack(np.broadcast_arrays(step, self.beta1, self.beta2), axis=-1)
        if inputs.ndim == 1:
            return _corrections(*inputs.tolist())
        each, place = np.unique(inputs.reshape(-1, 3), axis=0, return_inverse=True)
        pairs = np.array([_corrections(*pair) for pair in each.tolist()]).reshape(-1, 2)
        first, second = np.moveaxis(pairs[place.reshape(inputs.shape[:-1])], -1, 0)
        return first, second

    @np.errstate(all="ignore")  # NaN and infinity are results
    def gradient(self, grad: Array, clip: npt.ArrayLike, native: str) -> Array:
        """The gradient as the optimizer takes it: clipped, rounded, and with its sign.

        Parameters
        ----------
        grad : ndarray of stored values, any shape
        clip : float or ndarray that broadcasts
            Factor of the clipping; NaN counts as 1.
        native : str
            Type of the gradient.

        Returns
        -------
        ndarray, shape of `grad`
            `grad` itself if nothing changes.
        """
        # torch rounds the factor to the type of the multiplication.
        factor = np.asarray(clip).astype(grad.dtype)
        factor = np.where(np.isnan(factor), factor.dtype.type(1), factor)
        if (factor != 1).any():
            grad = cast(grad * factor, native)
        return -grad if self.maximize else grad

    @np.errstate(all="ignore")
    def change(
        self,
        W: Array,
        exp_avg: Array,
        exp_avg_sq: Array,
        lr: npt.ArrayLike,
        step: npt.ArrayLike,
        native: str,
    ) -> Array:
        """Change of W in a step of Adam, before its sum with W is rounded.

        Parameters
        ----------
        W : ndarray of stored values, any shape
            W before the step.
        exp_avg, exp_avg_sq : ndarray of stored values, same shape
            Moments after the step. With amsgrad, the second is the largest so far.
        lr, step : number, or ndarray that broadcasts
            Learning rate, and number of the step.
        native : str
            Type whose rounding the intermediate results have.

        Returns
        -------
        ndarray of float32 (float64 if W or the moments are), same shape
        """
        kind = np.result_type(W, exp_avg)
        moved = self._move(exp_avg.astype(kind, copy=False), exp_avg_sq, lr, step, native)
        if not (self.decoupled and np.any(self.weight_decay)):
            return moved
        decayed = self._decayed(W.astype(kind, copy=False), lr, native)
        # In float64 the difference of neighbors and the sum are nearly exact, so that the result is
        # rounded once.
        return np.asarray((np.subtract(decayed, W, dtype=np.float64) + moved).astype(kind))

    @np.errstate(all="ignore")
    def next_row(
        self,
        before: Mapping[str, Array],
        grad: Array,
        natives: Mapping[str, str],
        rates: Rates,
    ) -> dict[str, Array]:
        """Compute the row after one step.

        Parameters
        ----------
        before : mapping of str to ndarray of stored values, any shape
            Each of `state` and `carried`.
        grad : ndarray of stored values, same shape
            Before clipping.
        natives : mapping of str to str
            Native types of `state` and ``grad``.
        rates : Rates

        Returns
        -------
        dict of str to ndarray of stored values
            Of the same names.
        """
        if (rule := self.in_step(rates)) is not self:
            made = rule.next_row(before, grad, natives, replace(rates, numbers=()))
            return {**before, **made}  # without momentum in this step, its buffer stays
        grad = self.gradient(grad, rates.clip, natives["grad"])
        if self.rounds_once:
            wide = np.result_type(*before.values(), grad)
            before = {name: values.astype(wide) for name, values in before.items()}
            grad = grad.astype(wide)
        W, native = before["W"], natives["W"]
        if self.coupled_decay:
            grad = self._staged(_fused(W, self._factor(self.weight_decay, W, native), grad), native)
        if self.kind == "sgd":
            if self.weight_decay and self.decoupled:
                W = self._decayed(W, rates.lr, native)
            made = {}
            if self.momentum:
                buffer = made[MOMENTUM] = self._buffer(before[MOMENTUM], grad, native, rates.step)
                factor = self._factor(self.momentum, grad, native)
                grad = self._staged(_fused(buffer, factor, grad), native)
                grad = grad if self.nesterov else buffer
            made["W"] = _fused(grad, self._factor(-rates.lr, W, native), W)
        else:
            made = {name: self._moment(name, before[name], grad, natives[name]) for name in MOMENTS}
            divisor, second = made["exp_avg_sq"], natives["exp_avg_sq"]
            if self.amsgrad:
                natives = {**natives, LARGEST: second}
                divisor = made[LARGEST] = np.maximum(before[LARGEST], divisor)
            moved = self._move(made["exp_avg"], divisor, rates.lr, rates.step, second)
            if self.weight_decay and self.decoupled:
                W = self._decayed(W, rates.lr, native)
            made["W"] = W + moved
        return {name: cast(made[name], natives[name]) for name in (*self.state, *self.carried)}

    def _buffer(self, before: Array, grad: Array, native: str, step: int) -> Array:
        """Momentum of SGD after a step, which begins with the gradient of the first one."""
        if step == 1:
            return grad
        kept = self._staged(before * _scalar(self.momentum, before), native)
        weight = self._factor(1 - self.dampening, grad, native)
        return self._staged(_fused(grad, weight, kept), native)

    def _moment(self, name: str, before: Array, grad: Array, native: str) -> Array:
        """A moment after a step."""
        if name == "exp_avg":
            weight = 1 - self.beta1
            if weight < 0.5:
                return self._staged(_fused(grad - before, weight, before), native)
            return self._staged(_fused(before - grad, self.beta1, grad), native)
        kept = self._staged(before * _scalar(self.beta2, before), native)
        return self._staged(_sum(grad * _scalar(1 - self.beta2, grad), grad, kept), native)

    def _move(
        self,
        exp_avg: Array,
        exp_avg_sq: Array,
        lr: npt.ArrayLike,
        step: npt.ArrayLike,
        native: str,
    ) -> Array:
        """Change of W without weight decay."""
        correction, root = self.corrections(step)
        below = self._staged(np.sqrt(exp_avg_sq), native)
        below = self._staged(below / _scalar(root, below), native)
        below = self._staged(below + self._factor(self.eps, below, native), native)
        return np.asarray(_scalar(-np.asarray(lr) / correction, exp_avg) * exp_avg / below)

    def _decayed(self, W: Array, lr: npt.ArrayLike, native: str) -> Array:
        return self._staged(W * _scalar(1 - np.asarray(lr) * self.weight_decay, W), native)

    def _staged(self, values: Array, native: str) -> Array:
        """An intermediate result, rounded if the optimizer does."""
        return values if self.rounds_once else cast(values, native)

    def _factor(self, value: float, like: Array, native: str) -> Any:
        """A number that torch rounds to the type of the parameter first."""
        return self._staged(np.array([value], like.dtype), native)[0]


def next_weights(W: Array, change: Array, native: str) -> Array:
    """W + change, rounded once.

    Parameters
    ----------
    W : ndarray of stored values, any shape
    change : ndarray, same shape
        Result of `OptimizerRule.change`.
    native : str
        Type of W.
    """
    with np.errstate(over="ignore", invalid="ignore"):
        return cast((W.astype(np.float64) + change).astype(W.dtype), native)


def _corrections(step: float, beta1: float, beta2: float) -> tuple[float, float]:
    first, second = 1 - _power(beta1, int(step)), 1 - _power(beta2, int(step))
    return first or math.nan, math.sqrt(second) if second > 0 else math.nan


@lru_cache(maxsize=1 << 12)
def _power(base: float, exponent: int) -> float:
    """The nearest float64; that of the C library differs between machines."""
    return float(_DIGITS.power(Decimal(base), exponent))


def _scalar(value: npt.ArrayLike, like: Array) -> Any:
    return np.asarray(value).astype(like.dtype)


def _fused(values: Array, factor: float, added: Array) -> Array:
    """Values · factor + added, rounded once to the type of `added`."""
    return _sum(values, _scalar(factor, values), added)


def _sum(factor: Array, other: Any, added: Array) -> Array:
    """One · other + added, rounded once: exact in float64 but for the last sum."""
    if added.dtype != np.float32:
        return np.asarray(factor * other + added)
    product: Array = np.multiply(factor, other, dtype=np.float64)
    product += added
    return product.astype(np.float32)


def numbers_of(settings: Iterable[tuple[str, Any]], *, flags: bool = False) -> dict[str, float]:
    """Numbers among settings; those of a list get numbered names.

    Parameters
    ----------
    settings : iterable of (str, object)
        Names and values. Texts and other values are left out.
    flags : bool
        Keep flags, too.

    Examples
    --------
    >>> numbers_of({"betas": (0.9, 0.999), "eps": 1e-8, "amsgrad": False}.items())
    {'beta1': 0.9, 'beta2': 0.999, 'eps': 1e-08}
    """
    numbers: dict[str, float] = {}
    for key, value in settings:
        kind = type(value)
        if kind is tuple or kind is list:
            if all(isinstance(number, Real) for number in value):
                numbers.update(zip(_numbered(key, len(value)), value, strict=True))
        elif kind is float or (flags if kind is bool else isinstance(value, Real)):
            numbers[key] = value
    return numbers


def with_numbers(settings: Mapping[str, Any], numbers: Mapping[str, float]) -> dict[str, Any]:
    """Settings with other numbers, as far as `numbers` has their names.

    >>> with_numbers({"betas": [0.9, 0.999], "eps": 1e-8}, {"beta1": 0.8, "momentum": 0.5})
    {'betas': (0.8, 0.999), 'eps': 1e-08}
    """
    changed = dict(settings)
    for key, value in settings.items():
        if isinstance(value, tuple | list):
            names = _numbered(key, len(value))
            if any(name in numbers for name in names):
                pairs = zip(names, value, strict=True)
                changed[key] = tuple(_like(old, numbers.get(name, old)) for name, old in pairs)
        elif key in numbers:
            changed[key] = _like(value, numbers[key])
    return changed


def _like(old: Any, new: float) -> Any:
    """A number, which stays an int: some classes count with it."""
    return int(new) if type(old) is int and float(new).is_integer() else new


@lru_cache
def _numbered(key: str, count: int) -> tuple[str, ...]:
    stem = key if key == "eps" else key.removesuffix("s")
    return tuple(f"{stem}{number}" for number in range(1, count + 1))


VECTORS = {
    "W": "params",
    "exp_avg": "params_exp_avg",
    "exp_avg_sq": "params_exp_avg_sq",
    "grad": "params_grad",
}
"""Vector of each array of the recorded matrix."""


@dataclass(frozen=True, kw_only=True)
class VectorRule:
    """Rule by which the next row of the vectors follows, by Adam.

    Attributes
    ----------
    groups : tuple of OptimizerRule
        Rule of each group of the optimizer.
    segments : tuple of (int, int, int)
        First element of each parameter, number of its group, and its position among all parameters.
        A segment ends where the next one begins.
    parameters : int
        Number of all parameters.
    """

    groups: tuple[OptimizerRule, ...]
    segments: tuple[tuple[int, int, int], ...]
    parameters: int

    @classmethod
    def of(cls, attributes: Mapping[str, Any]) -> Self:
        """Rule of a run.

        Parameters
        ----------
        attributes : mapping
            Attributes of the root: ``parameters``, and ``optimizer`` with ``groups``.

        Raises
        ------
        InvalidArgument
            If they are missing, the parameters have several types, or a group has no rule or
            one without moments.
        """
        table = attributes.get("parameters")
        described = RunAttributes.of(attributes).optimizer.groups
        if not table or not described:
            raise InvalidArgument("the run does not name its parameters and groups")
        groups = tuple(OptimizerRule.of(group) for group in described)
        for rule, group in zip(groups, described, strict=True):
            if rule.kind != "adam":
                raise InvalidArgument(f"{group['class']!r} does not count steps by parameter")
            if group["hyperparameters"].get("rounding", "nearest") != "nearest":
                raise InvalidArgument(f"the optimizer {group['class']!r} rounds at random")
        joined = [entry for entry in table if entry["variable"] == "params"]
        for key in ("dtype", *(f"{kind}_dtype" for kind in VECTORS)):
            types = sorted({str(entry[key]) for entry in joined if key in entry})
            if len(types) > 1:
                raise InvalidArgument(
                    f"the parameters or their moments have several types: {', '.join(types)}"
                )
        segments = tuple(
            # A parameter without a group takes no step, so any group will do.
            (int(entry["offset"]), int(entry["group"] or 0), number)
            for number, entry in enumerate(table)
            if entry["variable"] == "params" and math.prod(entry["shape"])
        )
        return cls(groups=groups, segments=segments, parameters=len(table))

    def facts(self) -> dict[str, Any]:
        """The rule as JSON values, for `from_facts`."""
        return {
            "groups": [rule.facts() for rule in self.groups],
            "segments": [list(segment) for segment in self.segments],
            "parameters": self.parameters,
        }

    @classmethod
    def from_facts(cls, facts: Mapping[str, Any]) -> Self:
        """The rule that `facts` describes.

        Raises
        ------
        ValueError
            If it describes none.
        """
        if facts.keys() != {"groups", "segments", "parameters"}:
            raise ValueError(f"no rule of vectors has {dict(facts)!r}")
        groups = tuple(OptimizerRule.from_facts(each) for each in facts["groups"])
        segments = tuple((first, group, number) for first, group, number in facts["segments"])
        parameters, starts = facts["parameters"], [first for first, _, _ in segments]
        numbers = [parameters, *(value for segment in segments for value in segment)]
        if (
            not all(type(number) is int for number in numbers)
            or any(rule.kind != "adam" for rule in groups)
            or not segments
            or starts[0] != 0
            or any(start >= other for start, other in itertools.pairwise(starts))
            or not all(0 <= group < len(groups) for _, group, _ in segments)
            or not all(0 <= number < parameters for _, _, number in segments)
        ):
            raise ValueError(f"no rule of vectors has {dict(facts)!r}")
        return cls(groups=groups, segments=segments, parameters=parameters)

    @property
    def state(self) -> tuple[str, ...]:
        """Names of the recorded vectors that a step makes, that of the values first."""
        return tuple(VECTORS[name] for name in ("W", *MOMENTS))

    def parts(self, first: int, length: int) -> Iterator[tuple[slice, int, int]]:
        """Parts of a range of elements, each with its group and the position of its parameter."""
        ends = [start for start, _, _ in self.segments[1:]] + [first + length]
        for (start, group, parameter), end in zip(self.segments, ends, strict=True):
            begin, stop = max(start - first, 0), min(end - first, length)
            if begin < stop:
                yield slice(begin, stop), group, parameter

    def rates(
        self, rates: Mapping[str, npt.NDArray[Any]], group: int, parameter: int
    ) -> list[Rates | None]:
        """Numbers of each step for one parameter; None if it takes no step.

        Parameters
        ----------
        rates : mapping of str to ndarray, (row, …)
            ``params_lr``, ``params_count``, ``clip_coef`` if the run has it, and the result of
            `OptimizerRule.changing`.
        group, parameter : int
        """
        counts = rates["params_count"][:, parameter]
        numbers = self.groups[group].numbers(rates, len(counts))
        made: list[Rates | None] = [None]
        for row in range(1, len(counts)):
            count, lr = counts[row], float(rates["params_lr"][row, group])
            taken = count == counts[row - 1] + 1 and count >= 1 and math.isfinite(lr)
            clip = float(rates["clip_coef"][row]) if "clip_coef" in rates else 1.0
            step = Rates(step=int(count), lr=lr, clip=clip, numbers=numbers[row])
            made.append(step if taken else None)
        return made[: len(counts)]
