"""A forward and a backward pass of the loop: the value that it differentiates, and its gradients.

Nodes of autograd's graphs carry the loss of the model, and the factor of a gradient scaler, from
the forward pass to the backward pass.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

from trajstore.trainers.recording.torch_internals import (
    counts_versions,
    factor_of,
    scale_of,
    version,
    versions,
)

_LOSS_OF = "trajstore.loss_of"
"""Key of the metadata of a node: the model's loss that it has computed, and as which output."""

_SCALE = "trajstore.scale"
"""Key of the metadata of a node: the factor of a gradient scaler that it has multiplied by."""

_SOURCE = "trajstore.source"
"""Key of the metadata of a node: an object that stands for it after its graph has gone."""

_KEEPING = ("Mul", "Div", "ToCopy", "Clone", "Alias", "View", "Reshape", "Squeeze", "Unsqueeze",
            "Mean", "Sum", "Identity", "_DDPSink")  # fmt: skip
"""Beginnings of the names of nodes that multiply a loss by a number, at most."""

_JOINING = (*_KEEPING, "Add", "Stack", "Cat")
_SAME_FACTOR = 1e-2  # the quotients of losses of 16 bits differ by their rounding
_LONGEST_WAY = 32  # nodes from the root of a backward pass to the model's loss


class ForwardPass:
    """What the hooks of one forward pass have seen."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.head_calls = 0
        self.head_inputs = 0
        self.head_logits: torch.Tensor | None = None
        self.last_layer: torch.nn.Module | None = None
        self.last_node: torch.autograd.graph.Node | None = None
        self._kept: list[tuple[str, Callable[[], None]]] = []

    def keep(self, name: str, deliver: Callable[..., None], *values: Any) -> None:
        """Call a function with the values when the step ends, if the step uses this pass.

        That is left out if the loop has passed other values under the name.
        """
        self._kept.append((name, functools.partial(deliver, *values)))

    def deliver(self, observed: Set[str]) -> None:
        """Call the functions once; values from the loop are `observed` under some names."""
        kept, self._kept = self._kept, []
        for name, call in kept:
            if name not in observed:
                call()


@dataclass(eq=False)
class BackwardPass:
    """A backward pass of the loop that has reached the model.

    Attributes
    ----------
    root : tensor, () or None
        The differentiated value; None if it is not one number.
    scale : tensor, () or None
        Factor of a gradient scaler in it.
    loss : tensor, () or None
        Loss of the model that the root is, or a multiple of it.
    source : object or None
        Equal in two passes if they differentiate multiples of one value.
    is_quotient : bool
        True if the loop has divided or multiplied the value.
    quotient : float
        What the loop has multiplied it by last, if a number on the CPU tells it; otherwise 1.
    passes : list of ForwardPass
        All passes that it went through.
    is_dropped : bool
        True if the loop has discarded its gradients.
    reached : set of int
        Places, in the list of parameters, of those whose gradients it has changed.
    """

    root: torch.Tensor | None = None
    scale: torch.Tensor | None = None
    loss: torch.Tensor | None = None
    source: object = None
    is_quotient: bool = False
    quotient: float = 1.0
    passes: list[ForwardPass] = field(default_factory=list)
    is_dropped: bool = False
    reached: Set[int] = frozenset()

    @classmethod
    def of(cls, roots: Sequence[Any], factors: Sequence[torch.Tensor | None]) -> BackwardPass:
        """Return the pass that differentiates the sum of `roots`, each times its factor."""
        if any(not isinstance(root, torch.Tensor) or root.numel() != 1 for root in roots):
            return cls()
        values = [
            _number(root)
            if factor is None
            else _number(root, copy=False) * factor.detach().reshape(())
            for root, factor in zip(roots, factors, strict=True)
        ]
        value = values[0] if len(values) == 1 else torch.stack(values).sum()
        if len(roots) > 1:
            return cls(root=value, scale=_scale_of(roots[0]))
        node, output = roots[0].grad_fn, roots[0].output_nr
        is_quotient, quotient, loss = False, 1.0, None
        for _ in range(_LONGEST_WAY):
            if node is None or (loss := _loss_of(node, output)) is not None:
                break
            inputs = [edge for edge in node.next_functions if edge[0] is not None]
            if not node.name().startswith(_KEEPING) or len(inputs) != 1:
                break
            if _SCALE not in _metadata(node) and node.name().startswith(("Div", "Mul")):
                quotient = quotient if is_quotient else factor_of(node)
                is_quotient = True
            ((node, output),) = inputs
        source = None if node is None else _metadata(node).setdefault(_SOURCE, object())
        return cls(value, _scale_of(roots[0]), loss, source, is_quotient, quotient)

    def drop(self) -> None:
        """Release all values: the loop has discarded the gradients."""
        self.is_dropped = True
        self.root = self.scale = self.loss = self.source = None
        self.passes, self.reached = [], frozenset()

    @property
    def value(self) -> torch.Tensor | None:
        """The root without the factor of a scaler."""
        return self.root if self.root is None or self.scale is None else self.root / self.scale


def mark_scaled(tensors: Any, scaler: torch.amp.GradScaler) -> None:
    """Remember that a gradient scaler has multiplied tensors by its factor."""
    scale = scale_of(scaler)
    for tensor in tensors_of(tensors):
        if tensor.grad_fn is not None:
            _metadata(tensor.grad_fn)[_SCALE] = scale


def _scale_of(root: torch.Tensor) -> torch.Tensor | None:
    """Return the factor of a gradient scaler in a value, or in the parts of a sum."""
    nodes, visited = [root.grad_fn], 0
    while nodes and visited < _LONGEST_WAY:
        node, visited = nodes.pop(0), visited + 1
        if node is None:
            continue
        if _SCALE in _metadata(node):
            scale: torch.Tensor = _metadata(node)[_SCALE]
            return scale
        if node.name().startswith(_JOINING):
            nodes += [before for before, _ in node.next_functions]
    return None


def _metadata(node: torch.autograd.graph.Node) -> dict[str, Any]:
    """Return the values that belong to a node of a graph, which end with it."""
    return node.metadata  # type: ignore[return-value]


def mark_loss(loss: torch.Tensor) -> None:
    """Remember that a node has computed the loss of the model."""
    if loss.grad_fn is not None:
        _metadata(loss.grad_fn)[_LOSS_OF] = _number(loss), loss.output_nr


def _loss_of(node: torch.autograd.graph.Node, output: int) -> torch.Tensor | None:
    """Return the model's loss that a node has computed as one of its outputs."""
    loss, number = _metadata(node).get(_LOSS_OF, (None, None))
    return loss if number == output else None


