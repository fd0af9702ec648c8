"""The optimizers that train a model together, as one optimizer for the recorder."""

from __future__ import annotations

from collections import ChainMap
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from accelerate.optimizer import AcceleratedOptimizer
from torch.optim import Optimizer

from trajstore.errors import RecordingError


def optimizer_chain(optimizer: Any) -> tuple[Any, ...]:
    """Return an optimizer and those that it wraps; the last one updates the parameters.

    A wrapper keeps another optimizer with its parameter groups in an attribute. That of accelerate
    only passes its calls on, so it is left out.

    Raises
    ------
    RecordingError
        If there is no optimizer of torch.
    """
    chain = [optimizer]
    while (inner := _inner(chain[-1])) is not None:
        chain.append(inner)
    if not isinstance(chain[-1], Optimizer):
        raise RecordingError(
            f"got {type(optimizer).__name__}, expected a torch.optim.Optimizer; pass the optimizer "
            "that trains the parameter"
        )
    return tuple(one for one in chain if not isinstance(one, AcceleratedOptimizer))


def _inner(optimizer: Any) -> Any:
    """Return the optimizer that another one wraps; None if it wraps none."""
    own = getattr(optimizer, "param_groups", None)
    for value in getattr(optimizer, "__dict__", {}).values():
        if not isinstance(value, Optimizer) or value is optimizer:
            continue
        if own is None or [*map(id, own)] == [*map(id, value.param_groups)]:
            return value
    return None


class _States(ChainMap[torch.Tensor, dict[str, Any]]):
    """States of several optimizers. Theirs are defaultdicts, in which a look-up adds an entry."""

    def __getitem__(self, parameter: torch.Tensor) -> dict[str, Any]:
        for one in self.maps:
            if parameter in one:
                return one[parameter]
        raise KeyError(parameter)


class JoinedOptimizer:
    """One or several optimizers; each trains parameters of its own.

    A recorded step has a turn of each: its step, or a step that a gradient scaler skips.

    Parameters
    ----------
    optimizers : Optimizer, or iterable of Optimizer
        Or objects that wrap one.
    ends_step : Optimizer, optional
        The one whose turn ends a recorded step; the others may have several turns or none.

    Attributes
    ----------
    chains : tuple of tuple
        Each given optimizer with those that it wraps.
    members : tuple of Optimizer
        The last one of each chain.
    ends_step : Optimizer or None
    turns : dict of Optimizer to int
        Members that had a turn in the recorded step, with their steps that a scaler did not skip.

    Raises
    ------
    RecordingError
        If there is no optimizer, two have the same parameter, or `ends_step` is not one of them.
    """

    def __init__(self, optimizers: Any, ends_step: Any = None) -> None:
        given = optimizers if isinstance(optimizers, Iterable) else [optimizers]
        self.chains = tuple(map(optimizer_chain, given))
        self.members: tuple[Optimizer, ...] = tuple(chain[-1] for chain in self.chains)
        self.ends_step = None if ends_step is None else optimizer_chain(ends_step)[-1]
        self.turns: dict[Optimizer, int] = {}
        self._started: set[Optimizer] = set()
        kinds = [type(member).__name__ for member in self.members]
        self._names = {
            member: kind if kinds.count(kind) == 1 else f"{kind} {kinds[: at + 1].count(kind)}"
            for at, (member, kind) in enumerate(zip(self.members, kinds, strict=True))
        }
        if not self.members:
            raise RecordingError("got no optimizer; pass each one that trains the model")
        if ends_step is not None and self.ends_step not in self.members:
            raise RecordingError(
                f"ends_step: got {type(self.ends_step).__name__}, expected one of the given "
                f"optimizers: {self.named(self.members)}"
            )
        trained = [{*self.parameters(member)} for member in self.members]
        if len(set().union(*trained)) < sum(map(len, trained)):
            raise RecordingError(
                f"a parameter is in several of the optimizers {self.named(self.members)}; give "
                "each parameter to one"
            )

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """Parameter groups of all members, in their order."""
        return [group for member in self.members for group in member.param_groups]

    @property
    def state(self) -> Mapping[torch.Tensor, dict[str, Any]]:
        """State of each parameter."""
        states = [member.state for member in self.members]
        return states[0] if len(states) == 1 else _States(*states)

    @property
    def waiting(self) -> tuple[Optimizer, ...]:
        """Members that have taken no step yet."""
        return tuple(member for member in self.members if member not in self._started)

    def member_of(self, optimizer: Any) -> Optimizer | None:
        """Return the member that an optimizer is or wraps; None if it is none of them."""
        for chain, member in zip(self.chains, self.members, strict=True):
            if any(one is optimizer for one in chain):
                return member
        inner = getattr(optimizer, "optimizer", None)
        return self.member_of(inner) if isinstance(optimizer, AcceleratedOptimizer) else None

    def parameters(self, *members: Optimizer) -> list[torch.Tensor]:
        """Return the parameters that some of the members train."""
        return [p for one in members for group in one.param_groups for p in group["params"]]

    def owner(self, group: Mapping[str, Any]) -> Optimizer | None:
        """Return the member that has a group; None if no member has it."""
        having = (one for one in self.members if any(group is own for own in one.param_groups))
        return next(having, None)

    def named(self, members: Iterable[Optimizer]) -> str:
        """Return the names of members: their classes, with a number if two have the same."""
        return " and ".join(self._names[member] for member in members)

    def steps_of(self, owner: Optimizer | None) -> int:
        """Return how often a member was stepped in the recorded step; for None, any member."""
        return max(self.turns.values()) if owner is None else self.turns.get(owner, 0)

    def check_turn(self, member: Optimizer) -> None:
        """Check that it is the turn of a member.

        Raises
        ------
        RecordingError
            If it has had its turn, and others have not.
        """
        if member in self.turns and self.ends_step is None:
            others = self.named(one for one in self.members if one not in self.turns)
            raise RecordingError(
                f"{self.named([member])} steps again before {others} has stepped; step each "
                "optimizer once, or name the one that ends a step: capture(…, ends_step=optimizer)"
            )

    def end_turn(self, member: Optimizer, *, skipped: bool) -> bool:
        """End the turn of a member; return True if this ends the recorded step."""
        self.turns[member] = self.turns.get(member, 0) + (not skipped)
        if not skipped:
            self._started.add(member)
        if self.ends_step is not None:
            return member is self.ends_step
        return len(self.turns) == len(self.members)
