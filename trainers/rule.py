"""The optimizer of a recorded run, to be carried out again: the real class of `torch.optim`.

The kernels of torch round differently in whole vectors and in what is left over at the end of a
tensor or of a thread's share. So a step is carried out on a parameter of the shape that was
trained, every recorded token in its own place, and with as many threads as were used.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch.optim import Optimizer

from trajstore.bits import NativeType

__all__ = ["RULES", "OptimizerRule", "Placement", "State", "recorded_rule", "tensor_of", "threads"]

Array = npt.NDArray[Any]

State = dict[str, torch.Tensor]
"""What an optimizer keeps for the parameter."""

RULES = (
    "Adam", "AdamW", "SGD", "RMSprop", "Adagrad", "Adadelta", "Adamax", "NAdam", "RAdam",
)  # fmt: skip
"""Classes of `torch.optim` that treat each element by itself, whatever else they train."""

_STEP = "step"


def tensor_of(bits: Array, native: NativeType) -> torch.Tensor:
    """Tensor of a native type with these bits, a copy."""
    signed = torch.from_numpy(np.array(bits).view(f"i{native.itemsize}"))
    return signed.view(getattr(torch, native.name))


@dataclass(frozen=True, kw_only=True, eq=False)
class Placement:
    """Where the recorded tokens lie in the parameter that was trained.

    Attributes
    ----------
    shape : tuple of int
        Of the parameter: (vocabulary, hidden).
    ids : ndarray of int, (token,), optional
        Rows that were recorded; None if that is all of them.
    device : torch.device
        That the steps are carried out on.
    """

    shape: tuple[int, int]
    ids: Array | None
    device: torch.device

    def tensor(self, bits: Array, native: NativeType) -> torch.Tensor:
        """Parameter with the recorded values in their places, and 0 elsewhere.

        Parameters
        ----------
        bits : ndarray of ``native.bits``, (token, hidden)
        native : NativeType

        Returns
        -------
        tensor of the native type, a copy
        """
        values = tensor_of(bits, native)
        if self.ids is not None:
            whole = torch.zeros(self.shape, dtype=values.dtype)
            whole[torch.from_numpy(self.ids)] = values
            values = whole
        return values.to(self.device)

    def bits(self, tensor: torch.Tensor, native: NativeType) -> Array:
        """Bits of the recorded values of a parameter.

        Returns
        -------
        ndarray of ``native.bits``, (token, hidden)
        """
        values = tensor.cpu()
        if self.ids is not None:
            values = values[torch.from_numpy(self.ids)]
        signed = getattr(torch, f"int{8 * native.itemsize}")
        bits: Array = values.view(signed).numpy().view(native.bits)
        return bits


@dataclass(frozen=True, kw_only=True, eq=False)
class OptimizerRule:
    """A class of `torch.optim` with the hyperparameters that a run recorded.

    Attributes
    ----------
    kind : type of Optimizer
    hyperparameters : dict
        Of the recorded parameter's group, as the optimizer held them.
    state : dict of str to tensor
        What it keeps for one element after its first step: names, types and devices.
    """

    kind: type[Optimizer]
    hyperparameters: dict[str, Any]
    state: State

    @property
    def names(self) -> tuple[str, ...]:
        """What is kept besides the number of steps."""
        return tuple(name for name in self.state if name != _STEP)

    @property
    def counts(self) -> bool:
        """Whether the number of steps taken enters."""
        return _STEP in self.state

    def counted(self, state: State, taken: int) -> State:
        """State with the number of steps taken before, as this optimizer keeps it."""
        if not self.counts:
            return state
        return state | {_STEP: torch.full_like(self.state[_STEP], taken)}

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
        parameter, optimizer = _build(self.kind, weights, self.hyperparameters)
        optimizer.param_groups[0]["lr"] = lr
        if state is not None:
            optimizer.state[parameter] = {name: value.clone() for name, value in state.items()}
        parameter.grad = gradient.clone()
        optimizer.step()
        return parameter.detach(), _kept(optimizer, parameter)


def recorded_rule(
    attributes: Mapping[str, Any], dtype: torch.dtype, device: torch.device
) -> OptimizerRule | str:
    """Rule of the attribute ``optimizer`` of a run.

    Only names of this module's own list are looked up; a file cannot name what is executed.

    Parameters
    ----------
    attributes : mapping
        Of the root of the run.
    dtype : torch.dtype
        Of the parameter.
    device : torch.device

    Returns
    -------
    OptimizerRule or str
        A text says why there is none.
    """
    recorded = attributes.get("optimizer")
    if not isinstance(recorded, Mapping) or not isinstance(recorded.get("class"), str):
        return "the run does not say which optimizer trained it (root attribute optimizer)"
    path = recorded["class"]
    name = path.rpartition(".")[2]
    kind = getattr(torch.optim, name) if name in RULES else None
    if kind is None or f"{kind.__module__}.{kind.__qualname__}" != path:
        return f"the optimizer is {path}; those of torch.optim that can be replayed: " + ", ".join(
            RULES
        )
    hyperparameters = dict(recorded.get("hyperparameters") or {})
    missing = _numbers(kind) - set(hyperparameters)
    if missing:
        return f"the run does not say the optimizer's {', '.join(sorted(missing))}"
    if device.type == "cpu":
        # That the count of steps may live on an accelerator; torch refuses it elsewhere.
        hyperparameters["capturable"] = False
    try:
        parameter, optimizer = _build(kind, torch.ones(1, 1, dtype=dtype), hyperparameters, device)
        parameter.grad = torch.ones_like(parameter)
        optimizer.step()
    except (TypeError, ValueError, RuntimeError, KeyError, AssertionError) as error:
        return f"{path} of this torch refuses the recorded hyperparameters ({error})"
    return OptimizerRule(
        kind=kind, hyperparameters=hyperparameters, state=_kept(optimizer, parameter)
    )


def _numbers(kind: type[Optimizer]) -> set[str]:
    """Hyperparameters that are numbers; a flag that is not recorded is this torch's default."""
    optimizer = kind([torch.nn.Parameter(torch.zeros(1))], lr=0.0)
    (group,) = optimizer.param_groups
    flags = (bool, type(None), list)  # and the list of parameters
    return {name for name, value in group.items() if not isinstance(value, flags)}


def _build(
    kind: type[Optimizer],
    weights: torch.Tensor,
    hyperparameters: Mapping[str, Any],
    device: torch.device | None = None,
) -> tuple[torch.nn.Parameter, Optimizer]:
    parameter = torch.nn.Parameter(weights.detach().clone().to(device), requires_grad=False)
    values = {name: tuple(v) if isinstance(v, list) else v for name, v in hyperparameters.items()}
    accepted = inspect.signature(kind).parameters
    optimizer = kind([parameter], **{name: v for name, v in values.items() if name in accepted})
    return parameter, optimizer


def _kept(optimizer: Optimizer, parameter: torch.nn.Parameter) -> State:
    state = optimizer.state[parameter]
    return {name: value for name, value in state.items() if isinstance(value, torch.Tensor)}


@contextmanager
def threads(count: int | None) -> Iterator[None]:
    """Let torch use as many threads as when a run was recorded."""
    before = torch.get_num_threads()
    torch.set_num_threads(count or before)
    try:
        yield
    finally:
        torch.set_num_threads(before)