def _number(value: torch.Tensor, *, copy: bool = True) -> torch.Tensor:
    """Return a copy, which the loop cannot change, in float32 at least: 16 bits round a mean."""
    dtype = torch.promote_types(value.dtype, torch.float32)
    return value.detach().reshape(()).to(dtype, copy=copy)


class StepLoss:
    """Loss of a step from those of its micro-batches, float32 or float64.

    Attributes
    ----------
    summands : int
        Number of values in the sum that was returned last; 0 if it was no sum.
    """

    def __init__(self) -> None:
        self.summands = 0
        self._observed: list[torch.Tensor] = []
        self._quotients = 0

    def observed(self, loss: torch.Tensor) -> Callable[[], None]:
        """Return a function that uses the loss of a micro-batch in place of the hooks'."""
        kept = _number(loss)
        is_quotient = loss.grad_fn is not None and loss.grad_fn.name() == "DivBackward0"

        def use() -> None:
            self._observed.append(kept)
            self._quotients += is_quotient

        return use

    @property
    def looks_divided(self) -> bool:
        """True if the loop gave several losses, each of them a quotient."""
        return len(self._observed) > 1 and self._quotients == len(self._observed)

    def value(self, backwards: Sequence[BackwardPass]) -> torch.Tensor | None:
        """Return the loss of the current step; None if it is not known.

        It is the mean of the observed losses. Otherwise it is the mean of the model's losses, if
        each backward pass differentiated one of them, all with the same factor. Otherwise it is the
        sum of the roots: the recorded gradient is the gradient of this sum. Passes that
        differentiate one value for different parameters count once.
        """
        if self._observed:
            return _mean(self._observed)
        counted: list[BackwardPass] = []
        for backward in backwards:
            same = [other for other in counted if other.source is backward.source is not None]
            if not same or any(backward.reached & other.reached for other in same):
                counted.append(backward)
        roots = [value for backward in counted if (value := backward.value) is not None]
        if not roots or len(roots) < len(counted):
            return None
        losses = [backward.loss for backward in counted if backward.loss is not None]
        if len(losses) == len(roots) == 1:
            return losses[0]
        total = roots[0] if len(roots) == 1 else torch.stack(roots).sum()
        if len(losses) < len(roots):
            quotients = {backward.quotient for backward in counted}  # a mean has divided all alike
            if len(roots) > 1 and (len(quotients) > 1 or not all(b.is_quotient for b in counted)):
                self.summands = len(roots)
            return total
        factors = torch.stack(roots) / torch.stack(losses)
        # Also if a loss is NaN.
        same_factor = ~(factors.max() - factors.min() > _SAME_FACTOR * factors.abs().max())
        if same_factor.device.type == "cpu" and not same_factor:  # a device is not waited for
            self.summands = len(roots)
        return torch.where(same_factor, _mean(losses), total.to(losses[0].dtype))


