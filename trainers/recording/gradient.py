"""The verdict about a gradient: what `grad`, `clip_coef` and `grad_norm` of a step are.

`grad` times `clip_coef` is the gradient that the innermost step got, in every bit; or `grad` is
that gradient itself, and `clip_coef` is NaN, with a doubt.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch

from trajstore.trainers.recording.device_to_host import bits_of, same_bits
from trajstore.trainers.recording.sharding import agreed, is_sharded, whole
from trajstore.trainers.recording.tape import (
    Assigned,
    Backward,
    Begin,
    Clip,
    End,
    Mark,
    Tape,
    Unscale,
    Void,
    same,
)

CHANGED = (
    "the gradient of {name} was changed or zeroed between the backward pass and the optimizer's "
    "update, and not by one factor; grad is what the optimizer got, clip_coef is NaN"
)
_UNSEEN = (
    "the gradient of {name} changed between the backward pass and the optimizer's update; without "
    "grad, only the factor of clip_grad_norm_ is known, so clip_coef is NaN"
)
_INSIDE = (
    "the gradient of {name} changed or was removed while optimizer.step() ran; grad is that at the "
    "beginning of step(), clip_coef is NaN"
)
_KEPT = (
    "calls of optimizer.step() before may have kept gradients of {name} without a change of "
    "parameters; what the step used is not known, so grad, clip_coef and loss are NaN"
)
_NORM = (
    "gradients were removed, replaced, or changed while they were scaled, before the optimizer's "
    "step, or are of a pass between the steps of several; grad_norm is NaN"
)
_FOREIGN = (
    "the gradient of {name} in a step is not that of a backward pass that ended before the step, "
    "or was changed while it was scaled; grad is what the optimizer got; clipping before cannot be "
    "seen, so clip_coef and grad_norm are NaN"
)
SEVERAL = (
    "optimizer.step() differentiates the loss several times; loss, logits and grad are those of "
    "the first time, at the weights of the row before, and clip_coef is NaN"
)
Number = torch.Tensor | float | None


@dataclass(frozen=True, kw_only=True, eq=False)
class Gradient:
    """The verdict about the gradient of a matrix.

    Attributes
    ----------
    source : Event or str or None
        Event whose passes have left it; or `OLD`, `PUT`.
    coef : tensor or float
        ``clip_coef``.
    norm : tensor or float or None
        ``grad_norm``; None for no gradients.
    grad : tensor, (token, hidden), or None
        To be recorded in place of the raw copy.
    is_gone : bool
        True if no gradient is recorded.
    is_known : bool
        True if the used gradient is that of `source`, or a multiple.
    doubts : tuple of str
    are_products : tensor of bool, () or None
        On a device, whether a factor was found.
    """

    source: Any
    coef: torch.Tensor | float = math.nan
    norm: Number = None
    grad: torch.Tensor | None = None
    is_gone: bool = False
    is_known: bool = True
    doubts: tuple[str, ...] = ()
    are_products: torch.Tensor | None = None


def gradient(
    tape: Tape,
    number: int,
    parameter: torch.Tensor,
    raw: torch.Tensor | None,
    *,
    limit: float | None = None,
    skipped: bool = False,
    optimizer: Any = None,
    as_norm: Callable[[torch.Tensor], torch.Tensor] = torch.Tensor.detach,
) -> Gradient:
    """Read the gradient of a matrix, by its `number`, from the tape of a step.

    Parameters
    ----------
    tape : Tape
    number : int
    parameter : tensor
    raw : tensor or None
        Copy of the gradient that was taken last; None if it is not recorded.
    limit : float, optional
        Norm to which the loop says that it clips.
    skipped : bool
        True if a scaler has skipped the step.
    optimizer : Optimizer, optional
        That of the matrix.
    as_norm : callable
        Gives a factor the type in which it is stored.
    """
    found = [e for e in tape.events if isinstance(e, Backward | Assigned | Unscale)]
    found = [e for e in found if not isinstance(e, Unscale) or optimizer in (e.optimizer, None)]
    takes = [e for e in found if e.marks[number] is not None]
    last = takes[-1] if takes else None
    source = next((e for e in reversed(takes) if not isinstance(e, Unscale)), None)
    source = tape.last(Backward) if source is None else source
    norm: Number = next((e.norm for e in reversed(found) if e.norm is not None), None)
    begin, end = tape.turn_of(optimizer)
    read = Gradient(source=source, norm=norm, doubts=(_NORM,) * isinstance(norm, float))
    if skipped or begin is None:
        return replace(read, is_gone=last is None)
    inside = [e for e in tape.all(Backward) if e.is_inside]
    if any(later.base is None for later in inside[1:]):
        return replace(read, source=inside[0], norm=inside[0].norm, doubts=(SEVERAL,))
    if tape.last(Void) and not tape.has_reached and tape.drops(source):
        return replace(read, is_gone=True, is_known=False, doubts=(_KEPT,))
    used = end.marks[number] if tape.has_closure and end is not None else begin.marks[number]
    again = [e.norm for e in tape.events if isinstance(e, Begin | End) and e.norm is not None]
    if again:
        read = _with_norm_again(read, again[-1], parameter)
    if used is None:
        return replace(read, source=begin.base or source, is_gone=True)
    copy = tape.used.get(number)
    is_assigned = isinstance(last, Assigned) and last.origin is None
    is_changed = isinstance(last, Unscale) and not last.were_still[number]
    if last is None or is_assigned or is_changed:
        return replace(read, norm=math.nan, grad=copy, is_known=False, doubts=(_FOREIGN,))
    ends = None if end is None else end.marks[number]
    if not (tape.has_closure or tape.has_reached or same(ends, used)):
        return replace(read, grad=copy, doubts=(_INSIDE, *read.doubts))
    mark = last.marks[number]
    if copy is None and (raw is not None or same(mark, used)):
        return replace(read, coef=1.0)
    back = next((e for e in reversed(takes[:-1]) if same(used, e.marks[number])), None)
    if back is not None and not isinstance(back, Unscale) and not same(mark, used):
        back_again = replace(read, source=back, norm=back.norm, doubts=())
        if again and _with_norm_again(back_again, again[-1], parameter) is back_again:
            return replace(back_again, coef=1.0, grad=copy, is_known=True)
    total = (
        norm
        if isinstance(norm, torch.Tensor)
        else torch.tensor(
            math.nan, dtype=torch.promote_types(parameter.dtype, torch.float32), device="cpu"
        )
    )
    clips = tape.events[tape.events.index(last) :]
    wanted = _of_clips([e for e in clips if isinstance(e, Clip)], number, mark, used)
    if raw is None or copy is None:
        if wanted is None:
            return replace(read, is_known=False, doubts=(_UNSEEN, *read.doubts))
        return replace(read, coef=wanted)
    if wanted is not None and raw.device != copy.device:  # without a wait for the device
        return replace(read, coef=wanted)
    copy = copy.to(raw.device)
    candidates = [wanted] if wanted is not None else _candidates(total, raw, copy, limit)
    place = raw.device  # the first rows lie on the host
    factors = (as_norm(candidate.to(place, total.dtype)) for candidate in candidates)
    coef, are_products = _factor(raw, copy, factors, parameter)
    if coef is not None and are_products is not None:  # without a wait for the device
        chosen = torch.where(are_products, raw, copy)
        return replace(read, coef=coef, grad=chosen, are_products=are_products)
    if coef is not None:
        return replace(read, coef=coef)
    read = replace(read, grad=copy, is_known=False, doubts=(CHANGED, *read.doubts))
    if begin.base is None:  # all were zeroed
        return replace(read, source=None, norm=math.nan, doubts=(CHANGED, _NORM))
    return read


def _with_norm_again(read: Gradient, norm: torch.Tensor, parameter: torch.Tensor) -> Gradient:
    """Look at the norm of gradients that are other tensors than those that were taken."""
    on_host = norm.device.type == "cpu" and not is_sharded(parameter)
    if on_host and isinstance(read.norm, torch.Tensor) and torch.equal(norm, read.norm):
        return read
    return replace(read, norm=math.nan, is_known=False, doubts=(_NORM,))


def _of_clips(
    clips: list[Clip], number: int, begins: Mark | None, ends: Mark | None
) -> torch.Tensor | None:
    """Return the factor of the one call of `clip_grad_norm_` that has changed a gradient."""
    changes = [c for c in clips if not same(c.begins[number], c.ends[number])]
    if len(changes) != 1:
        return None
    (clip,) = changes
    if not (same(clip.begins[number], begins) and same(clip.ends[number], ends)):
        return None
    return _clip_factor(whole(clip.total), clip.max_norm)


def clip_coefficient(total_norm: torch.Tensor, max_norm: float) -> torch.Tensor:
    """Return the factor of clipping to a limit, where 0 is no clipping.

    Parameters
    ----------
    total_norm : tensor, ()
    max_norm : float
    """
    return torch.ones_like(total_norm) if max_norm <= 0 else _clip_factor(total_norm, max_norm)


def _clip_factor(total_norm: torch.Tensor, max_norm: float) -> torch.Tensor:
    """Return the factor of `torch.nn.utils.clip_grad_norm_`, with the same roundings."""
    return torch.clamp(max_norm / (total_norm + 1e-6), max=1.0)


def _candidates(
    total: torch.Tensor, raw: torch.Tensor, used: torch.Tensor, limit: float | None
) -> Iterator[torch.Tensor]:
    """Yield possible factors; the likeliest first."""
    yield torch.ones_like(total)
    if limit:
        yield clip_coefficient(total, limit)
    # The best factor by least squares, and its neighbors in the type of a clipping factor.
    before, after = raw.double(), used.double()
    best = (before * after).sum() / before.square().sum()
    near = torch.where(best > 0, best, math.nan).to(total.dtype)
    yield near
    for end in (math.inf, -math.inf):
        next_one = near
        for _ in range(2):
            next_one = torch.nextafter(next_one, torch.full_like(next_one, end))
            yield next_one


def _factor(
    raw: torch.Tensor,
    used: torch.Tensor,
    candidates: Iterable[torch.Tensor],
    parameter: torch.Tensor,
) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """Return the factor from the raw to the used gradient; None if none gives each bit.

    On a device, and over processes, also whether there is one, which is not waited for.
    """
    if used.device.type == "cpu" and not is_sharded(parameter):
        products = (c for c in candidates if _is_product(used, raw, c))
        return next(products, None), None
    listed = list(candidates)
    factor = torch.full_like(listed[0], math.nan)
    are_products = None
    for candidate in reversed(listed):  # the likeliest last
        matches = agreed((bits_of(used) == bits_of(raw * candidate)).all(), parameter)
        factor = torch.where(matches, candidate, factor)
        are_products = matches if are_products is None else matches | are_products
    return factor, are_products


def _equal(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Return whether all elements are equal, or NaN in both."""
    return ((a == b) | (a.isnan() & b.isnan())).all()


def _is_product(product: torch.Tensor, matrix: torch.Tensor, factor: torch.Tensor) -> bool:
    """Return the same on the host: `product` is `matrix` times `factor` in every bit or NaN."""
    scaled = matrix * factor
    return same_bits(scaled, product) or bool(product.isnan().any() and _equal(scaled, product))
