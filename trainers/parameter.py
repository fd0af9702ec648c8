"""Which parameter of a model is meant, and which module unembeds with it."""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from trajstore.errors import RecordingError

__all__ = ["RecordedParameter", "find_parameters", "unwrap"]


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
    """

    name: str
    tensor: torch.nn.Parameter
    head: torch.nn.Module | None


def unwrap(model: torch.nn.Module) -> torch.nn.Module:
    """Model inside `torch.compile`, `DistributedDataParallel` and the like."""
    while True:
        if hasattr(model, "_orig_mod"):
            model = model._orig_mod
        elif isinstance(model, torch.nn.parallel.DistributedDataParallel):
            model = model.module
        else:
            return model


def find_parameters(
    model: torch.nn.Module, names: str | Sequence[str] | None
) -> tuple[RecordedParameter, ...]:
    """Parameters by name, each matrix once.

    Parameters
    ----------
    model : Module
        Wrapped or not.
    names : str or sequence of str, optional
        As `named_parameters` has them, any name of a tied weight. Without it: the weight of the
        model's output embeddings.

    Raises
    ------
    RecordingError
        If there is none of that name (the message lists close ones), it is frozen, or no matrix.
    """
    inner = unwrap(model)
    there = dict(inner.named_parameters(remove_duplicate=False))
    if names is None:
        names = [_default_name(inner, there)]
    elif isinstance(names, str):
        names = [names]
    found: dict[int, RecordedParameter] = {}
    for asked in names:
        name = asked.replace("_orig_mod.", "").removeprefix("module.")
        if name not in there:
            raise RecordingError(
                f"{type(inner).__name__} has no parameter {asked!r}; {_suggestion(name, there)}"
            )
        tensor = there[name]
        if tensor.ndim != 2:
            raise RecordingError(
                f"{asked} has shape {tuple(tensor.shape)}; a matrix (token, hidden) can be recorded"
            )
        if not tensor.requires_grad:
            raise RecordingError(
                f"{asked} is frozen (requires_grad is False), so nothing would move; unfreeze it "
                "or record another parameter"
            )
        if id(tensor) not in found:
            first = next(key for key, value in there.items() if value is tensor)
            found[id(tensor)] = RecordedParameter(
                name=first, tensor=tensor, head=_head(inner, tensor)
            )
    return tuple(found.values())


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
