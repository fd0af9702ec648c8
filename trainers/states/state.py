"""The state after a step: everything that the next optimizer step depends on.

It comes from a training between two steps, from a row or keyframe that holds everything, or from a
checkpoint. The position in the data follows from the step.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Self

import torch

from trajstore.errors import FormatError
from trajstore.trainers.recording.parameters import JoinedOptimizer


@dataclass(frozen=True, kw_only=True, eq=False)
class State:
    """State of a training after an optimizer step. All tensors are on the CPU, and its own.

    The fields after `counters` belong to a training from a configuration.

    Attributes
    ----------
    step : int
        Optimizer steps taken.
    weights : mapping of str to tensor
        Parameters by the first of their names, and recorded buffers.
    kept : mapping of str to mapping
        What the optimizers keep of each parameter, by its name.
    counters : mapping
        ``taken``: steps that no gradient scaler skipped, which the schedule counts; ``scaler``: the
        state of the scaler, or None.
    run : str
        Creation time of the run, which distinguishes it from another run with the same name.
    rows : int
        Rows of the run so far, without a last row that exists only because training ended.
    config : mapping
        Configuration of the step.
    sources : mapping of str to str
        Given paths of the text and the tokenizer.
    """

    step: int
    weights: Mapping[str, torch.Tensor]
    kept: Mapping[str, Mapping[str, Any]]
    counters: Mapping[str, Any] = field(default_factory=dict)
    run: str = ""
    rows: int = 0
    config: Mapping[str, Any] = field(default_factory=dict)
    sources: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def take(cls, model: torch.nn.Module, optimizer: Any, step: int, **others: Any) -> Self:
        """Copy the state of a training.

        Parameters
        ----------
        model : Module
        optimizer : Optimizer, or sequence of Optimizer
        step : int
        **others
            Further attributes.
        """
        named, state = dict(model.named_parameters()), JoinedOptimizer(optimizer).state
        return cls(
            step=step,
            weights={name: _copy(parameter) for name, parameter in named.items()},
            kept={
                name: {key: _copy(value) for key, value in state[parameter].items()}
                for name, parameter in named.items()
                if parameter in state
            },
            **others,
        )

    @torch.no_grad()
    def set_weights(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Copy the weights to tensors by name, in their types.

        Raises
        ------
        FormatError
            If they are of another model.
        """
        for name in sorted(self.weights.keys() | tensors.keys()):
            here, there = (
                f"of shape {tuple(each[name].shape)}" if name in each else "missing"
                for each in (self.weights, tensors)
            )
            if here != there:
                raise FormatError(
                    f"the state belongs to another model: {name} is {here} in the state, and "
                    f"{there} in the model; use the versions of torch and transformers that "
                    "recorded the run"
                )
            tensors[name].copy_(self.weights[name])

    def set_kept(self, tensors: Mapping[str, torch.Tensor], optimizer: JoinedOptimizer) -> None:
        """Give the optimizers what they kept, in the types that each optimizer loads.

        Parameters
        ----------
        tensors : mapping of str to tensor
            The parameters by name. Checkpoints of format 3 have places in place of names.
        optimizer : JoinedOptimizer
        """
        names = {tensor: name for name, tensor in tensors.items()}
        by_name = not self.kept.keys().isdisjoint(tensors)
        for member in optimizer.members:
            of_each = {}
            for place, tensor in enumerate(optimizer.parameters(member)):
                kept = self.kept.get(names.get(tensor, "") if by_name else str(place))
                if kept is not None:  # as copies, which the training may change
                    of_each[place] = copy.deepcopy(dict(kept))
            groups = member.state_dict()["param_groups"]
            member.load_state_dict({"state": of_each, "param_groups": groups})


def _copy(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.detach().to("cpu", copy=True).contiguous()
    return value
