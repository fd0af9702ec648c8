"""The rows of a counterfactual: the computed W, and variables copied from the recorded run."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from trajstore.schema import VARIABLES
from trajstore.trainers.counterfactuals.planned_counterfactual import (
    OPTIMIZER_VARIABLES,
    PlannedCounterfactual,
)
from trajstore.trainers.recording.device_norms import token_norm, ulp_l1
from trajstore.trainers.replay.parameter_placement import Placement, tensor_of
from trajstore.trainers.replay.recorded_optimizer import RecordedOptimizer, State
from trajstore.trainers.replay.recorded_rows import RecordedRow
from trajstore.trainers.replay.replay_result import CannotReplay
from trajstore.values.native_types import NativeType, as_bits, native_type
from trajstore.values.optimizer_rule import MOMENTS

__all__ = ["CounterfactualRows"]

Array = npt.NDArray[Any]

_WINDOW = 128 << 20


class CounterfactualRows:
    """Iterator that computes row after row.

    Parameters
    ----------
    planned : PlannedCounterfactual

    Attributes
    ----------
    first_difference : int or None
        First step after which W or a moment differs from the recorded one. It is searched only if
        no setting changes, and is known after all rows.
    """

    def __init__(self, planned: PlannedCounterfactual) -> None:
        self._planned = planned
        self._rows = planned.rows
        self._variables = planned.variables
        self.first_difference: int | None = None
        self._compared = [
            name
            for name in ("W", *MOMENTS)
            if name in planned.variables and not planned.settings.given
        ]

    def __iter__(self) -> Iterator[tuple[RecordedRow, dict[str, Array]]]:
        """Yield each row of the new run with its bits."""
        first = self._planned.first
        names = {*self._variables, *self._planned.recorded.state_names}
        (row,) = self._rows.read(names, first=first, stop=first + 1)
        loop = self._begin(row)
        recorded = {name: self._rows.scalar(name, first) for name in ("lr", "clip_coef")}
        values = self._values(loop, row, None) | recorded
        if "W_ulp_l1" in values and self._variables["W"] != self._rows.natives["W"]:
            # The motion before this row was counted in spacings of another type.
            values["W_ulp_l1"] = np.full_like(
                values["W_ulp_l1"], self._variables["W_ulp_l1"].nan_bits
            )
        yield row, values
        read = [
            name for name in self._variables if name not in OPTIMIZER_VARIABLES
        ] + self._compared
        for row in self._rows.read(read, first=first + 1, window=_WINDOW):
            last = loop.weights.clone() if self._has_motion else None
            self._step(loop, row, self._planned.lr, self._planned.clip_coef)
            values = self._values(loop, row, last)
            if self.first_difference is None and not self._is_as_recorded(row, values):
                self.first_difference = row.step
            yield row, values

    def _is_as_recorded(self, row: RecordedRow, values: dict[str, Array]) -> bool:
        return all(
            np.array_equal(values[name], self._planned.of_tokens(row.bits[name]))
            for name in self._compared
        )

    @property
    def _has_motion(self) -> bool:
        return "W_step_norm" in self._variables or "W_ulp_l1" in self._variables

    def _begin(self, row: RecordedRow) -> OpenLoop:
        """Return the optimizer with the recorded state of a row."""
        taken = self._rows.steps_taken(row.number)
        state: State | None = None
        if taken and self._planned.settings.keeps_state:
            if self._planned.needs_rebuilding:
                before = self._rebuilt(row.number)
                state = {name: before.state(name) for name in self._planned.recorded.state_names}
            else:
                state = {
                    name: self._parameter(name, row) for name in self._planned.recorded.state_names
                }
            if state and row.number == 0 and not any(value.any() for value in state.values()):
                raise CannotReplay(
                    f"the optimizer's state at step {row.step} was not recorded, because recording "
                    "began there; start a step later (--from)"
                )
        weights = self._parameter("W", row).to(getattr(torch, self._planned.settings.weights_dtype))
        return OpenLoop(self._planned.optimizer, self._planned.placement, weights, state, taken)

    def _rebuilt(self, last: int) -> OpenLoop:
        """Return the recorded optimizer after all recorded steps up to a row."""
        (start,) = self._rows.read(["W"], stop=1)
        loop = OpenLoop(
            self._planned.recorded, self._planned.placement, self._parameter("W", start), None, 0
        )
        for row in self._rows.read(["grad"], first=1, stop=last + 1, window=_WINDOW):
            self._step(loop, row, None, None)
        return loop

    def _step(
        self,
        loop: OpenLoop,
        row: RecordedRow,
        lr: npt.NDArray[np.float64] | None,
        clip_coef: list[Array] | None,
    ) -> None:
        """Take the step of a row, with changed or with recorded rates."""
        number = row.number
        if self._rows.skipped[number]:
            return
        rate = self._rows.value("lr", number) if lr is None else float(lr[number])
        bits = self._rows.scalar("clip_coef", number) if clip_coef is None else clip_coef[number]
        gradient = loop.gradient(
            self._planned.of_tokens(row.bits["grad"]), self._rows.natives["grad"]
        )
        loop.step(gradient, tensor_of(bits, self._rows.natives["clip_coef"]), rate)

    def _parameter(self, name: str, row: RecordedRow) -> torch.Tensor:
        return self._planned.placement.parameter(
            self._planned.of_tokens(row.bits[name]), self._rows.natives[name]
        )

    def _values(
        self, loop: OpenLoop, row: RecordedRow, last: torch.Tensor | None
    ) -> dict[str, Array]:
        """Return the bits of a row of the new run."""
        values: dict[str, Array] = {}
        for name in self._variables:
            if name == "W":
                values[name] = loop.bits(loop.weights)
            elif name == "cells":
                values[name] = loop.bits(loop.weights.to(torch.bfloat16))
            elif name in MOMENTS:
                values[name] = loop.bits(loop.state(name))
            elif name == "lr":
                values[name] = self._planned.lr[row.number].view(np.uint64)
            elif name == "clip_coef":
                values[name] = self._planned.clip_coef[row.number]
            elif name == "grad":
                values[name] = self._gradient(row)
            elif last is not None and name in ("W_step_norm", "W_ulp_l1"):
                measure = token_norm if name == "W_step_norm" else ulp_l1
                values[name] = loop.bits(measure(loop.weights, last))
            elif VARIABLES[name].dims == ("step",):
                values[name] = self._rows.scalar(name, row.number)
            else:
                bits = row.bits[name]
                values[name] = (
                    self._planned.of_tokens(bits) if "token" in VARIABLES[name].dims else bits
                )
        return values

    def _gradient(self, row: RecordedRow) -> Array:
        """Return the gradient that the optimizer gets, before clipping."""
        native, wanted = self._rows.natives["grad"], self._variables["grad"]
        bits = self._planned.of_tokens(row.bits["grad"])
        if native == wanted:
            return bits
        return as_bits(tensor_of(bits, native).to(getattr(torch, wanted.name)), wanted, "grad")


class OpenLoop:
    """One optimizer of one parameter, stepped with given gradients.

    Parameters
    ----------
    optimizer : RecordedOptimizer
    placement : Placement
        Placement of the tokens in the parameter.
    weights : tensor, (vocabulary, hidden)
        Initial weights.
    state : dict of str to tensor, optional
        Initial state; None before the first step.
    steps_taken : int
        Steps that the optimizer has taken.
    """

    def __init__(
        self,
        optimizer: RecordedOptimizer,
        placement: Placement,
        weights: torch.Tensor,
        state: State | None,
        steps_taken: int,
    ) -> None:
        self._placement = placement
        self._example = optimizer.example
        self._parameter, self._optimizer = optimizer.build(weights)
        if state is not None:
            held = {
                name: value.to(device=weights.device, dtype=optimizer.example[name].dtype)
                for name, value in state.items()
                if name in optimizer.example  # a momentum of 0 keeps none
            }
            self._optimizer.state[self._parameter] = optimizer.with_step_count(held, steps_taken)

    @property
    def weights(self) -> torch.Tensor:
        """W, (vocabulary, hidden)."""
        return self._parameter.detach()

    def state(self, name: str) -> torch.Tensor:
        """Return a state by name, (vocabulary, hidden); 0 before the first step."""
        held = self._optimizer.state[self._parameter]
        if name not in held:
            return torch.zeros(
                self._parameter.shape, dtype=self._example[name].dtype, device=self.weights.device
            )
        tensor: torch.Tensor = held[name]
        return tensor

    def gradient(self, bits: Array, native: NativeType) -> torch.Tensor:
        """Return a recorded gradient in the type of W, (vocabulary, hidden)."""
        return self._placement.parameter(bits, native).to(self._parameter.dtype)

    def step(self, gradient: torch.Tensor, clip_coef: torch.Tensor, lr: float) -> None:
        """Take one step.

        Parameters
        ----------
        gradient : tensor, (vocabulary, hidden)
            Before clipping; it is clipped in place.
        clip_coef : tensor, ()
            Factor of clipping.
        lr : float
        """
        # torch.nn.utils.clip_grad_norm_ also multiplies by a tensor of the norm's type.
        self._parameter.grad = gradient.mul_(clip_coef.to(gradient.device))
        self._optimizer.param_groups[0]["lr"] = lr
        self._optimizer.step()

    def bits(self, tensor: torch.Tensor) -> Array:
        """Return the native bits of the tokens in a tensor, (token, hidden)."""
        native = native_type(str(tensor.dtype).removeprefix("torch."))
        return self._placement.bits(tensor, native)
