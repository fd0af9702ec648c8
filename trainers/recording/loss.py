"""The verdict about the loss of a step, and about the passes that it used."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from typing import Any, NamedTuple

import torch

from trajstore.trainers.recording.gradient import Gradient
from trajstore.trainers.recording.tape import (
    OLD,
    PUT,
    Assigned,
    Backward,
    Gradients,
    Observed,
    Root,
    Tape,
    Unscale,
    chain,
)

_OLD = (
    "a backward pass accumulated into the gradient of the step before; loss is that of the new "
    "passes"
)
_SUM = (
    "loss is the sum of what {count} backward passes of a step differentiated; for their mean, "
    "pass each loss with observe(loss=…)"
)
_DIVIDED = (
    "observe(loss=…) got several quotients in a step; their mean is recorded. If each is loss / "
    "accumulation, this is too small: pass the loss before the division"
)
_SAME_FACTOR = 1e-2  # the quotients of losses of 16 bits differ by their rounding


class Used(NamedTuple):
    """The passes that a step has used.

    Attributes
    ----------
    backwards : list of Backward
        In the order of the tape.
    rest : list
        Where their chains begin: None, `OLD` or `PUT`.
    forwards : list
        Forward passes that they went through.
    roots : list of Root
    """

    backwards: list[Backward]
    rest: list[Any]
    forwards: list[Any]
    roots: list[Root]


def used_passes(tape: Tape, gradients: Sequence[Gradient]) -> Used:
    """Return the passes in the gradients of the matrices."""
    sources = [gradient.source for gradient in gradients] or [tape.last(Backward)]
    chains = [chain(source) for source in sources]
    backwards = list(dict.fromkeys(event for passes, _ in chains for event in reversed(passes)))
    forwards = [forward for event in backwards for forward in event.forwards]
    roots = [event.root for event in backwards]
    if not backwards:
        calls = [s.origin for s in sources if isinstance(getattr(s, "origin", None), Gradients)]
        calls = calls or tape.all(Gradients)
        by_number = {forward.number: forward for call in calls for forward in call.forwards}
        forwards = [*by_number.values()]
        roots = [call.root for call in calls]
        if len(forwards) > 1 and len({*map(id, calls)}) > 1:
            forwards = []  # of one of them
    return Used(backwards, [rest for _, rest in chains], forwards, roots)


def observed_values(
    tape: Tape, used: Used, watched: set[int], first: int, end: int
) -> list[Observed]:
    """Return the observations of the used passes.

    By the graph of an observed loss, else by the forward passes before an observation, else by its
    place among the backward passes.

    Parameters
    ----------
    tape : Tape
    used : Used
    watched : set of int
        Forward passes whose use a backward pass tells, by their numbers.
    first, end : int
        Numbers of the first forward pass of the step, and after its last one.
    """
    events = [e for e in tape.events if isinstance(e, Observed | Backward)]
    observations = [event for event in events if isinstance(event, Observed)]
    of_calls = [forward for call in tape.all(Gradients) for forward in call.forwards]
    numbers_used = {forward.number for forward in (*used.forwards, *of_calls)}
    bounds = [first, *(event.number for event in observations), end]
    chosen = []
    for event, before, after in zip(observations, bounds, bounds[2:], strict=False):
        own = watched.intersection(range(before, event.number) or range(event.number, after))
        if event.roots and used.roots:
            is_used = any(root in used.roots for root in event.roots)
        elif numbers_used and own:
            is_used = not own.isdisjoint(numbers_used)
        else:
            is_used = _is_next_to_use(events, event, used.backwards)
        if is_used:
            chosen.append(event)
    return chosen


def _is_next_to_use(
    events: Sequence[Any], observation: Observed, used: Collection[Backward]
) -> bool:
    """Return True if the backward pass after an observation is used, or that before it.

    It is that before it in a loop that observes after the backward pass.
    """
    place, near = events.index(observation), []
    after = isinstance(events[0], Backward)
    for event in reversed(events[:place]) if after else events[place + 1 :]:
        if isinstance(event, Observed):
            break
        near.append(event)
    backwards = [event for event in events if isinstance(event, Backward)]
    if not near:  # a pass for each, in another order, or none that was seen
        return not backwards or len(events) <= 2 * len(backwards)
    return any(event in used for event in near)


def loss_of_step(
    tape: Tape, used: Used, gradients: Sequence[Gradient], observed: Sequence[Observed]
) -> tuple[torch.Tensor | None, tuple[str, ...]]:
    """Return the loss of a step, and doubts.

    It is the mean of the observed losses; or else the mean of the losses that the model returned,
    if each used pass differentiates a multiple of one, all with the same factor; or else the sum of
    the values of the used passes. Those that differentiate one value for different parameters count
    once.

    Returns
    -------
    loss : tensor, (), or None
        None if the used gradient is not known to be that of one number.
    doubts : tuple of str
    """
    sources = [gradient.source for gradient in gradients]
    unknown = [gradient.source for gradient in gradients if not gradient.is_known]
    is_unknown = any(map(tape.drops, unknown)) or (unknown and tape.last(Gradients))
    losses = [event.loss for event in observed if event.loss is not None]
    all_losses = [event for event in tape.all(Observed) if event.loss is not None]
    if losses and (len(losses) == len(all_losses) or not is_unknown):
        are_quotients = len(losses) > 1 and all(e.is_quotient for e in observed if e in all_losses)
        mean = losses[0] if len(losses) == 1 else torch.stack(losses).mean()
        return mean, (_DIVIDED,) * are_quotients
    if PUT in used.rest or any(map(_is_again, sources)) or is_unknown:
        return None, ()
    if not used.backwards:
        return _of_assigned(tape, sources), ()
    roots = [event.root for event in used.backwards]
    by_hand = [r for r in roots if r.scale is None and r.is_multiple and r.of_model is None]
    if by_hand and tape.last(Unscale):
        return None, ()  # the loop has multiplied it as a scaler would
    counted: list[Backward] = []
    for event in used.backwards:
        twins = [c for c in counted if c.root.source is event.root.source is not None]
        if not twins or any(event.reached & twin.reached for twin in twins):
            counted.append(event)
    values = [event.root.value for event in counted]
    present = [value for value in values if value is not None]
    if len(present) < len(values):
        return None, ()
    doubts: tuple[str, ...] = (_OLD,) if OLD in used.rest else ()
    of_model = [event.root.of_model for event in counted if event.root.of_model is not None]
    if len(present) == 1:
        return (of_model or present)[0], doubts
    are_shares = all(e.root.is_share or _is_near(e.root.divisor, len(counted)) for e in counted)
    about_sum = (_SUM.format(count=len(counted)),)
    total = torch.stack(present).sum()
    are_apart = len({id(event.root.source) for event in counted}) == len(counted)
    if len(of_model) < len(present) or not are_apart:
        return total, doubts if are_shares else doubts + about_sum
    returned = torch.stack(of_model)
    factors = torch.stack(present) / returned
    # Also if a loss is NaN.
    are_alike = ~(factors.max() - factors.min() > _SAME_FACTOR * factors.abs().max())
    if are_alike.device.type == "cpu" and not are_alike:  # a device is not waited for
        doubts += about_sum
    return torch.where(are_alike, returned.mean(), total.to(returned.dtype)), doubts


def _of_assigned(tape: Tape, sources: Sequence[Any]) -> torch.Tensor | None:
    """Return the value that one call of `torch.autograd.grad` has differentiated."""
    origins = [s.origin for s in sources if isinstance(s, Assigned)]
    if len({*map(id, origins)}) == 1 and isinstance(origins[0], Gradients):
        return origins[0].root.value if not tape.last(Backward) else None
    return None


def _is_near(divisor: float, count: int) -> bool:
    return math.isclose(divisor, count, rel_tol=1e-6)


def _is_again(source: Any) -> bool:
    return isinstance(source, Assigned) and source.origin is OLD
