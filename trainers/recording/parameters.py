"""The recorded parameters of a model, and its optimizers, joined to one for the recorder."""

from __future__ import annotations

import difflib
import re
from collections import ChainMap
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.optim import Optimizer

from trajstore.errors import RecordingError
from trajstore.installation import imported
from trajstore.trainers.recording.torch_internals import (
    name_outside_compile,
    own_parameter,
    uncompiled,
)
from trajstore.values.optimizer_rule import numbers_of


def optimizer_chain(optimizer: Any) -> tuple[Any, ...]:
    """Return an optimizer and those that it wraps; the last one updates the parameters.

    A wrapper keeps another optimizer with its parameter groups in an attribute. That of accelerate
    only passes its calls on, so it is left out, and so are those without a method ``step``.

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
    # Some schedules wrap an optimizer, and have another method, such as update(), that steps it.
    return tuple(link for link in chain if hasattr(link, "step") and not _is_accelerated(link))


def _is_accelerated(optimizer: Any) -> bool:
    return isinstance(optimizer, imported("accelerate.optimizer", "AcceleratedOptimizer"))


def _inner(optimizer: Any) -> Any:
    """Return the optimizer that another one wraps; None if it wraps none."""
    groups = getattr(optimizer, "param_groups", None)
    for value in getattr(optimizer, "__dict__", {}).values():
        if not isinstance(value, Optimizer) or value is optimizer:
            continue
        if groups is None or [*map(id, groups)] == [*map(id, value.param_groups)]:
            return value
    return None


class _States(ChainMap[torch.Tensor, dict[str, Any]]):
    """States of several optimizers. Theirs are defaultdicts, in which a look-up adds an entry."""

    def __getitem__(self, parameter: torch.Tensor) -> dict[str, Any]:
        for states in self.maps:
            if parameter in states:
                return states[parameter]
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
        separate = optimizers if isinstance(optimizers, Iterable) else [optimizers]
        self.chains = tuple(map(optimizer_chain, separate))
        self.members: tuple[Optimizer, ...] = tuple(chain[-1] for chain in self.chains)
        self.ends_step = None if ends_step is None else optimizer_chain(ends_step)[-1]
        self.turns: dict[Optimizer, int] = {}
        self._started: set[Optimizer] = set()
        classes = [type(member).__name__ for member in self.members]
        self._names = {
            member: kind
            if classes.count(kind) == 1
            else f"{kind} {classes[: place + 1].count(kind)}"
            for place, (member, kind) in enumerate(zip(self.members, classes, strict=True))
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
            if any(link is optimizer for link in chain):
                return member
        inner = getattr(optimizer, "optimizer", None)
        return self.member_of(inner) if _is_accelerated(optimizer) else None

    def parameters(self, *members: Optimizer) -> list[torch.Tensor]:
        """Return the parameters that some of the members train."""
        return [p for member in members for group in member.param_groups for p in group["params"]]

    def owner(self, group: Mapping[str, Any]) -> Optimizer | None:
        """Return the member that has a group; None if no member has it."""
        owners = (m for m in self.members if any(group is known for known in m.param_groups))
        return next(owners, None)

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
            others = self.named(member for member in self.members if member not in self.turns)
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


Settings = dict[str, float]
"""Numbers and flags of a parameter group, by their names in a run."""

NO_NUMBERS = ("lr", "rounding_seed")
"""Numbers of a parameter group that are no hyperparameters of a row."""

_EMBEDDINGS = (torch.nn.Embedding, torch.nn.EmbeddingBag)

_OF_POSITIONS = re.compile(r"(^|[._])(pos|wpe\b)", re.IGNORECASE)
"""Found in the names of embeddings of positions, which may have more rows than those of tokens."""


@dataclass(frozen=True, kw_only=True, eq=False)
class RecordedParameter:
    """A matrix whose history is recorded, one row per token.

    Attributes
    ----------
    name : str
        First of its names in the model; tied weights are one parameter.
    tensor : Parameter, (token, hidden)
    head : Module or None
        Module that multiplies hidden states by it to make logits.
    group : dict
        The optimizer's parameter group with this parameter and its learning rate.
    optimizer : Optimizer or None
        The optimizer with that group; None if the loop has taken the parameter out of it.
    """

    name: str
    tensor: torch.nn.Parameter
    head: torch.nn.Module | None
    group: dict[str, Any]
    optimizer: Optimizer | None


def unwrap(model: torch.nn.Module) -> torch.nn.Module:
    """Return the model inside `torch.compile`, `DistributedDataParallel` and similar wrappers."""
    while True:
        inner = uncompiled(model)
        if isinstance(inner, torch.nn.parallel.DistributedDataParallel):
            inner = inner.module
        if inner is model:
            return model
        model = inner


def find_parameters(
    model: torch.nn.Module,
    optimizer: JoinedOptimizer,
    names: str | Sequence[str] | None,
    on_note: Callable[[str], None] = lambda sentence: None,
) -> tuple[RecordedParameter, ...]:
    """Find parameters by name, each matrix once.

    Parameters
    ----------
    model : Module
        Wrapped or not.
    optimizer : JoinedOptimizer
        Optimizers that train them.
    names : str or sequence of str, optional
        Names from `named_parameters`, any name of a tied weight. Default: the weight of the model's
        ``get_output_embeddings()``. Without it, an embedding that the optimizer trains: one that is
        tied to another module, that of ``get_input_embeddings()``, or the one with the most rows.
        Embeddings of positions, by their names, come last.
    on_note : callable, optional
        Called with a sentence that names such an embedding, and the others.

    Raises
    ------
    RecordingError
        If there is no such name (the message lists similar ones), or if the parameter has
        requires_grad=False, is not a matrix, or is missing in the optimizer.
    """
    inner = unwrap(model)
    by_name = dict(inner.named_parameters(remove_duplicate=False))
    trained = {id(parameter) for parameter in optimizer.parameters(*optimizer.members)}
    if trained.isdisjoint(map(id, by_name.values())):
        raise RecordingError(
            f"{optimizer.named(optimizer.members)} has none of the parameters of "
            f"{type(inner).__name__}; pass the model and the optimizer that trains it"
        )
    if names is None:
        names = [_default_name(inner, optimizer, by_name, on_note)]
    elif isinstance(names, str):
        names = [names]
    recorded: dict[int, RecordedParameter] = {}
    for requested in names:
        name = name_outside_compile(requested).removeprefix("module.")
        if name not in by_name:
            raise RecordingError(
                f"{type(inner).__name__} has no parameter {requested!r}; "
                f"{_suggestion(name, by_name)}"
            )
        tensor = by_name[name]
        _check_recordable(requested, tensor)
        if id(tensor) not in recorded:
            first = next(key for key, value in by_name.items() if value is tensor)
            group = find_group(optimizer, tensor)
            if group is None:
                raise RecordingError(
                    f"{first} is not in the optimizer; add it to the optimizer or record another "
                    "parameter"
                )
            recorded[id(tensor)] = RecordedParameter(
                name=first,
                tensor=tensor,
                head=_head(inner, tensor),
                group=group,
                optimizer=optimizer.owner(group),
            )
    return tuple(recorded.values())


def _check_recordable(name: str, tensor: torch.nn.Parameter) -> None:
    if tensor.ndim != 2:
        raise RecordingError(
            f"{name} has shape {tuple(tensor.shape)}, expected a matrix (token, hidden); name "
            "another parameter"
        )
    if not tensor.requires_grad:
        raise RecordingError(
            f"{name} has requires_grad=False, so it is not trained; set requires_grad=True or "
            "record another parameter"
        )


def _default_name(
    model: torch.nn.Module,
    optimizer: JoinedOptimizer,
    by_name: dict[str, torch.nn.Parameter],
    on_note: Callable[[str], None],
) -> str:
    outputs, inputs = (
        getattr(getattr(model, method, lambda: None)(), "weight", None)
        for method in ("get_output_embeddings", "get_input_embeddings")
    )
    for name, tensor in by_name.items():
        if tensor is outputs:
            return name
    in_embeddings = {
        id(own_parameter(module)) for module in model.modules() if isinstance(module, _EMBEDDINGS)
    }
    trained = {id(p) for p in optimizer.parameters(*optimizer.members) if p.requires_grad}
    matrices = {
        name: tensor
        for name, tensor in model.named_parameters()  # tied ones once
        if tensor.ndim == 2 and id(tensor) in trained
    }
    embeddings = [name for name, tensor in matrices.items() if id(tensor) in in_embeddings]
    if not embeddings:
        raise RecordingError(
            f"{type(model).__name__} has no embedding that the optimizer trains; name the matrix "
            f"with parameter=…: {_matrices(by_name)}"
        )

    def preference(name: str) -> tuple[int, ...]:
        tensor = matrices[name]
        tied = _head(model, tensor) is not None
        return tied, tensor is inputs, not _OF_POSITIONS.search(name), len(tensor)

    chosen = max(embeddings, key=preference)
    named = {name: f"{name} ({len(W)} × {W.shape[1]})" for name, W in matrices.items()}
    others = [
        named[name]
        for name, tensor in matrices.items()
        if name != chosen and (name in embeddings or len(tensor) == len(matrices[chosen]))
    ]
    rest = f"and not {_listed(others)}" if others else "the only embedding"
    on_note(f"no parameter= was given, so W is {named[chosen]}, {rest}")
    return chosen


def _suggestion(name: str, by_name: dict[str, torch.nn.Parameter]) -> str:
    close = difflib.get_close_matches(name, by_name, n=5, cutoff=0.5)
    close += [key for key in by_name if key.split(".")[-2:] == name.split(".")[-2:]]
    if close:
        return f"did you mean {' or '.join(dict.fromkeys(close))}?"
    return f"choose from {_matrices(by_name)}"


def _matrices(by_name: dict[str, torch.nn.Parameter]) -> str:
    names = [name for name, tensor in by_name.items() if tensor.ndim == 2]
    return _listed(names) or "no matrices"


def _listed(names: Sequence[str]) -> str:
    listed = ", ".join(names[:12])
    return f"{listed} and {len(names) - 12} more" if len(names) > 12 else listed


def makes_logits(model: torch.nn.Module, head: torch.nn.Module | None) -> bool:
    """Return True if a module is the output embedding of the model or tied to an embedding."""
    if head is None or getattr(model, "get_output_embeddings", lambda: None)() is head:
        return head is not None
    weight = own_parameter(head)
    embeddings = (module for module in model.modules() if isinstance(module, _EMBEDDINGS))
    return any(own_parameter(module) is weight is not None for module in embeddings)


def last_layers(model: torch.nn.Module, vocabularies: Iterable[int]) -> list[torch.nn.Module]:
    """Return the modules whose outputs may be logits: their weights have a row for each token."""
    lengths = frozenset(vocabularies)
    return [
        module
        for module in model.modules()
        if not isinstance(module, _EMBEDDINGS)
        and (weight := own_parameter(module)) is not None
        and weight.ndim == 2
        and not lengths.isdisjoint(weight.shape)  # some layers hold it transposed
    ]


def _head(model: torch.nn.Module, weight: torch.nn.Parameter) -> torch.nn.Module | None:
    for module in model.modules():
        if isinstance(module, _EMBEDDINGS):
            continue
        if any(tensor is weight for tensor in module.parameters(recurse=False)):
            return module
    return None


def find_group(
    optimizer: Optimizer | JoinedOptimizer, weight: torch.Tensor
) -> dict[str, Any] | None:
    """Return the optimizer's group that has a parameter; None if no group has it."""
    for group in optimizer.param_groups:
        if any(tensor is weight for tensor in group["params"]):
            return group
    return None