def _mean(losses: list[torch.Tensor]) -> torch.Tensor:
    return losses[0] if len(losses) == 1 else torch.stack(losses).mean()


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


class Mark(NamedTuple):
    """A gradient tensor at a moment."""

    gradient: weakref.ref[torch.Tensor]
    version: int

    @classmethod
    def of(cls, gradient: torch.Tensor) -> Mark:
        """Return the mark of a gradient now."""
        return cls(weakref.ref(gradient), version(gradient))

    def is_still(self, gradient: torch.Tensor | None) -> bool:
        """Return True if a gradient is this tensor, and has not changed."""
        if gradient is None or not self.is_tensor(gradient):
            return False
        return counts_versions() and version(gradient) == self.version

    def is_tensor(self, gradient: torch.Tensor | None) -> bool:
        """Return True if a gradient is this tensor, whether it has changed or not."""
        return self.gradient() is gradient


class Moment:
    """All gradients at a moment. It keeps none of them alive.

    Parameters
    ----------
    places : dict of tensor to int
        Place of each parameter in the list of gradients.
    gradients : sequence of tensor or None
    """

    __slots__ = ("_are_none", "_places", "_references", "_versions")

    def __init__(
        self, places: dict[torch.Tensor, int], gradients: Sequence[torch.Tensor | None]
    ) -> None:
        self._places = places
        self._references = [None if g is None else weakref.ref(g) for g in gradients]
        self._are_none = not any(self._references)  # as after `zero_grad`
        self._versions = [-1] * len(gradients) if self._are_none else versions(gradients)

    def mark(self, parameter: torch.Tensor) -> Mark | None:
        """Return the gradient of one parameter; None if it had none."""
        place = self._places.get(parameter, -1)
        reference = None if place < 0 else self._references[place]
        return None if reference is None else Mark(reference, self._versions[place])

    def keep(self, parameters: Set[torch.Tensor], before: Moment) -> None:
        """Take the gradients of some parameters from another moment, if it has them."""
        for parameter in parameters:
            mark, place = before.mark(parameter), self._places.get(parameter)
            if mark is not None and place is not None and self._references[place] is not None:
                self._references[place], self._versions[place] = mark

    def changed(self, gradients: Sequence[torch.Tensor | None]) -> frozenset[int]:
        """Return the places of present gradients that are others, or have changed since."""
        if self._are_none:
            return frozenset(
                [place for place, gradient in enumerate(gradients) if gradient is not None]
            )
        counts = counts_versions()
        marks = zip(self._references, self._versions, gradients, versions(gradients), strict=True)
        return frozenset(
            place
            for place, (reference, before, gradient, now) in enumerate(marks)
            if gradient is not None
            and not (counts and reference is not None and reference() is gradient and before == now)
        )

    def are_tensors(self, gradients: Sequence[torch.Tensor | None]) -> bool:
        """Return True if the gradients are the same tensors, whether they have changed or not."""
        if len(gradients) != len(self._references):
            return False
        return all(
            gradient is None if reference is None else gradient is reference() is not None
            for reference, gradient in zip(self._references, gradients, strict=True)
        )
