"""The recorded parameters of a model, their optimizer groups and their unembedding modules."""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.optim import Optimizer

from trajstore.errors import RecordingError
from trajstore.trainers.recording.joined_optimizer import JoinedOptimizer
from trajstore.trainers.recording.torch_internals import name_outside_compile, uncompiled


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
    model: torch.nn.Module, optimizer: JoinedOptimizer, names: str | Sequence[str] | None
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
        output embeddings.

    Raises
    ------
    RecordingError
        If there is no such name (the message lists similar ones), or if the parameter has
        requires_grad=False, is not a matrix, or is missing in the optimizer.
    """
    inner = unwrap(model)
    by_name = dict(inner.named_parameters(remove_duplicate=False))
    if names is None:
        names = [_default_name(inner, by_name)]
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


def _default_name(model: torch.nn.Module, by_name: dict[str, torch.nn.Parameter]) -> str:
    head = getattr(model, "get_output_embeddings", lambda: None)()
    weight = getattr(head, "weight", None)
    for name, tensor in by_name.items():
        if tensor is weight:
            return name
    raise RecordingError(
        f"{type(model).__name__} has no get_output_embeddings() with a parameter; name the matrix "
        f"with parameter=…: {_matrices(by_name)}"
    )


def _suggestion(name: str, by_name: dict[str, torch.nn.Parameter]) -> str:
    close = difflib.get_close_matches(name, by_name, n=5, cutoff=0.5)
    close += [key for key in by_name if key.split(".")[-2:] == name.split(".")[-2:]]
    if close:
        return f"did you mean {' or '.join(dict.fromkeys(close))}?"
    return f"choose from {_matrices(by_name)}"


def _matrices(by_name: dict[str, torch.nn.Parameter]) -> str:
    names = [name for name, tensor in by_name.items() if tensor.ndim == 2]
    listed = ", ".join(names[:12])
    return f"{listed} and {len(names) - 12} more" if len(names) > 12 else listed or "no matrices"


def _head(model: torch.nn.Module, weight: torch.nn.Parameter) -> torch.nn.Module | None:
    for module in model.modules():
        if isinstance(module, torch.nn.Embedding | torch.nn.EmbeddingBag):
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
        return torch.tensor(number, dtype=torch.float64)
    number = number.detach()
    return (number.cpu() if number.device.type == "mps" else number).to(torch.float64, copy=True)


def rate_of(group: Mapping[str, Any]) -> torch.Tensor | None:
    """Return the learning rate of a group, float64 of shape (); None if it is not one number."""
    rate = group.get("lr")
    if isinstance(rate, torch.Tensor):
        return as_float64(rate).reshape(()) if rate.numel() == 1 else None
    return as_float64(rate) if isinstance(rate, int | float) else None
