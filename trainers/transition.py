"""One recorded step, carried out again from what was stored before it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from trainers.rule import OptimizerRule, Placement, State, tensor_of
from trajstore.bits import NativeType

__all__ = ["Outcome", "Simulator", "Transition"]

Array = npt.NDArray[Any]
Bits = dict[str, Array]


@dataclass(frozen=True, kw_only=True, eq=False)
class Transition:
    """From one row to the next, which is one optimizer step later.

    Attributes
    ----------
    step : int
        Number of the later row.
    before, stored : dict of str to ndarray, (token, hidden)
        Bits of W and of the recorded state, before the step and after it.
    gradient : ndarray, (token, hidden), optional
        Bits; None if the step was skipped.
    lr : float
    clip : ndarray, ()
        Bits of the factor that the gradient was multiplied by.
    taken : int
        Steps that the optimizer had taken before.
    fresh : bool
        Whether it had taken none, and so kept nothing yet.
    carried : dict of str to tensor
        State before the step that is not recorded, as the steps before gave it.
    unproven : frozenset of str
        Of `before`, what was not compared with anything.
    clip_trusted : bool
        Whether `clip` is what the recorded norm of all gradients gives.
    norms : ndarray, (token,), optional
        Bits of the recorded length of each token's gradient, where it is recorded.
    """

    step: int
    before: Bits
    stored: Bits
    gradient: Array | None
    lr: float
    clip: Array
    taken: int
    fresh: bool
    carried: State
    unproven: frozenset[str]
    clip_trusted: bool
    norms: Array | None


@dataclass(frozen=True, kw_only=True, eq=False)
class Outcome:
    """What a step gives.

    Attributes
    ----------
    bits : dict of str to ndarray, (token, hidden)
        W, and the state that is recorded.
    carried : dict of str to tensor
        The state that is not.
    """

    bits: Bits
    carried: State

    def wrong(self, stored: Bits) -> Array:
        """Which of the recorded variables disagree, (variable, token, hidden)."""
        return np.stack([stored[name] != bits for name, bits in self.bits.items()])

    def where(self, chosen: Array, other: Outcome, placement: Placement) -> Outcome:
        """The outcome `other` at the chosen elements, and this one elsewhere.

        Parameters
        ----------
        chosen : ndarray of bool, (token, hidden)
        """
        bits = {name: np.where(chosen, other.bits[name], own) for name, own in self.bits.items()}
        mask = torch.from_numpy(chosen)
        if placement.ids is not None:
            whole = torch.zeros(placement.shape, dtype=torch.bool)
            whole[torch.from_numpy(placement.ids)] = mask
            mask = whole
        mask = mask.to(placement.device)
        carried = {
            name: torch.where(mask, other.carried[name], own) if own.shape == mask.shape else own
            for name, own in self.carried.items()
        }
        return Outcome(bits=bits, carried=carried)


@dataclass(frozen=True, kw_only=True, eq=False)
class Simulator:
    """Carries out transitions.

    Attributes
    ----------
    rule : OptimizerRule
    placement : Placement
    natives : dict of str to NativeType
        Of ``W``, ``grad``, ``clip_coef`` and the recorded state.
    recorded : tuple of str
        W, and the state that is recorded.
    """

    rule: OptimizerRule
    placement: Placement
    natives: dict[str, NativeType]
    recorded: tuple[str, ...]

    @property
    def rebuilt(self) -> tuple[str, ...]:
        """State that is not recorded."""
        return tuple(name for name in self.rule.names if name not in self.recorded)

    def outcome(self, transition: Transition) -> Outcome:
        """Carry out one step."""
        if transition.gradient is None:
            return Outcome(bits=transition.before, carried=transition.carried)
        before = {
            name: self.placement.tensor(transition.before[name], self.natives[name])
            for name in self.recorded
        }
        weights = before.pop("W")
        gradient = self.placement.tensor(transition.gradient, self.natives["grad"])
        # As torch.nn.utils.clip_grad_norm_ does: by a tensor of the type of the norm, because a
        # Python number would be rounded to the type of the gradient first.
        gradient.mul_(tensor_of(transition.clip, self.natives["clip_coef"]).to(gradient.device))
        state = None
        if not transition.fresh:
            state = self.rule.counted(transition.carried | before, transition.taken)
        weights, state = self.rule.step(weights, state, gradient, transition.lr)
        after = {"W": weights} | state
        return Outcome(
            bits={
                name: self.placement.bits(after[name], self.natives[name]) for name in self.recorded
            },
            carried={name: state[name] for name in self.rebuilt},
        )
