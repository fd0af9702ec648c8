"""Advice before a training run: updates that the number types of an optimizer prevent.

`trajstore.values.norms` tries every value of the type. The attributes of a run, or the
configuration of a planned run, are therefore enough; no training is needed.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from trajstore.errors import ConfigError
from trajstore.provenance import OptimizerAttributes, RunAttributes
from trajstore.values.native_types import cast
from trajstore.values.norms import MovingAverage, share_left
from trajstore.values.optimizer_rule import with_numbers

_RULES = ("adam", "adamw")
_TRIED = ("bfloat16", "float16", "float32")
_FLOAT32_WEIGHTS = (
    "float32 weights under autocast (model.dtype=float32; in your own loop model.float() with "
    "torch.autocast)"
)
_STATE_REMEDY = (
    "Keep the optimizer's state in float32 (optimizer.state_dtype=float32; in your own loop "
    'RoundedAdamW(…, state_dtype="float32")), or train ' + _FLOAT32_WEIGHTS
)
_WEIGHT_REMEDY = "Train " + _FLOAT32_WEIGHTS


@dataclass(frozen=True, kw_only=True)
class Advice:
    """Updates that the number type of one part of the optimizer prevents.

    Attributes
    ----------
    variable : str
        ``exp_avg``, ``exp_avg_sq``, ``W`` (its weight decay) or ``eps``.
    native_dtype : str
        The type.
    cannot_decay : float
        Fraction of the type's positive normal values that a step toward zero does not change. NaN
        if the advice concerns something else.
    cannot_grow : float
        Fraction that a step toward twice the value does not change. NaN likewise.
    sentence : str
        The problem, its consequence and the remedy, each in a sentence; without the last period.
    """

    variable: str
    native_dtype: str
    cannot_decay: float = math.nan
    cannot_grow: float = math.nan
    sentence: str

    def facts(self) -> dict[str, Any]:
        """All attributes as JSON values."""
        return {
            name: None if isinstance(value, float) and math.isnan(value) else value
            for name, value in vars(self).items()
        }


@dataclass(frozen=True, kw_only=True)
class _Adam:
    """Hyperparameters of an Adam optimizer.

    Attributes
    ----------
    rounds_once : bool
        True if a step is computed in float32 and only its results are rounded, as in fused kernels.
    """

    beta1: float
    beta2: float
    eps: float
    lr: float
    decoupled_decay: float
    rounds_once: bool


def advise(
    optimizer: Mapping[str, Any] | None,
    *,
    state: str,
    weights: str,
    highest_rate: float | None = None,
) -> list[Advice]:
    """Find the updates that the types of an optimizer's state and of its weights prevent.

    Parameters
    ----------
    optimizer : mapping
        ``class`` and ``hyperparameters``, as in the attribute ``optimizer`` of a run.
    state : str
        Native type of the moments: bfloat16, float16 or float32. Other types get no advice; float64
        is fine enough for every β.
    weights : str
        Native type of W. The same types get advice.
    highest_rate : float, optional
        Highest learning rate of the run, if it is known; default: that of the hyperparameters.

    Returns
    -------
    list of Advice
        Empty if every value can change, or if the optimizer is neither Adam nor AdamW. Also empty
        for stochastic rounding, which moves values in the mean.

    Examples
    --------
    >>> given = {"betas": [0.9, 0.999], "eps": 1e-8, "lr": 1e-3, "weight_decay": 0.01}
    >>> adamw = {"class": "torch.optim.adamw.AdamW", "hyperparameters": given}
    >>> [advice.variable for advice in advise(adamw, state="bfloat16", weights="bfloat16")]
    ['exp_avg_sq', 'W']
    >>> advise(adamw, state="float32", weights="float32")
    []
    """
    rule = _rule(optimizer)
    if rule is None:
        return []
    if highest_rate is not None:
        rule = replace(rule, lr=highest_rate)
    checks: list[Advice | None] = []
    if state in _TRIED:
        checks += [_of_first_moment(rule, state), _of_second_moment(rule, state)]
        checks += [_of_eps(rule, state)]
    if weights in _TRIED:
        checks += [_of_weight_decay(rule, weights)]
    return [advice for advice in checks if advice is not None]


def advise_run(
    attributes: Mapping[str, Any],
    native_dtypes: Mapping[str, str],
    rates: npt.ArrayLike = (),
    hyperparameters: Mapping[str, npt.ArrayLike] | None = None,
) -> list[Advice]:
    """`advise` for a recorded run.

    Parameters
    ----------
    attributes : mapping
        Attributes of its root.
    native_dtypes : mapping of str to str
        Native types of its arrays by name. The type of the state is that of ``exp_avg_sq``, or else
        of W. The type of W is that of ``grad`` if W is not recorded.
    rates : array_like of float, (step,)
        Recorded learning rates; the advice holds for all that are finite.
    hyperparameters : mapping of str to array_like of float, (step,), optional
        Recorded hyperparameters by name, for all of which the advice holds, too.
    """
    weights = native_dtypes.get("W", native_dtypes.get("grad", ""))
    state = native_dtypes.get("exp_avg_sq", weights)
    known = np.asarray(rates, np.float64)
    known = known[np.isfinite(known)]
    optimizer, extremes = RunAttributes.of(attributes).optimizer, {}
    for name, values in (hyperparameters or {}).items():
        used = np.asarray(values, np.float64)
        if np.isfinite(used).any():  # the values with which most changes
            extreme = np.nanmin if name.startswith("beta") else np.nanmax
            extremes[name] = float(extreme(used))
    numbers = with_numbers(optimizer.hyperparameters, extremes)
    return advise(
        {**optimizer.stored, "hyperparameters": numbers},
        state=state,
        weights=weights,
        highest_rate=float(known.max()) if known.size else None,
    )


def require_sound(advice: Sequence[Advice]) -> None:
    """Raise an error if there is any advice.

    Raises
    ------
    ConfigError
        With all advice.
    """
    if not advice:
        return
    message = "strict numerics refuse these settings: " + advice[0].sentence
    for other in advice[1:]:
        message += ". " + other.sentence
    raise ConfigError(message)


def _rule(optimizer: Any) -> _Adam | None:
    """Adam's hyperparameters from a run's attribute; None if incomplete or not Adam's."""
    described = OptimizerAttributes.of(optimizer)
    name, given = described.rule.lower(), described.hyperparameters
    if name not in _RULES:
        return None
    if given.get("rounding", "nearest") != "nearest":
        return None
    betas = given.get("betas")
    if not isinstance(betas, list | tuple) or len(betas) != 2:
        return None
    numbers = [*betas, given.get("eps"), given.get("weight_decay")]
    # A scheduler's initial rate is the highest rate, or the target of a warmup.
    rates = [float(given[name]) for name in ("lr", "initial_lr") if _is_number(given.get(name))]
    if not all(map(_is_number, numbers)) or not all(0 <= beta <= 1 for beta in betas):
        return None
    decoupled = given.get("decoupled_weight_decay", name == "adamw")
    return _Adam(
        beta1=float(betas[0]),
        beta2=float(betas[1]),
        eps=float(given["eps"]),
        lr=max(rates, default=0.0),
        decoupled_decay=float(given["weight_decay"]) if decoupled else 0.0,
        rounds_once=bool(given.get("fused")) or given.get("state_dtype") is not None,
    )


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and math.isfinite(value)


