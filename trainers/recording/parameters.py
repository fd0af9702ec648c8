"""The recorded parameters of a model, their optimizer groups and their unembedding modules."""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.optim import Optimizer

from trajstore.errors import RecordingError
from trajstore.trainers.recording.joined_optimizer import JoinedOptimizer
from trajstore.trainers.recording.torch_internals import (
    name_outside_compile,
    own_parameter,
    uncompiled,
)
from trajstore.values.optimizer_rule import numbers_of

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
    if names is None:
        names = [_default_name(inner, optimizer, by_name, on_note)]
    elif isinstance(names, str):
        names = [names]
    found: dict[int, RecordedParameter] = {}
    for given in names:
        name = name_outside_compile(given).removeprefix("module.")
        if name not in by_name:
            raise RecordingError(
                f"{type(inner).__name__} has no parameter {given!r}; {_suggestion(name, by_name)}"
            )
        tensor = by_name[name]
        _check_recordable(given, tensor)
        if id(tensor) not in found:
            first = next(key for key, value in by_name.items() if value is tensor)
            group = find_group(optimizer, tensor)
            if group is None:
                raise RecordingError(
                    f"{first} is not in the optimizer; add it to the optimizer or record another "
                    "parameter"
                )
            found[id(tensor)] = RecordedParameter(
                name=first,
                tensor=tensor,
                head=_head(inner, tensor),
                group=group,
                optimizer=optimizer.owner(group),
            )
    return tuple(found.values())


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
        id(own_parameter(one)) for one in model.modules() if isinstance(one, _EMBEDDINGS)
    }
    trained = {id(one) for one in optimizer.parameters(*optimizer.members) if one.requires_grad}
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
    named = {name: f"{name} ({len(one)} × {one.shape[1]})" for name, one in matrices.items()}
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
    settings = ((key, _as_number(one)) for key, one in group.items() if key != "params")
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
    return tuple(k for k, one in settings.items() if k not in NO_NUMBERS and type(one) is not bool)


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
