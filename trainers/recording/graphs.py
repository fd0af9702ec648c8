"""Walks through autograd's graphs, from what a pass differentiates.

Three loops need them. Accumulation divides each loss by a number: is their sum a mean? A loop may
multiply its loss by a scaler's factor, whose marks stand on nodes. And a value that the loop
observes belongs to the pass whose root follows from it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

from trajstore.trainers.recording.tape import Observed, Root
from trajstore.trainers.recording.torch_internals import factor_of, scale_of

_SCALE = "trajstore.scale"
"""Key of the metadata of a node: the factor of a gradient scaler that it has multiplied by."""

_LOSS_OF = "trajstore.loss_of"
"""Key of the metadata of a node: the model's loss that it has computed, and as which output."""

_SHARE = "trajstore.share"
"""Key of the metadata of a node: it has divided by a number of items of the whole step."""

_SOURCE = "trajstore.source"
"""Key of the metadata of a node: an object that stands for it after its graph has gone."""

_OBSERVED = "trajstore.observed"
"""Key of the metadata of a node: the event of the loss that the loop has observed."""

_PASSED = "trajstore.passed"
"""Key of the metadata of a node: the root of the last pass through it."""

_KEEPING = ("Mul", "Div", "ToCopy", "Clone", "Alias", "View", "Reshape", "Squeeze", "Unsqueeze",
            "Mean", "Sum", "Identity", "_DDPSink")  # fmt: skip
"""Beginnings of the names of nodes that multiply a loss by a number, at most."""

_JOINING = (*_KEEPING, "Add", "Stack", "Cat")
_LONGEST_WAY = 32  # nodes from the root of a pass


def mark_scaled(tensors: Any, scaler: torch.amp.GradScaler) -> None:
    """Remember that a gradient scaler has multiplied tensors by its factor."""
    scale = scale_of(scaler)
    for tensor in tensors_of(tensors):
        if tensor.grad_fn is not None:
            _metadata(tensor.grad_fn)[_SCALE] = scale


def mark_loss(loss: torch.Tensor, *, is_share: bool) -> None:
    """Remember that a node has computed the loss of a model.

    It `is_share` if the model has divided it by a number of items of the whole step.
    """
    if loss.grad_fn is None:
        return
    if is_share:
        _metadata(loss.grad_fn)[_SHARE] = True
    else:
        _metadata(loss.grad_fn)[_LOSS_OF] = number(loss), loss.output_nr


def mark_observed(event: Observed, loss: torch.Tensor) -> Root | None:
    """Let later passes through a loss find its event; return the root of one before."""
    if loss.grad_fn is None:
        return None
    metadata = _metadata(loss.grad_fn)
    metadata[_OBSERVED] = event
    root: Root | None = metadata.get(_PASSED)
    return root


def root_of(roots: Sequence[Any], factors: Sequence[torch.Tensor | None]) -> Root:
    """Copy what a pass differentiates, the sum of `roots`, before it frees the graph."""
    if any(not isinstance(root, torch.Tensor) or root.numel() != 1 for root in roots):
        return Root()
    values = [
        number(value) if factor is None else number(value, copy=False) * factor.detach().reshape(())
        for value, factor in zip(roots, factors, strict=True)
    ]
    root = Root(values[0] if len(values) == 1 else torch.stack(values).sum())
    _read(roots[0], root, is_single=len(roots) == 1)
    if root.scale is not None and root.value is not None:
        root.value = root.value / root.scale
    return root


def _read(value: torch.Tensor, root: Root, *, is_single: bool) -> None:
    """Fill a root with what the nodes of a value tell, and mark them."""
    for node, output in _walk(value):
        metadata, name = _metadata(node), node.name()
        if (observed := metadata.get(_OBSERVED)) is not None:
            observed.roots.append(root)
        metadata[_PASSED] = root
        root.is_share = root.is_share or _SHARE in metadata
        if root.scale is None:
            root.scale = metadata.get(_SCALE)
        if not is_single:
            continue
        root.source = metadata.setdefault(_SOURCE, object())  # below the numbers multiplied by
        loss, place = metadata.get(_LOSS_OF, (None, None))
        root.of_model = loss if place == output else None
        if not root.is_multiple and _SCALE not in metadata and name.startswith(("Div", "Mul")):
            root.is_multiple, factor = True, factor_of(node)
            root.divisor = 1 / factor if factor else 1.0
        inputs = sum(before is not None for before, _ in node.next_functions)
        is_single = root.of_model is None and name.startswith(_KEEPING) and inputs == 1


def _walk(value: torch.Tensor) -> Iterator[tuple[torch.autograd.graph.Node, int]]:
    """Yield the nodes that add values or multiply them by a number, and the first ones below.

    Each with the number of its output that leads to the value.
    """
    nodes, visited = [(value.grad_fn, value.output_nr)], 0
    while nodes and visited < _LONGEST_WAY:
        (node, output), visited = nodes.pop(0), visited + 1
        if node is not None:
            yield node, output
            if node.name().startswith(_JOINING):
                nodes += node.next_functions


def _metadata(node: torch.autograd.graph.Node) -> dict[str, Any]:
    """Return the values that belong to a node of a graph, which end with it."""
    return node.metadata  # type: ignore[return-value]


def number(value: torch.Tensor, *, copy: bool = True) -> torch.Tensor:
    """Return a copy, which the loop cannot change, in float32 at least: 16 bits round a mean."""
    dtype = torch.promote_types(value.dtype, torch.float32)
    return value.detach().reshape(()).to(dtype, copy=copy)


def tensors_of(output: Any) -> list[torch.Tensor]:
    """Return the tensors of a module's output: alone, or in mappings and sequences."""
    if isinstance(output, torch.Tensor):
        return [output]
    if isinstance(output, Mapping):
        output = output.values()
    elif hasattr(output, "__dataclass_fields__"):
        output = vars(output).values()
    elif not isinstance(output, tuple | list):
        return []
    return [tensor for part in output for tensor in tensors_of(part)]
