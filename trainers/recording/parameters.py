"""Which parameter of a model is meant, who trains it, and which module unembeds with it."""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.optim import Optimizer

from trajstore.errors import RecordingError
from trajstore.trainers.recording.torch_internals import name_outside_compile, uncompiled

__all__ = ["RecordedParameter", "find_parameters", "group_of", "unwrap"]


@dataclass(frozen=True, kw_only=True, eq=False)
class RecordedParameter:
    """A matrix whose history is recorded, one row per token.

    Attributes
    ----------
    name : str
        First of its names in the model: tied weights are one parameter.
    tensor : Parameter, (token, hidden)
    head : Module or None
        What multiplies hidden states by it to make logits.
    group : dict
        Parameter group of the optimizer that it is in, with its learning rate.
    """

    name: str
    tensor: torch.nn.Parameter
    head: torch.nn.Module | None
    group: dict[str, Any]


def unwrap(model: torch.nn.Module) -> torch.nn.Module:
    """Model inside `torch.compile`, `DistributedDataParallel` and the like."""
    while True:
        inner = uncompiled(model)
        if isinstance(inner, torch.nn.parallel.DistributedDataParallel):
            inner = inner.module
        if inner is model:
            return model
        model = inner


def find_parameters(
    model: torch.nn.Module, optimizer: Optimizer, names: str | Sequence[str] | None
) -> tuple[RecordedParameter, ...]:
    """Parameters by name, each matrix once.

    Parameters
    ----------
    model : Module
        Wrapped or not.
    optimizer : Optimizer
        That trains them.
    names : str or sequence of str, optional
        As `named_parameters` has them, any name of a tied weight. Without it: the weight of the
        model's output embeddings.

    Raises
    ------
    RecordingError
        If there is none of that name (the message lists close ones), it is frozen, no matrix, or
        not the optimizer's.
    """
    inner = unwrap(model)
    there = dict(inner.named_parameters(remove_duplicate=False))
    if names is None:
        names = [_default_name(inner, there)]
    elif isinstance(names, str):
        names = [names]
    found: dict[int, RecordedParameter] = {}
    for asked in names:
        name = name_outside_compile(asked).removeprefix("module.")
        if name not in there:
            raise RecordingError(
                f"{type(inner).__name__} has no parameter {asked!r}; {_suggestion(name, there)}"
            )
        tensor = there[name]
        _check_recordable(asked, tensor)
        if id(tensor) not in found:
            first = next(key for key, value in there.items() if value is tensor)
            found[id(tensor)] = RecordedParameter(
                name=first,
                tensor=tensor,
                head=_head(inner, tensor),
                group=group_of(optimizer, tensor, first),
            )
    return tuple(found.values())


def _check_recordable(name: str, tensor: torch.nn.Parameter) -> None:
    if tensor.ndim != 2:
        raise RecordingError(
            f"{name} has shape {tuple(tensor.shape)}; a matrix (token, hidden) can be recorded"
        )
    if not tensor.requires_grad:
        raise RecordingError(
            f"{name} is frozen (requires_grad is False), so nothing would move; unfreeze it "
            "or record another parameter"
        )


def _default_name(model: torch.nn.Module, there: dict[str, torch.nn.Parameter]) -> str:
    head = getattr(model, "get_output_embeddings", lambda: None)()
    weight = getattr(head, "weight", None)
    for name, tensor in there.items():
        if tensor is weight:
            return name
    raise RecordingError(
        f"{type(model).__name__} does not tell which of its parameters is the unembedding; name "
        f"one with parameter=…: {_matrices(there)}"
    )


def _suggestion(name: str, there: dict[str, torch.nn.Parameter]) -> str:
    close = difflib.get_close_matches(name, there, n=5, cutoff=0.5)
    close += [key for key in there if key.split(".")[-2:] == name.split(".")[-2:]]
    if close:
        return f"did you mean {' or '.join(dict.fromkeys(close))}?"
    return f"there are {_matrices(there)}"


def _matrices(there: dict[str, torch.nn.Parameter]) -> str:
    names = [name for name, tensor in there.items() if tensor.ndim == 2]
    listed = ", ".join(names[:12])
    return f"{listed} and {len(names) - 12} more" if len(names) > 12 else listed or "no matrices"


def _head(model: torch.nn.Module, weight: torch.nn.Parameter) -> torch.nn.Module | None:
    for module in model.modules():
        if isinstance(module, torch.nn.Embedding | torch.nn.EmbeddingBag):
            continue
        if any(tensor is weight for tensor in module.parameters(recurse=False)):
            return module
    return None


def group_of(optimizer: Optimizer, weight: torch.nn.Parameter, name: str) -> dict[str, Any]:
    """Group of the optimizer that trains a parameter.

    Raises
    ------
    RecordingError
        If there is none.
    """
    for group in optimizer.param_groups:
        if any(tensor is weight for tensor in group["params"]):
            return group
    raise RecordingError(f"{name} is not among the parameters that the optimizer trains")
