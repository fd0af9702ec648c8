"""The optimizer of a recorded run, to be carried out again: the real class of `torch.optim`.

Or that which steps with it, where its state has a type of its own (`rounded_optimizer`).
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
"""What an optimizer keeps for the parameter, as ``optimizer.state[parameter]``."""

REPLAYABLE = (
    "Adam", "AdamW", "SGD", "RMSprop", "Adagrad", "Adadelta", "Adamax", "NAdam", "RAdam",
)  # fmt: skip
"""Classes of `torch.optim` that treat each element by itself, whatever else they train."""

_ROUNDED: tuple[type[RoundedOptimizer], ...] = (RoundedAdam, RoundedAdamW, RoundedSGD)

_STEP = "step"


@dataclass(frozen=True, kw_only=True, eq=False)
class RecordedOptimizer:
    """A class of `torch.optim` with the hyperparameters that a run recorded.

    Attributes
    ----------
    optimizer_class : type of Optimizer
    hyperparameters : dict
        Of the recorded parameter's group, as the optimizer held them.
    example : dict of str to tensor
        State of one element after its first step: names, types and devices.
    """

    optimizer_class: type[Optimizer]
    hyperparameters: dict[str, Any]
    example: State

    @property
    def state_names(self) -> tuple[str, ...]:
        """State that is kept besides the number of steps, such as ``exp_avg``."""
        return tuple(name for name in self.example if name != _STEP)

    @property
    def counts_steps(self) -> bool:
        """Whether the number of steps taken enters."""
        return _STEP in self.example

    def with_step_count(self, state: State, steps_taken: int) -> State:
        """State with the number of steps taken before, as this optimizer keeps it."""
        if not self.counts_steps:
            return state
        return state | {_STEP: torch.full_like(self.example[_STEP], steps_taken)}

    def build(self, weights: torch.Tensor) -> tuple[torch.nn.Parameter, Optimizer]:
        """Optimizer without a state, and its parameter with these weights, a copy."""
        return _build(self.optimizer_class, weights, self.hyperparameters)

    def step(
        self, weights: torch.Tensor, state: State | None, gradient: torch.Tensor, lr: float
    ) -> tuple[torch.Tensor, State]:
        """Carry out one step.

        Parameters
        ----------
        weights, gradient : tensor, (vocabulary, hidden)
        state : dict of str to tensor, optional
            Before the step; None for an optimizer that has taken none.
        lr : float

        Returns
        -------
        tensor, dict of str to tensor
            Weights and state after the step; what was given is left as it was.
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
    """Optimizer of the attribute ``optimizer`` of a run.

    Only names of this module's own list are looked up; a file cannot name what is executed.

    Parameters
    ----------
    attributes : mapping
        Of the root of the run.
    dtype : torch.dtype
        Of the parameter.
    device : torch.device

    Raises
    ------
    CannotReplay
        If the run does not say which optimizer trained it, or it is none of `REPLAYABLE`, or this
        torch does not take its hyperparameters.
    """
    recorded = attributes.get("optimizer")
    if not isinstance(recorded, Mapping) or not isinstance(recorded.get("class"), str):
        raise CannotReplay(
            "the run does not say which optimizer trained it (root attribute optimizer)"
        )
    path = recorded["class"]
    optimizer_class = _optimizer_class(path)
    hyperparameters = dict(recorded.get("hyperparameters") or {})
    missing = _numbers(optimizer_class) - set(hyperparameters)
    if missing:
        raise CannotReplay(f"the run does not say the optimizer's {', '.join(sorted(missing))}")
    if device.type == "cpu":
        # That the count of steps may live on an accelerator; torch refuses it elsewhere.
        hyperparameters["capturable"] = False
    try:
        weights = torch.ones(1, 1, dtype=dtype, device=device)
        parameter, optimizer = _build(optimizer_class, weights, hyperparameters)
        parameter.grad = torch.ones_like(parameter)
        optimizer.step()
    except (TypeError, ValueError, RuntimeError, KeyError, AssertionError) as error:
        raise CannotReplay(
            f"{path} of this torch refuses the recorded hyperparameters ({error})"
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
        f"the optimizer is {path}; those of torch.optim that can be replayed: "
        f"{', '.join(REPLAYABLE)}; and of trajstore.trainers.rounded_optimizer: "
        + ", ".join(known.__name__ for known in _ROUNDED)
    )


def _numbers(optimizer_class: Callable[..., Optimizer]) -> set[str]:
    """Hyperparameters that are no flags; a flag that is not recorded is this torch's default."""
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
    values = {name: tuple(v) if isinstance(v, list) else v for name, v in hyperparameters.items()}
    accepted = inspect.signature(optimizer_class).parameters
    taken = {name: value for name, value in values.items() if name in accepted}
    return parameter, optimizer_class([parameter], **taken)


def _state(optimizer: Optimizer, parameter: torch.nn.Parameter) -> State:
    state = optimizer.state[parameter]
    return {name: value for name, value in state.items() if isinstance(value, torch.Tensor)}