def settings_of(group: Mapping[str, Any]) -> Settings:
    """Return the numbers and flags of a parameter group."""
    settings = ((key, _as_number(value)) for key, value in group.items() if key != "params")
    return numbers_of(settings, flags=True)


def _as_number(value: Any) -> Any:
    """Return a setting, or the numbers of its tensors on the CPU."""
    if isinstance(value, torch.Tensor) and not value.ndim and value.device.type == "cpu":
        return value.item()
    return tuple(map(_as_number, value)) if isinstance(value, tuple | list) else value


def declared_settings(optimizer: Optimizer, group: Mapping[str, Any]) -> Settings:
    """Return those of `settings_of` that the optimizer's class declares."""
    declared = getattr(optimizer, "defaults", group)  # wrappers of optimizers may have none
    return settings_of({key: group[key] for key in declared if key in group})


def hyperparameter_names(parameter: RecordedParameter) -> tuple[str, ...]:
    """Return the names of the numbers, apart from the rate, that a parameter is stepped with."""
    if parameter.optimizer is None:
        return ()
    settings = declared_settings(parameter.optimizer, parameter.group)
    return tuple(k for k, v in settings.items() if k not in NO_NUMBERS and type(v) is not bool)


def gradient_of(parameter: torch.Tensor) -> torch.Tensor | None:
    """Return the gradient of a parameter; a sparse one as a dense tensor."""
    return None if parameter.grad is None else as_dense(parameter.grad)


def as_dense(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor, or the dense tensor of a sparse one.

    Rows that a sparse tensor holds several times are added in the order of `coalesce`, as in
    `torch.optim.SparseAdam` and `Adagrad`; `to_dense` alone may use another order.
    """
    return tensor.coalesce().to_dense() if tensor.is_sparse else tensor


def as_float64(number: float | torch.Tensor) -> torch.Tensor:
    """Return a copy of numbers in float64 on their device; on the CPU for MPS, which has none."""
    if not isinstance(number, torch.Tensor):
        return torch.tensor(number, dtype=torch.float64, device="cpu")
    number = number.detach()
    return (number.cpu() if number.device.type == "mps" else number).to(torch.float64, copy=True)


def rate_of(group: Mapping[str, Any]) -> torch.Tensor | None:
    """Return the learning rate of a group, float64 of shape (); None if it is not one number."""
    rate = group.get("lr")
    if isinstance(rate, torch.Tensor):
        return as_float64(rate).reshape(()) if rate.numel() == 1 else None
    return as_float64(rate) if isinstance(rate, int | float) else None