def _of_first_moment(rule: _Adam, native: str) -> Advice | None:
    weight = f"{1 - rule.beta1:.6g}"
    return _of_moment(
        MovingAverage(native=native, beta=rule.beta1, form="lerp"),
        "exp_avg",
        decay=f"m − {weight}·m rounds back to m",
        never="The update keeps directions that the gradient no longer has",
        soon="The update keeps part of a direction that the gradient no longer has",
        growth=f"while the gradient is twice as large: m + {weight}·m rounds back to m",
        too_low="The update lags behind the gradient",
        remedy=_STATE_REMEDY if native != "float32" else "Choose a smaller beta1",
    )


def _of_second_moment(rule: _Adam, native: str) -> Advice | None:
    decayed = f"{rule.beta2:.9g}·v"
    return _of_moment(
        MovingAverage(
            native=native, beta=rule.beta2, form="once" if rule.rounds_once else "product"
        ),
        "exp_avg_sq",
        decay=f"{decayed} rounds back to v",
        never="The second moment only grows, and the effective learning rate only falls",
        soon="The second moment stays too large, and the effective learning rate too low",
        growth="while the squared gradient is twice as large: "
        f"{decayed} + {1 - rule.beta2:.6g}·2v rounds back to v",
        too_low="The second moment stays too small, and the effective learning rate too high",
        remedy=_STATE_REMEDY if native != "float32" else "Choose a smaller beta2",
    )


