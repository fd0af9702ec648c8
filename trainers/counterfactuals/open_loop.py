"""The real optimizer, going on from a recorded state with gradients that do not answer to it."""

from __future__ import annotations

from typing import Any

import numpy.typing as npt
import torch

from trajstore.trainers.replay.parameter_placement import Placement
from trajstore.trainers.replay.recorded_optimizer import RecordedOptimizer, State
from trajstore.values.native_types import NativeType, native_type

__all__ = ["OpenLoop"]

Array = npt.NDArray[Any]


class OpenLoop:
    """One optimizer of one parameter, stepped with given gradients.

    Parameters
    ----------
    optimizer : RecordedOptimizer
    placement : Placement
        Of the given tokens in the parameter.
    weights : tensor, (vocabulary, hidden)
        To begin with.
    state : dict of str to tensor, optional
        That the optimizer has then; None for one that has taken no step.
    steps_taken : int
        Steps that it has taken.
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
        """State of that name, (vocabulary, hidden); 0 before the first step."""
        held = self._optimizer.state[self._parameter]
        if name not in held:
            return torch.zeros(
                self._parameter.shape, dtype=self._example[name].dtype, device=self.weights.device
            )
        tensor: torch.Tensor = held[name]
        return tensor

    def gradient(self, bits: Array, native: NativeType) -> torch.Tensor:
        """A recorded gradient in the type of W, (vocabulary, hidden)."""
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
        # As torch.nn.utils.clip_grad_norm_ does: by a tensor of the type of the norm.
        self._parameter.grad = gradient.mul_(clip_coef.to(gradient.device))
        self._optimizer.param_groups[0]["lr"] = lr
        self._optimizer.step()

    def bits(self, tensor: torch.Tensor) -> Array:
        """Native bits of the given tokens of a tensor, (token, hidden)."""
        native = native_type(str(tensor.dtype).removeprefix("torch."))
        return self._placement.bits(tensor, native)
