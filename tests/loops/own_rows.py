"""What a loop keeps of each of its steps, in plain lists."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import torch


@dataclass
class Pass:
    """A backward pass: the differentiated value, its last divisor, and the undivided value."""

    value: float
    divisor: float
    undivided: float
    observed: float | None = None


@dataclass
class Gradients:
    """The gradient of the matrix and the norm of all, at one moment before the step."""

    grad: Any
    norm: float

    def divided(self, scale: float) -> Gradients:
        return Gradients(None if self.grad is None else self.grad / scale, self.norm / scale)


@dataclass
class OwnRow:
    """What is true after a step. A list holds several values, each of which may be recorded."""

    W: Any = None
    state: dict[str, Any] = field(default_factory=dict)
    settings: dict[str, float] = field(default_factory=dict)
    rate: float | None = None
    used: Any = None
    """What the innermost step got. None: not known, or the matrix had no gradient."""
    at_begin: Any = None
    """What the outermost step got."""
    before: list[Gradients] = field(default_factory=list)
    """At the end of the last pass, and after each replacement by the loop."""
    losses: list[float] = field(default_factory=list)
    """Empty: no pass led to the gradient, so that the loss is missing."""
    is_sum: bool = False
    """True if a note has to say that the loss may be a sum."""
    is_skipped: bool = False


def losses_of(passes: list[Pass]) -> tuple[list[float], bool]:
    """Return the losses that may be recorded, and whether a note has to name a sum."""
    observed = [one.observed for one in passes if one.observed is not None]
    if observed or not passes:
        return [sum(observed) / len(observed)] if observed else [], False
    values = [one.value for one in passes]
    undivided = [one.undivided for one in passes]
    is_sum = any(one.divisor != len(values) for one in passes) and len(values) > 1
    allowed = [sum(values)] + [sum(values) / len(values)] * is_sum
    return allowed + [sum(undivided) / len(undivided)] * (undivided != values), is_sum


def copy_of(tensor: Any) -> Any:
    return None if tensor is None else tensor.detach().clone()


def norm_of(parameters: Iterable[Any]) -> float:
    squares = [p.grad.double().square().sum() for p in parameters if p.grad is not None]
    return float(torch.stack(squares).sum().sqrt()) if squares else 0.0