def _of_moment(
    average: MovingAverage,
    variable: str,
    *,
    decay: str,
    never: str,
    soon: str,
    growth: str,
    too_low: str,
    remedy: str,
) -> Advice | None:
    """Advice about a moment: either rounding prevents decay, or it prevents growth."""
    native = average.native
    cannot_decay, cannot_grow = share_left(average, 0), share_left(average, 2)
    if cannot_decay == 1:
        text = f"{variable} can never decay: {decay} for 100 % of {native} values. {never}"
    elif cannot_decay:
        text = (
            f"{variable} soon stops decaying: {decay} for {_percent(cannot_decay)} of {native} "
            f"values. {soon}"
        )
    elif cannot_grow:
        text = (
            f"{variable} stops growing {growth} for {_percent(cannot_grow)} of {native} values. "
            f"{too_low}"
        )
    else:
        return None
    return Advice(
        variable=variable,
        native_dtype=native,
        cannot_decay=cannot_decay,
        cannot_grow=cannot_grow,
        sentence=f"{text}. " + remedy,
    )


def _of_weight_decay(rule: _Adam, native: str) -> Advice | None:
    lost = rule.lr * rule.decoupled_decay
    # If a step is rounded once, weight decay is part of the update and not lost separately.
    if not 0 < lost < 1 or rule.rounds_once:
        return None
    share = share_left(MovingAverage(native=native, beta=1 - lost, form="product"), 0)
    if not share:
        return None
    remedy = "Choose a larger weight_decay" if native == "float32" else _WEIGHT_REMEDY
    does = "can never change W" if share == 1 else "does not change most of W"
    return Advice(
        variable="W",
        native_dtype=native,
        cannot_decay=share,
        sentence=f"weight decay {does} at learning rates up to {rule.lr:.6g}: "
        f"(1 − {rule.lr:.6g}·{rule.decoupled_decay:.6g})·W rounds "
        f"back to W for {_percent(share)} of {native} values. W trains with "
        f"{'no' if share == 1 else 'less'} weight decay. " + remedy,
    )


def _of_eps(rule: _Adam, native: str) -> Advice | None:
    given = np.array([rule.eps], np.float32)
    if not given[0] or rule.rounds_once or cast(given, native)[0]:
        return None
    return Advice(
        variable="eps",
        native_dtype=native,
        sentence=f"eps = {rule.eps:g} rounds to 0 in {native}. An element that never had a "
        f"gradient is updated by 0/0 = NaN. Choose an eps that {native} can represent, or "
        "train " + _FLOAT32_WEIGHTS,
    )


def _percent(share: float) -> str:
    """Percentage in which only exactly 1 becomes 100 %, and nothing above 0 becomes 0.0 %.

    >>> _percent(1.0), _percent(0.9996), _percent(0.0001)
    ('100 %', '99.9 %', '0.1 %')
    """
    return "100 %" if share == 1 else f"{min(max(100 * share, 0.1), 99.9):.1f} %"
