"""One optimizer step, carried out from recorded bits by the optimizer of the run.

It knows nothing of what was recorded after the step, nor of comparing.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy.typing as npt
import torch

from trajstore.store.reading.run_settings import attribute
from trajstore.store.reading.tiled_reader import TiledRun
from trajstore.trainers.recording.parameter_rows import MOMENTS
from trajstore.trainers.replay.parameter_placement import Placement, recorded_placement, tensor_of
from trajstore.trainers.replay.recorded_optimizer import (
    RecordedOptimizer,
    State,
    recorded_optimizer,
)
from trajstore.trainers.replay.replay_result import CannotReplay
from trajstore.values.native_types import NativeType

__all__ = ["Bits", "Simulator", "StepInputs", "StepResult", "check_inputs", "recorded_simulator"]

Array = npt.NDArray[Any]

Bits = dict[str, Array]
"""Native bits of W and of the optimizer's state, (token, hidden)."""


@dataclass(frozen=True, kw_only=True, eq=False)
class StepInputs:
    """What an optimizer step starts from.

    Attributes
    ----------
    before : dict of str to ndarray, (token, hidden)
        Bits of W and of the recorded state.
    carried : dict of str to tensor
        The state that is not recorded, as the step before gave it.
    steps_taken : int
        Steps that the optimizer had taken before; after none it keeps no state yet.
    gradient : ndarray, (token, hidden), optional
        Bits, before clipping; None if the step was skipped.
    clip_coef : ndarray, ()
        Bits of the factor that clipping multiplies the gradient by.
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
    """What an optimizer step gives.

    Attributes
    ----------
    bits : dict of str to ndarray, (token, hidden)
        W, and the state that is recorded.
    carried : dict of str to tensor
        The state that is not.
    """

    bits: Bits
    carried: State


@dataclass(frozen=True, kw_only=True, eq=False)
class Simulator:
    """Carries out optimizer steps.

    Attributes
    ----------
    optimizer : RecordedOptimizer
    placement : Placement
    natives : dict of str to NativeType
        Of ``W``, ``grad``, ``clip_coef`` and the recorded state.
    recorded : tuple of str
        W, and the state that is recorded.
    """

    optimizer: RecordedOptimizer
    placement: Placement
    natives: dict[str, NativeType]
    recorded: tuple[str, ...]

    @property
    def rebuilt(self) -> tuple[str, ...]:
        """State that is not recorded, and so is carried from step to step."""
        return tuple(name for name in self.optimizer.state_names if name not in self.recorded)

    def simulate(self, inputs: StepInputs) -> StepResult:
        """Carry out one step."""
        if inputs.gradient is None:
            return StepResult(bits=inputs.before, carried=inputs.carried)
        before = {
            name: self.placement.parameter(inputs.before[name], self.natives[name])
            for name in self.recorded
        }
        weights = before.pop("W")
        gradient = self.placement.parameter(inputs.gradient, self.natives["grad"])
        # As torch.nn.utils.clip_grad_norm_ does: by a tensor of the type of the norm, because a
        # Python number would be rounded to the type of the gradient first.
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
    """Insist on the variables that every step needs.

    Raises
    ------
    CannotReplay
        If the run lacks one.
    """
    for name, reason in (
        ("W", "the run holds no weights"),
        ("grad", "the gradient was not recorded; the tiers weights+grads and all hold it"),
        ("lr", "the learning rate was not recorded; every tier holds it"),
        ("clip_coef", "what clipping did to the gradient was not recorded; every tier holds it"),
    ):
        if name not in source.series:
            raise CannotReplay(reason)


def recorded_simulator(source: TiledRun, device: torch.device) -> Simulator:
    """What carries out the steps of a run.

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
            f"W is {natives['W'].name} and grad {natives['grad'].name}, and torch takes a "
            "gradient of its parameter's type only"
        )
    optimizer = recorded_optimizer(source.attributes, getattr(torch, natives["W"].name), device)
    state = [name for name in MOMENTS if name in optimizer.state_names and name in natives]
    for name in state:
        made = str(optimizer.example[name].dtype).removeprefix("torch.")
        if natives[name].name != made:
            raise CannotReplay(
                f"{name} is {natives[name].name} and the optimizer keeps it in {made}, so that is "
                "not what trained the run"
            )
    stochastic = optimizer.hyperparameters.get("rounding") == "stochastic"
    if stochastic and not isinstance(attribute(source.attributes, "recording", "vocabulary"), int):
        raise CannotReplay(
            "the weights were rounded at random, by numbers that hang on the place in the "
            "parameter, and the run does not say how many tokens that had (root attribute "
            "recording, vocabulary)"
        )
    return Simulator(
        optimizer=optimizer,
        placement=recorded_placement(source, device),
        natives=natives,
        recorded=("W", *state),
    )
