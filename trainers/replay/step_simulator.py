"""One optimizer step, repeated from recorded bits by the optimizer of the run.

The module does not use the result that was recorded, and does not compare.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy.typing as npt
import torch

from trajstore.store.reading.run_settings import attribute
from trajstore.store.reading.tiled_reader import TiledRun
from trajstore.trainers.replay.parameter_placement import Placement, recorded_placement, tensor_of
from trajstore.trainers.replay.recorded_optimizer import (
    RecordedOptimizer,
    State,
    recorded_optimizer,
)
from trajstore.trainers.replay.replay_result import CannotReplay
from trajstore.values.native_types import NativeType
from trajstore.values.optimizer_rule import MOMENTS

__all__ = ["Bits", "Simulator", "StepInputs", "StepResult", "check_inputs", "recorded_simulator"]

Array = npt.NDArray[Any]

Bits = dict[str, Array]
"""Native bits of W and of the optimizer's state, (token, hidden)."""


@dataclass(frozen=True, kw_only=True, eq=False)
class StepInputs:
    """Inputs of an optimizer step.

    Attributes
    ----------
    before : dict of str to ndarray, (token, hidden)
        Bits of W and of the recorded state.
    carried : dict of str to tensor
        State that is not recorded, from the previous step.
    steps_taken : int
        Steps that the optimizer has taken before; without any it has no state yet.
    gradient : ndarray, (token, hidden), optional
        Bits, before clipping; None if the step was skipped.
    clip_coef : ndarray, ()
        Bits of the clipping factor of the gradient.
    lr : float
    """

    before: Bits
    carried: State
    steps_taken: int
    gradient: Array | None
    clip_coef: Array
    lr: float


@dataclass(frozen=True, kw_only=True, eq=False)
class StepResult:
    """Result of an optimizer step.

    Attributes
    ----------
    bits : dict of str to ndarray, (token, hidden)
        W, and the recorded state.
    carried : dict of str to tensor
        State that is not recorded.
    """

    bits: Bits
    carried: State


@dataclass(frozen=True, kw_only=True, eq=False)
class Simulator:
    """Repeats optimizer steps.

    Attributes
    ----------
    optimizer : RecordedOptimizer
    placement : Placement
    natives : dict of str to NativeType
        Types of ``W``, ``grad``, ``clip_coef`` and the recorded state.
    recorded : tuple of str
        W, and the recorded state.
    """

    optimizer: RecordedOptimizer
    placement: Placement
    natives: dict[str, NativeType]
    recorded: tuple[str, ...]

    @property
    def rebuilt(self) -> tuple[str, ...]:
        """State that is not recorded, so it is carried from step to step."""
        return tuple(name for name in self.optimizer.state_names if name not in self.recorded)

    def simulate(self, inputs: StepInputs) -> StepResult:
        """Repeat one step."""
        if inputs.gradient is None:
            return StepResult(bits=inputs.before, carried=inputs.carried)
        before = {
            name: self.placement.parameter(inputs.before[name], self.natives[name])
            for name in self.recorded
        }
        weights = before.pop("W")
        gradient = self.placement.parameter(inputs.gradient, self.natives["grad"])
        # torch.nn.utils.clip_grad_norm_ also multiplies by a tensor of the norm's type. A Python
        # number would be rounded to the type of the gradient first.
        gradient.mul_(tensor_of(inputs.clip_coef, self.natives["clip_coef"]).to(gradient.device))
        state = None
        if inputs.steps_taken:
            state = self.optimizer.with_step_count(inputs.carried | before, inputs.steps_taken)
        weights, state = self.optimizer.step(weights, state, gradient, inputs.lr)
        after = {"W": weights} | state
        return StepResult(
            bits={
                name: self.placement.bits(after[name], self.natives[name]) for name in self.recorded
            },
            carried={name: state[name] for name in self.rebuilt},
        )


def check_inputs(source: TiledRun) -> None:
    """Check that the run has the variables that every step needs.

    Raises
    ------
    CannotReplay
        If the run lacks one.
    """
    for name, reason in (
        ("W", "the run has no W; record W"),
        ("grad", "the gradient was not recorded; record weights+grads or all"),
        ("lr", "the learning rate was not recorded; every tier has it"),
        ("clip_coef", "the clipping factor was not recorded; every tier has it"),
    ):
        if name not in source.series:
            raise CannotReplay(reason)


def recorded_simulator(source: TiledRun, device: torch.device) -> Simulator:
    """Return a simulator of the steps of a run.

    Parameters
    ----------
    source : TiledRun
    device : torch.device

    Raises
    ------
    CannotReplay
        If the run lacks a variable that every step needs, or its optimizer cannot be built.
    """
    check_inputs(source)
    natives = {name: series.native for name, series in source.series.items()}
    if natives["W"] != natives["grad"]:
        raise CannotReplay(
            f"W is {natives['W'].name} but grad is {natives['grad'].name}; torch needs a gradient "
            "of the parameter's type"
        )
    optimizer = recorded_optimizer(source.attributes, getattr(torch, natives["W"].name), device)
    state = [name for name in MOMENTS if name in optimizer.state_names and name in natives]
    for name in state:
        made = str(optimizer.example[name].dtype).removeprefix("torch.")
        if natives[name].name != made:
            raise CannotReplay(
                f"{name} is {natives[name].name}, but the recorded optimizer keeps it in {made}, "
                "so another optimizer trained the run"
            )
    stochastic = optimizer.hyperparameters.get("rounding") == "stochastic"
    if stochastic and not isinstance(attribute(source.attributes, "recording", "vocabulary"), int):
        raise CannotReplay(
            "stochastic rounding depends on the position in the parameter, but the number of "
            "tokens of the parameter is not recorded (root attribute recording, vocabulary)"
        )
    return Simulator(
        optimizer=optimizer,
        placement=recorded_placement(source, device),
        natives=natives,
        recorded=("W", *state),
    )
