"""Writes the tape of the step in progress, and copies what the loop may change.

It decides the chain of the passes, and where a norm cannot be that of the passes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.optim import Optimizer

from trajstore.trainers.recording.forward_values import ForwardPass
from trajstore.trainers.recording.gradient_copies import GradientCopies
from trajstore.trainers.recording.graphs import mark_observed, number, root_of
from trajstore.trainers.recording.parameter_rows import ParameterRows
from trajstore.trainers.recording.parameters import as_dense
from trajstore.trainers.recording.planned_run import Recording
from trajstore.trainers.recording.rates import GroupRates
from trajstore.trainers.recording.sharding import has_fsdp, own_rows
from trajstore.trainers.recording.tape import (
    OLD,
    PUT,
    Assigned,
    Backward,
    Begin,
    Clip,
    End,
    Gradients,
    Mark,
    Marks,
    Moment,
    Observed,
    Root,
    Tape,
    Unscale,
    chain,
)
from trajstore.trainers.recording.torch_internals import divides_in_step, scale_in_step


class RunningPass:
    """A backward pass that runs, and what was there before it."""

    def __init__(self, tape: Tape, root: Root, base: Any, before: Moment | None) -> None:
        self.tape, self.root, self.base, self.before = tape, root, base, before
        self.put: frozenset[int] = frozenset()  # places of gradients that no pass has left
        self.forwards: list[ForwardPass] = []


class TapeWriter:
    """Writes the events of a step.

    Parameters
    ----------
    recording : Recording
    rows : sequence of ParameterRows
    copies : GradientCopies

    Attributes
    ----------
    tape : Tape
    """

    def __init__(
        self, recording: Recording, rows: Sequence[ParameterRows], copies: GradientCopies
    ) -> None:
        self._recording, self._rows, self.copies = recording, rows, copies
        self._optimizer = recording.optimizer
        self.begin_step()

    def begin_step(self) -> None:
        """Begin a new tape."""
        self.tape = Tape()
        self._roots: list[Root] = []  # of all passes
        self._old = self.copies.marks()  # gradients at the end of the step before

    def observe(
        self, loss: torch.Tensor | None, deliver: dict[str, Callable[[], None]], forward: int
    ) -> bool:
        """Write values from the loop; return False for the loss of the step before.

        `forward` is the number of the next forward pass.
        """
        event = Observed(forward, None, is_quotient=False, deliver=deliver)
        root = None if loss is None else mark_observed(event, loss)
        is_stale = root is not None and root not in self._roots
        if loss is not None and not is_stale:
            event.loss = number(loss)
            event.is_quotient = loss.grad_fn is not None and "Div" in loss.grad_fn.name()
            event.roots += [] if root is None else [root]
        last = self.tape.events[-1] if self.tape.events else None
        if isinstance(last, Observed) and last.number == event.number and _can_join(last, event):
            last.deliver |= event.deliver
            if event.loss is not None:
                last.loss, last.is_quotient = event.loss, event.is_quotient
                last.roots = event.roots  # to which a later pass adds its own
        elif deliver or event.loss is not None:
            self.tape.events.append(event)
        return not is_stale

    # Backward passes -----------------------------------------------------------------------------

    def begin_pass(self, tensors: Any, grad_tensors: Any, *, accumulates: bool) -> RunningPass:
        """Return a new pass, before it frees its graph."""
        single = isinstance(tensors, torch.Tensor)
        roots = [tensors] if single else list(tensors)
        factors = [grad_tensors] if single or grad_tensors is None else list(grad_tensors)
        factors += [None] * (len(roots) - len(factors))
        root = root_of(roots, factors)
        self._roots.append(root)
        if not accumulates:
            return RunningPass(self.tape, root, None, None)
        present = self.copies.present()
        running = RunningPass(self.tape, root, self._base(present), Moment(present))
        matrices = [rows.parameter.tensor for rows in self._rows]
        if running.base is None and not any(
            p.requires_grad and p.grad is not None for p in matrices
        ):
            gradients = enumerate(present)
            running.put = frozenset(n for n, g in gradients if _has_values(g, False))
        return running

    def _base(self, present: Sequence[torch.Tensor | None]) -> Any:
        """Return the pass whose gradients are there now, `OLD`, `PUT` or None."""
        for event in reversed(self.tape.all(Backward)):
            if self._are_there(event, present):
                return event
        for old, rows in zip(self._old, self._rows, strict=False):
            gradient = rows.parameter.tensor.grad
            if old is not None and old.is_tensor(gradient):
                return OLD if _has_values(gradient, old.is_still(gradient)) else None
            if gradient is not None:
                return PUT if _has_values(gradient, False) else None
        return None

    def _are_there(self, event: Backward, present: Sequence[torch.Tensor | None]) -> bool:
        """Return True if the gradients that a pass has left are still there, changed or not.

        The witness tells it, if it has not lost its own.
        """
        if self._is_there(event, event.witness, present):
            return True
        places = event.reached & self.copies.trained
        return any(self._is_there(event, place, present) for place in places)

    def _is_there(
        self, event: Backward, place: int, present: Sequence[torch.Tensor | None]
    ) -> bool:
        mark, gradient = event.moment.mark(place), present[place]
        if mark is None:  # FSDP2 holds it back without synchronization
            return True
        if not mark.is_tensor(gradient):
            return False
        return mark.is_still(gradient) or _has_values(gradient, True)

    def end_pass(self, running: RunningPass, results: Any, *, is_inside: bool) -> None:
        """Take the raw gradients of a pass before they can be clipped.

        `results` are those of `torch.autograd.grad`; `is_inside` a step.
        """
        events, root, base = self.tape.events, running.root, running.base
        if running.tape is not self.tape:  # the pass itself has called the step
            return
        if running.before is None:
            marks = [Mark.of(gradient) for gradient in results]
            kept = [mark for mark in marks if mark is not None]
            events.append(Gradients(root, kept, running.forwards))
            self.tape.forget(self.tape.last(Backward))
            return
        present, trained = self.copies.present(), self.copies.trained
        reached = running.before.changed(present)
        if trained.isdisjoint(reached):
            # Without synchronization, FSDP2 adds the gradient to that of a later pass.
            if not (running.forwards and has_fsdp(self._recording.model)):
                return  # it trains something else
            reached = trained
        if running.put & reached & trained and not self.copies.has_matrix(reached):
            base = PUT  # the matrices, without a gradient, do not tell
        is_again = is_inside and base is None and any(e.is_inside for e in self.tape.all(Backward))
        norm: torch.Tensor | float | None = None
        if not is_again:
            if root.scale is None or self.copies.are_on_host:  # there bits tell of changes
                self.copies.take()
            if root.scale is None:
                self.copies.take_others()
            norm = math.nan if self._optimizer.turns else self.copies.norm()
        event = Backward(
            root=root,
            base=base,
            reached=reached,
            witness=self.copies.witness(reached),
            moment=Moment(present),
            marks=self.copies.marks(),
            norm=norm,
            forwards=running.forwards,
            is_inside=is_inside,
        )
        events.append(event)
        if not (self._optimizer.turns or is_inside):
            self.tape.forget(event)

    def take_assigned(self) -> None:
        """Take gradients that no pass of the step has left, if there are some."""
        events = self.tape.events
        passes, _ = chain(self.tape.last(Backward))
        found: list[Backward | Assigned] = [*passes, *self.tape.all(Assigned)]
        gradients = [rows.parameter.tensor.grad for rows in self._rows]
        new = [
            place
            for place, gradient in enumerate(gradients)
            if gradient is not None and all(event.marks[place] is None for event in found)
        ]
        new = [n for n in new if self._rows[n].parameter.optimizer not in self._optimizer.turns]
        if not new:
            return
        gradient = gradients[new[0]]
        calls = [
            e for e in self.tape.all(Gradients) if any(r.is_still(gradient) for r in e.results)
        ]
        old = self._old[new[0]]
        is_old = old is not None and old.is_still(gradient)
        origin = calls[-1] if calls else OLD if is_old else None
        self.copies.take()
        self.copies.take_others()
        moment = Moment(self.copies.present())
        norm = math.nan if self._optimizer.turns else self.copies.norm()
        events.append(Assigned(origin, moment, self.copies.marks(), norm))

    # Calls of torch that change gradients --------------------------------------------------------

    def before_unscale(self) -> tuple[list[bool], bool]:
        """Return which gradients of matrices are as they were taken, and if the norm is known."""
        self.take_assigned()
        copies = self.copies
        were_still = [copies.used(n, self._taken(n)) is None for n in range(len(self._rows))]
        taken, now = self._last_take(), copies.present()
        places = {place for place, gradient in enumerate(now) if gradient is not None}
        is_known = places <= copies.trained  # only those are divided
        if taken is not None:
            moment, norm = taken.moment, taken.norm
            is_known &= moment.are_tensors(now) and not moment.changed(now)
            if copies.are_on_host and isinstance(norm, torch.Tensor):  # there bits decide
                is_known &= _equal(norm, copies.norm())
        return were_still, is_known

    def after_unscale(
        self, member: Optimizer, before: tuple[list[bool], bool], scale: float = 1.0
    ) -> None:
        """Take the gradients that were divided, or will be by `scale`."""
        self.copies.take(of=member, scale=scale)
        self.copies.take_others(scale)
        were_still, all_still = before
        norm = self.copies.norm(member if len(self._optimizer.members) > 1 else None)
        if norm is not None:
            norm = norm / scale if scale != 1.0 else norm
        known = norm if all_still or norm is None or self._optimizer.turns else math.nan
        self.tape.events.append(Unscale(member, were_still, self.copies.marks(), known))

    def before_clip(self) -> Marks:
        """Return the gradients of the matrices."""
        self.take_assigned()
        return self.copies.marks()

    def after_clip(self, max_norm: float, total: torch.Tensor, begins: Marks) -> None:
        """Write a call of `clip_grad_norm_`."""
        self.tape.events.append(Clip(max_norm, total, begins, self.copies.marks()))

    def _last_take(self) -> Backward | Assigned | None:
        """Return the last pass that has left gradients, or the last assignment."""
        for event in reversed(self.tape.events):
            if isinstance(event, Backward | Assigned):
                return event
        return None

    def _taken(self, place: int) -> Mark | None:
        """Return the mark of a matrix's gradient when it was taken."""
        for event in reversed(self.tape.events):
            if isinstance(event, Backward | Assigned | Unscale) and event.marks[place] is not None:
                return event.marks[place]
        return None

    # The optimizer's step ------------------------------------------------------------------------

    def begin(self, member: Optimizer, rates: list[GroupRates]) -> None:
        """Write that a step begins, or goes on after it has clipped."""
        tape, copies = self.tape, self.copies
        is_first = tape.turn_of(member)[0] is None
        scale = scale_in_step(member) if is_first else None
        last = tape.last(Backward)
        is_scaled = last is not None and last.root.scale is not None
        if not tape.has_closure:
            self.take_assigned()
            if is_first and scale is not None:
                self.after_unscale(member, self.before_unscale(), scale)
            elif is_scaled and tape.last(Unscale) is None:  # the loop steps without the scaler
                copies.take_others()
                if not copies.are_on_host:
                    copies.take()
        present = copies.present()
        base = self._base(present)
        norm = None if tape.has_closure else self._norm_again(present)
        tape.events.append(Begin(member, copies.marks(), rates, base, norm))
        if not (tape.has_closure or divides_in_step(member)):
            self._copy_used(member)
        if is_first and not tape.has_closure:
            self._add_digests(member)

    def end(self, member: Optimizer, rates: list[GroupRates]) -> None:
        """Write that a step has ended."""
        tape = self.tape
        if tape.turn_of(member)[1] is None:
            is_divided = divides_in_step(member)
            if tape.has_closure:
                self.take_assigned()
            if tape.has_closure or (is_divided and self.copies.are_on_host):
                self._copy_used(member)
            if tape.has_closure:
                self._add_digests(member)
        norm = self._norm_again(self.copies.present()) if tape.has_closure else None
        tape.events.append(End(member, self.copies.marks(), rates, norm))

    def _norm_again(self, present: Sequence[torch.Tensor | None]) -> torch.Tensor | None:
        """Return the norm if the gradients are other tensors than those taken; else None.

        If some were removed and no other has changed, the others are taken again.
        """
        taken = self._last_take()
        if self._optimizer.turns or taken is None or taken.moment.are_tensors(present):
            return None
        if not taken.moment.changed(present):  # some were removed; the others may be clipped now
            self.copies.take_others()
        return self.copies.norm()

    def _copy_used(self, member: Optimizer) -> None:
        """Copy the gradients that an optimizer gets, where they are not the raw ones."""
        if member in self._optimizer.turns:
            return
        for place, rows in enumerate(self._rows):
            if rows.parameter.optimizer in (member, None):
                self.tape.used.pop(place, None)
                if (copy := self.copies.used(place, self._taken(place))) is not None:
                    self.tape.used[place] = copy

    def _add_digests(self, member: Optimizer) -> None:
        if self._recording.digests is not None:
            self._recording.digests.add_gradients(member.param_groups)

    def forget_turn(self, member: Optimizer) -> None:
        """Forget a step that has ended without a row; its passes belong to the next one."""
        tape = self.tape
        of_turn = [e for e in tape.events if isinstance(e, Begin | End) and e.optimizer is member]
        tape.events = [event for event in tape.events if event not in of_turn]
        for event in tape.all(Backward):
            event.is_inside = False


def _can_join(last: Observed, event: Observed) -> bool:
    """Return True if two observations pass different values of one micro-batch."""
    is_loss = last.loss is not None and event.loss is not None
    return not is_loss and last.deliver.keys().isdisjoint(event.deliver)


def _equal(a: torch.Tensor, b: torch.Tensor | None) -> bool:
    return b is not None and (torch.equal(a, b) or bool(a.isnan() and b.isnan()))


def _has_values(gradient: torch.Tensor | None, on_device: bool) -> bool:
    """Return True if a gradient is not 0. A read would wait for a device: `on_device` there."""
    if gradient is None or gradient.device.type != "cpu":
        return gradient is not None and on_device
    return bool(own_rows(as_dense(gradient)).any())
