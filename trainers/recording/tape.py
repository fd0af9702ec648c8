"""The tape of a step: what the listeners have seen, in its order, for the verdict to read.

Gradients are known by their tensors and the versions of these, so unchanged ones are recognized
without a read. The passes of a step are a chain: each names the one into whose gradients it
accumulated. Discarded passes fall out by themselves.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence, Set
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeVar

import torch
from torch.optim import Optimizer

from trajstore.trainers.recording.torch_internals import counts_versions, version, versions

OLD = "gradients of the step before"
PUT = "gradients that the loop has put there"


class Mark(NamedTuple):
    """A gradient tensor at a moment."""

    gradient: weakref.ref[torch.Tensor]
    version: int

    @classmethod
    def of(cls, gradient: torch.Tensor | None) -> Mark | None:
        """Return the mark of a gradient now; None for no gradient."""
        return None if gradient is None else cls(weakref.ref(gradient), version(gradient))

    def is_tensor(self, gradient: torch.Tensor | None) -> bool:
        """Return True if a gradient is this tensor, whether it has changed or not."""
        return gradient is not None and self.gradient() is gradient

    def is_still(self, gradient: torch.Tensor | None) -> bool:
        """Return True if a gradient is this tensor, and has not changed."""
        if gradient is None or self.gradient() is not gradient:
            return False
        return version(gradient) == self.version and counts_versions()


Marks = Sequence[Mark | None]
"""Of the gradients of the recorded matrices, in their order."""


def same(a: Mark | None, b: Mark | None) -> bool:
    """Return True if two marks are of one tensor in one version, or both of no gradient."""
    if a is None or b is None:
        return a is b
    return a.version == b.version and a.gradient is b.gradient  # a tensor has one weak reference


class Moment:
    """All gradients at a moment, those of the listed parameters. It keeps none of them alive."""

    __slots__ = ("_references", "_versions", "are_none")

    def __init__(self, gradients: Sequence[torch.Tensor | None]) -> None:
        self._references = [None if g is None else weakref.ref(g) for g in gradients]
        self.are_none = not any(self._references)  # as after `zero_grad`
        self._versions = [] if self.are_none else versions(gradients)

    def mark(self, place: int) -> Mark | None:
        """Return the gradient of one parameter; None if it had none."""
        reference = self._references[place]
        return None if reference is None else Mark(reference, self._versions[place])

    def changed(self, gradients: Sequence[torch.Tensor | None]) -> frozenset[int]:
        """Return the places of present gradients that are others, or have changed since."""
        if self.are_none:
            return frozenset([n for n, gradient in enumerate(gradients) if gradient is not None])
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
        return len(gradients) == len(self._references) and all(
            gradient is None if reference is None else gradient is reference() is not None
            for reference, gradient in zip(self._references, gradients, strict=True)
        )


@dataclass(slots=True, eq=False)
class Root:
    """What a pass differentiates.

    Attributes
    ----------
    value : tensor, () or None
        A copy, without the factor of a scaler; None if it is not one number.
    scale : tensor, () or None
        Factor of a gradient scaler in it.
    divisor : float
        Number by which the loop has divided it last, if a number on the CPU tells it; otherwise 1.
    is_multiple : bool
        True if the loop has divided or multiplied it.
    of_model : tensor, () or None
        Loss that the model has returned, if the value is a multiple of it.
    source : object or None
        Equal in two passes if they differentiate multiples of one value.
    is_share : bool
        True if the model has divided it by a number of items of the whole step.
    """

    value: torch.Tensor | None = None
    scale: torch.Tensor | None = None
    divisor: float = 1.0
    is_multiple: bool = False
    of_model: torch.Tensor | None = None
    source: object = None
    is_share: bool = False


@dataclass(slots=True, eq=False)
class Backward:
    """A pass has left its gradients.

    Attributes
    ----------
    base : Backward or str or None
        The pass into whose gradients it accumulated, `OLD`, `PUT` or None.
    reached : set of int
        Places of the parameters whose gradients it has changed.
    witness : int
        Place of the parameter whose gradient tells at first what becomes of the pass.
    moment : Moment
    marks : Marks
    norm : tensor, () or float or None
        NaN between the steps of several optimizers.
    forwards : list
        Forward passes that it went through.
    is_inside : bool
        True in a step, as of a closure.
    """

    root: Root
    base: Any
    reached: Set[int]
    witness: int
    moment: Moment
    marks: Marks
    norm: torch.Tensor | float | None
    forwards: list[Any]
    is_inside: bool


@dataclass(slots=True, eq=False)
class Gradients:
    """`torch.autograd.grad` has returned `results`."""

    root: Root
    results: list[Mark]
    forwards: list[Any]


@dataclass(slots=True, eq=False)
class Assigned:
    """Gradients were found that no pass of the step has left. `origin`: Gradients, `OLD`, None."""

    origin: Any
    moment: Moment
    marks: Marks
    norm: torch.Tensor | float | None


@dataclass(slots=True, eq=False)
class Unscale:
    """A scaler has divided the gradients of an optimizer.

    Attributes
    ----------
    optimizer : Optimizer
    were_still : sequence of bool
        Of the matrices: False if the loop had changed the gradient.
    marks : Marks
    norm : tensor, () or float or None
        NaN if the loop had changed any.
    """

    optimizer: Optimizer
    were_still: Sequence[bool]
    marks: Marks
    norm: torch.Tensor | float | None


@dataclass(slots=True, eq=False)
class Clip:
    """A call of `clip_grad_norm_` has multiplied gradients."""

    max_norm: float
    total: torch.Tensor
    begins: Marks
    ends: Marks


@dataclass(slots=True, eq=False)
class Begin:
    """A step of an optimizer begins; the last one is the innermost.

    Attributes
    ----------
    marks : Marks
    rates : list
        Settings and rate of each group.
    base : Backward or str or None
        Pass whose gradients are there.
    norm : tensor, () or None
        If the gradients are other tensors than those that were taken.
    """

    optimizer: Optimizer
    marks: Marks
    rates: list[Any]
    base: Any
    norm: torch.Tensor | None = None


@dataclass(slots=True, eq=False)
class End:
    """A step of an optimizer has ended, before other hooks can change anything. See `Begin`."""

    optimizer: Optimizer
    marks: Marks
    rates: list[Any]
    norm: torch.Tensor | None = None


@dataclass(slots=True, eq=False)
class Void:
    """A call of `step` has changed nothing."""


@dataclass(slots=True, eq=False)
class Observed:
    """The loop has passed values of a micro-batch.

    Attributes
    ----------
    number : int
        Number of the first forward pass after it.
    loss : tensor, () or None
    is_quotient : bool
        True if the loop has divided the loss.
    deliver : dict of str to callable
        Called if the step uses the values; by their names.
    roots : list of Root
        Those of the passes through the loss, as far as its graph tells.
    """

    number: int
    loss: torch.Tensor | None
    is_quotient: bool
    deliver: dict[str, Callable[[], None]]
    roots: list[Root] = field(default_factory=list)


_KEPT = 4  # discarded passes, which the loop may put back

Event = Backward | Gradients | Assigned | Unscale | Clip | Begin | End | Void | Observed
Kind = TypeVar("Kind", bound=Event)


@dataclass(slots=True, eq=False)
class Tape:
    """The story of a step, and the copies made for it.

    Attributes
    ----------
    events : list of Event
    forgotten : int
        Number of discarded passes that the tape does not hold any more.
    used : dict of int to tensor
        Used gradients, by the number of the matrix, if their bits are not those of the raw ones.
    has_closure : bool
        True if the optimizer was called with one.
    has_reached : bool
        True if the step of an optimizer of torch has run.
    """

    events: list[Event] = field(default_factory=list)
    forgotten: int = 0
    used: dict[int, torch.Tensor] = field(default_factory=dict)
    has_closure: bool = False
    has_reached: bool = True

    def last(self, kind: type[Kind]) -> Kind | None:
        """Return the last event of a kind."""
        for event in reversed(self.events):
            if type(event) is kind:
                return event
        return None

    def all(self, kind: type[Kind]) -> list[Kind]:
        """Return all events of a kind."""
        return [event for event in self.events if type(event) is kind]

    def turn_of(self, optimizer: Optimizer | None) -> tuple[Begin | None, End | None]:
        """Return the last begin and the first end of an optimizer's step: the innermost ones.

        None is any optimizer.
        """
        begin = end = None
        for event in self.events:
            if isinstance(event, Begin) and optimizer in (event.optimizer, None):
                begin = event
            elif isinstance(event, End) and optimizer in (event.optimizer, None) and end is None:
                end = event  # the first one: outer ones follow
        return begin, end

    def drops(self, source: Any) -> bool:
        """Return True if the step has passes that are not in the gradient of an event."""
        used, _ = chain(source)
        return self.forgotten > 0 or any(event not in used for event in self.all(Backward))

    def forget(self, base: Any) -> None:
        """Forget the first discarded passes, if there are many; `base` is the last one in use."""
        used, _ = chain(base)
        for kind in (Backward, Gradients):
            idle = [event for event in self.all(kind) if event not in used]
            for event in idle[:-_KEPT]:
                self.events.remove(event)
                self.forgotten += 1


def chain(event: Any) -> tuple[list[Backward], Any]:
    """Return the passes whose gradients are in that of an event, the last one first, and a rest."""
    passes = []
    while isinstance(event, Backward):
        passes.append(event)
        event = event.base
    return passes, event
