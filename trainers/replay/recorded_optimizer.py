"""The optimizer of a recorded run, to repeat its steps: the real class of `torch.optim`.

If its state has a separate type, it is a class of `rounded_optimizer`.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.optim import Optimizer

from trajstore.trainers.replay.replay_result import CannotReplay
from trajstore.trainers.rounded_optimizer import (
    RoundedAdam,
    RoundedAdamW,
    RoundedOptimizer,
    RoundedSGD,
)

__all__ = ["REPLAYABLE", "RecordedOptimizer", "State", "recorded_optimizer"]

State = dict[str, torch.Tensor]
"""State that an optimizer keeps for a parameter, as ``optimizer.state[parameter]``."""

REPLAYABLE = (
    "Adam", "AdamW", "SGD", "RMSprop", "Adagrad", "Adadelta", "Adamax", "NAdam", "RAdam",
)  # fmt: skip
"""Classes of `torch.optim` that update each element independently."""

_ROUNDED: tuple[type[RoundedOptimizer], ...] = (RoundedAdam, RoundedAdamW, RoundedSGD)

_STEP = "step"


@dataclass(frozen=True, kw_only=True, eq=False)
class RecordedOptimizer:
    """A class of `torch.optim` with the recorded hyperparameters.

    Attributes
    ----------
    optimizer_class : type of Optimizer
    hyperparameters : dict
        Hyperparameters of the recorded parameter's group.
    example : dict of str to tensor
        State of one element after its first step: names, types and devices.
    """

    optimizer_class: type[Optimizer]
    hyperparameters: dict[str, Any]
    example: State

    @property
    def state_names(self) -> tuple[str, ...]:
        """Names of the state without the number of steps, such as ``exp_avg``."""
        return tuple(name for name in self.example if name != _STEP)

    @property
    def counts_steps(self) -> bool:
        """True if the update depends on the number of steps."""
        return _STEP in self.example

    def with_step_count(self, state: State, steps_taken: int) -> State:
        """Add the number of steps taken before, in the optimizer's own form."""
        if not self.counts_steps:
            return state
        return state | {_STEP: torch.full_like(self.example[_STEP], steps_taken)}

    def build(self, weights: torch.Tensor) -> tuple[torch.nn.Parameter, Optimizer]:
        """Return an optimizer without a state, and its parameter with a copy of the weights."""
        return _build(self.optimizer_class, weights, self.hyperparameters)

    def step(
        self, weights: torch.Tensor, state: State | None, gradient: torch.Tensor, lr: float
    ) -> tuple[torch.Tensor, State]:
        """Take one step.

        Parameters
        ----------
        weights, gradient : tensor, (vocabulary, hidden)
        state : dict of str to tensor, optional
            State before the step; None before the first step.
        lr : float

        Returns
        -------
        tensor, dict of str to tensor
            Weights and state after the step; the arguments stay unchanged.
        """
        parameter, optimizer = self.build(weights)
        optimizer.param_groups[0]["lr"] = lr
        if state is not None:
            optimizer.state[parameter] = {name: value.clone() for name, value in state.items()}
        parameter.grad = gradient.clone()
        optimizer.step()
        return parameter.detach(), _state(optimizer, parameter)


def recorded_optimizer(
    attributes: Mapping[str, Any], dtype: torch.dtype, device: torch.device
) -> RecordedOptimizer:
    """Return the optimizer of the attribute ``optimizer`` of a run.

    Only classes in this module's list are used, so a file cannot choose what is executed.

    Parameters
    ----------
    attributes : mapping
        Attributes of the root of the run.
    dtype : torch.dtype
        Type of the parameter.
    device : torch.device

    Raises
    ------
    CannotReplay
        If the run does not record its optimizer, the class is not in `REPLAYABLE`, or this version
        of torch does not take its hyperparameters.
    """
    recorded = attributes.get("optimizer")
    if not isinstance(recorded, Mapping) or not isinstance(recorded.get("class"), str):
        raise CannotReplay("the run does not record its optimizer (root attribute optimizer)")
    path = recorded["class"]
    optimizer_class = _optimizer_class(path)
    hyperparameters = dict(recorded.get("hyperparameters") or {})
    missing = _numbers(optimizer_class) - set(hyperparameters)
    if missing:
        raise CannotReplay(f"the run does not record the optimizer's {', '.join(sorted(missing))}")
    if device.type == "cpu":
        # capturable keeps the step count on an accelerator; torch refuses it on the CPU.
        hyperparameters["capturable"] = False
    try:
        weights = torch.ones(1, 1, dtype=dtype, device=device)
        parameter, optimizer = _build(optimizer_class, weights, hyperparameters)
        parameter.grad = torch.ones_like(parameter)
        optimizer.step()
    except (TypeError, ValueError, RuntimeError, KeyError, AssertionError) as error:
        raise CannotReplay(
            f"{path} in this version of torch refuses the recorded hyperparameters ({error})"
        ) from error
    return RecordedOptimizer(
        optimizer_class=optimizer_class,
        hyperparameters=hyperparameters,
        example=_state(optimizer, parameter),
    )


def _optimizer_class(path: str) -> type[Optimizer]:
    classes: list[type[Optimizer]] = [getattr(torch.optim, name) for name in REPLAYABLE]
    for known in (*classes, *_ROUNDED):
        if f"{known.__module__}.{known.__qualname__}" == path:
            return known
    raise CannotReplay(
        f"the optimizer {path} cannot be replayed; supported classes of torch.optim: "
        f"{', '.join(REPLAYABLE)}; of trajstore.trainers.rounded_optimizer: "
        + ", ".join(known.__name__ for known in _ROUNDED)
    )


def _numbers(optimizer_class: Callable[..., Optimizer]) -> set[str]:
    """Return the hyperparameters except flags; a missing flag has this torch's default."""
    added = {"state_dtype": "float32"} if optimizer_class in _ROUNDED else {}
    optimizer = optimizer_class([torch.nn.Parameter(torch.zeros(1))], lr=0.0, **added)
    (group,) = optimizer.param_groups
    flags = (bool, type(None), list)  # and the list of parameters
    return {name for name, value in group.items() if not isinstance(value, flags)}


def _build(
    optimizer_class: Callable[..., Optimizer],
    weights: torch.Tensor,
    hyperparameters: Mapping[str, Any],
) -> tuple[torch.nn.Parameter, Optimizer]:
    parameter = torch.nn.Parameter(weights.detach().clone(), requires_grad=False)
    return parameter, optimizer_class([parameter], **_taken(optimizer_class, hyperparameters))


def _taken(
    optimizer_class: Callable[..., Optimizer], hyperparameters: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the hyperparameters that a class takes as arguments."""
    values = {name: tuple(v) if isinstance(v, list) else v for name, v in hyperparameters.items()}
    accepted = inspect.signature(optimizer_class).parameters
    return {name: value for name, value in values.items() if name in accepted}


def _state(optimizer: Optimizer, parameter: torch.nn.Parameter) -> State:
    state = optimizer.state[parameter]
    return {name: value for name, value in state.items() if isinstance(value, torch.Tensor)}
