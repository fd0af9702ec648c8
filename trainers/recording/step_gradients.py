"""The gradients of a step: as the backward passes left them, and as the optimizer consumed them.

A gradient is known by its tensor and the tensor's version, so unchanged gradients are recognized
without a read. The raw gradient is taken at the end of each backward pass, because the loop may
clip it afterwards. The gradient that the optimizer consumes decides: the recorded `grad` times
`clip_coef` is that gradient, or `grad` is that gradient itself.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Iterator, Sequence, Set
from typing import NamedTuple

import torch
from torch.optim import Optimizer

from trajstore.trainers.recording.parameter_rows import ParameterRows
from trajstore.trainers.recording.parameters import gradient_of
from trajstore.trainers.recording.planned_run import Recording
from trajstore.trainers.recording.sharding import agreed, is_sharded, own_rows, total_norm
from trajstore.trainers.recording.torch_internals import counts_versions, version
from trajstore.trainers.recording.unproven_steps import why_unproven

_CHANGED = (
    "the gradient of {name} changed between the backward pass and the optimizer's step, and not by "
    "one factor; grad is what the optimizer got, clip_coef is NaN"
)
_NORM = (
    "gradients were replaced or removed, and others changed, between the backward pass and the "
    "optimizer's step; grad_norm is NaN"
)
_REMOVED = (
    "the gradient of {name} was removed while optimizer.step() ran, so clipping there cannot be "
    "seen; clip_coef is NaN"
)
_BETWEEN = "a backward pass ran between the steps of the optimizers in a step, so grad_norm is NaN"
_ASSIGNED = (
    "the gradient of {name} in a step is not that of a backward pass that ended before the step; "
    "grad is what the optimizer got, and clipping before cannot be seen"
)


def clip_coefficient(total_norm: torch.Tensor, max_norm: float) -> torch.Tensor:
    """Return the factor of `torch.nn.utils.clip_grad_norm_`, with the same roundings.

    Parameters
    ----------
    total_norm : tensor, ()
    max_norm : float
        0 disables clipping.
    """
    if max_norm <= 0:
        return torch.ones_like(total_norm)
    return torch.clamp(max_norm / (total_norm + 1e-6), max=1.0)


class _Mark(NamedTuple):
    """A gradient tensor at a moment."""

    gradient: weakref.ref[torch.Tensor]
    version: int

    def is_still(self, gradient: torch.Tensor | None) -> bool:
        if gradient is None or not self.is_tensor(gradient):
            return False
        return counts_versions() and version(gradient) == self.version

    def is_tensor(self, gradient: torch.Tensor | None) -> bool:
        return self.gradient() is gradient


Marks = dict[torch.Tensor, _Mark]


class StepGradients:
    """The gradients of the optimizer step in progress.

    Parameters
    ----------
    recording : Recording
    rows : sequence of ParameterRows
        Rows of the recorded parameters.

    Attributes
    ----------
    total_norm : tensor, () or None
        Norm of all gradients before clipping; None without gradients.
    """

    def __init__(self, recording: Recording, rows: Sequence[ParameterRows]) -> None:
        self._recording = recording
        self._model, self._optimizer = recording.model, recording.optimizer
        self._rows = tuple(rows)
        self._max_grad_norm = recording.loop.max_grad_norm
        self._on_note = recording.notes.mention
        self._parameters: tuple[torch.Tensor, ...] = tuple(self._model.parameters())
        self._of_optimizer = 0
        self._changed: torch.Tensor | int = 0  # steps on a device with a changed gradient
        types = {p.dtype for p in self._parameters if p.requires_grad and p.is_floating_point()}
        self._norm_type = functools.reduce(torch.promote_types, types, torch.bool)
        self.begin_step()

    def begin_step(self) -> None:
        """Forget the gradients so far: a step begins, or the loop has discarded them."""
        self.total_norm: torch.Tensor | None = None
        self._norms: dict[torch.Tensor, torch.Tensor] = {}  # of the raw gradients
        self._taken: Marks = {}  # all gradients at the end of the last backward pass
        self._settled: Marks = {}  # all gradients when they were compared
        self._reached: dict[torch.Tensor, None] = {}  # parameters whose gradients it changed
        self._was_inside = False  # the gradients were compared inside the step

    # Backward passes -----------------------------------------------------------------------------

    def marks(self) -> Marks:
        """Return the present gradient of each parameter of the model and of the optimizer."""
        count = sum(len(group["params"]) for group in self._optimizer.param_groups)
        if count != self._of_optimizer:
            self._of_optimizer = count
            trained = self._optimizer.parameters(*self._optimizer.members)
            self._parameters = tuple(dict.fromkeys([*self._model.parameters(), *trained]))
        return {
            parameter: _Mark(weakref.ref(parameter.grad), version(parameter.grad))
            for parameter in self._parameters
            if parameter.grad is not None
        }

    def are_changed_since(self, before: Marks) -> bool:
        """Return True if a backward pass has changed a gradient since some marks were taken."""
        reached = {
            parameter: None
            for parameter in self.marks()
            if parameter not in before or not before[parameter].is_still(parameter.grad)
        }
        if self._trained().isdisjoint(reached):
            return False  # it trains something else
        self._reached = reached
        return True

    def _trained(self) -> set[torch.Tensor]:
        """Return the parameters of the optimizer."""
        return {*self._optimizer.parameters(*self._optimizer.members)}

    def are_discarded(self) -> bool:
        """Return True if the loop has discarded the gradients of the last backward pass."""
        if not self._reached:
            return False
        trained = self._trained()
        return all(self._is_discarded(p) for p in self._reached if p in trained)

    def _is_discarded(self, one: torch.Tensor) -> bool:
        mark = self._taken.get(one)
        gradient = gradient_of(one)
        if gradient is None or mark is None or not mark.is_tensor(one.grad):
            return gradient is None
        # A read of a gradient on a device would wait for it; there zeros count as a change.
        on_host = gradient.device.type == "cpu"
        return on_host and not mark.is_still(one.grad) and not bool(own_rows(gradient).any())

    def take(self, unscale: float) -> None:
        """Take all gradients before they can be clipped; `unscale` multiplies them."""
        self._taken = self.marks()
        gradients = [g for g in map(gradient_of, self._taken) if g is not None]
        if not gradients:
            return
        consumed = {*self._optimizer.parameters(*self._optimizer.turns)}
        self._take_of_others(unscale, consumed)
        for rows in self._rows:
            gradient = gradient_of(rows.parameter.tensor)
            if gradient is not None and rows.parameter.tensor not in consumed:
                gradient = own_rows(gradient)
                norm = torch.linalg.vector_norm(gradient) * unscale
                self._norms[rows.parameter.tensor] = norm
                self._set(rows, gradient, unscale)
        self.total_norm = total_norm(gradients) * unscale
        if consumed:
            self.total_norm = torch.full_like(self.total_norm, float("nan"))
            self._on_note(_BETWEEN)

    def _take_of_others(self, unscale: float, consumed: Set[torch.Tensor] = frozenset()) -> None:
        if (state := self._recording.state) is not None:
            for rows in self._rows:
                before = rows.copy_of("params_grad")
                values = state.after_backward(rows.variables, unscale, consumed, before)
                for name, value in values.items():
                    rows.set(name, value)
        if self._recording.summaries is not None:
            self._recording.summaries.after_backward(unscale, consumed)

    def _rows_of(self, optimizer: Optimizer) -> list[ParameterRows]:
        """Return the rows of an optimizer that has its first step, and those of none."""
        if optimizer in self._optimizer.turns:
            return []
        return [rows for rows in self._rows if rows.parameter.optimizer in (optimizer, None)]

    def _set(self, rows: ParameterRows, gradient: torch.Tensor, unscale: float = 1.0) -> None:
        raw = gradient if unscale == 1.0 else gradient * unscale
        rows.set("grad", raw)
        rows.set_gradient_norms(raw)

    # The optimizer's step ------------------------------------------------------------------------

    def settle(
        self, optimizer: Optimizer, unscale: float = 1.0, *, may_be_assigned: bool = True
    ) -> None:
        """Compare the gradients with those that an optimizer consumes, and set `clip_coef`.

        `unscale` multiplies gradients that no backward pass was seen to produce. They are noted if
        they `may_be_assigned`.
        """
        for rows in self._rows_of(optimizer):
            self._settle(rows, unscale, noted=may_be_assigned)
        self._settled = now = self.marks()
        if self._optimizer.turns:
            return  # another optimizer has consumed gradients
        same = now.keys() == self._taken.keys() and all(
            self._taken[p].is_tensor(p.grad) for p in now
        )
        if not same and now:
            gradients = [g for g in map(gradient_of, now) if g is not None]
            norm = total_norm(gradients) * unscale
            unchanged = all(self._taken[p].is_still(p.grad) for p in now if p in self._taken)
            self.total_norm = norm if unchanged else torch.full_like(norm, float("nan"))
            if not unchanged:
                self._on_note(_NORM)
            else:
                self._take_of_others(unscale)

    def _settle(self, rows: ParameterRows, unscale: float, *, noted: bool) -> None:
        parameter = rows.parameter.tensor
        taken = self._taken.get(parameter)
        gradient = gradient_of(parameter)
        if gradient is None:
            rows.forget("grad", "grad_token_norm", "clip_coef")
            return
        owner = rows.parameter.optimizer
        if owner is not None and (sentence := why_unproven(owner, parameter)) is not None:
            self._on_note(sentence, unproven=True)
        if taken is None:
            self._set(rows, own_rows(gradient), unscale)
            if noted:
                self._note(_ASSIGNED, rows)
        elif is_sharded(parameter) or not taken.is_still(parameter.grad):
            # If several processes hold the gradient, all compare, and the result has to agree.
            self._compare(rows, own_rows(gradient))
            return
        rows.set("clip_coef", self.as_norm(gradient.new_ones(())))

    def _compare(
        self, rows: ParameterRows, consumed: torch.Tensor, *, only_factor: bool = False
    ) -> None:
        """Set the factor between the raw and the consumed gradient, or the latter itself."""
        parameter, total = rows.parameter.tensor, self.total_norm
        assert total is not None
        seen, raw = rows.recorded_tokens(consumed), rows.copy_of("grad")
        if raw is not None and raw.device != seen.device:
            raw = None  # the first row of a training on a device is on the host
        on_host = seen.device.type == "cpu" and not is_sharded(parameter)
        wide = torch.promote_types(total.dtype, torch.float32)
        lost = seen.isnan()
        factors, matches = [], []
        for candidate, tolerance in self._candidates(total, raw, seen):
            if raw is not None:
                scaled = raw * candidate
                if tolerance:
                    same = torch.isclose(scaled, seen, rtol=tolerance, atol=0)
                else:
                    same = scaled == seen
                same = (same | (scaled.isnan() & lost)).all()
            else:
                after = torch.linalg.vector_norm(consumed).float()
                before = self._norms[parameter].float() * candidate.float()
                same = torch.isclose(after, before, rtol=1e-2, atol=0)
            same = agreed(same, parameter)
            factors.append(candidate.to(wide))
            matches.append(same)
            if on_host and same:
                break
        found = torch.stack(matches).any()
        first = torch.stack(matches).to(torch.uint8).argmax().reshape(1)
        factor = torch.stack(factors).gather(0, first).reshape(()).where(found, float("nan"))
        if only_factor and on_host and not found:
            return
        rows.set("clip_coef", self.as_norm(factor.to(total.dtype)))
        if raw is None or only_factor:
            return
        if on_host and not found:
            rows.replace_gradient(seen)
            self._note(_CHANGED, rows)
        elif not on_host:  # without a wait for the device
            rows.replace_gradient(torch.where(found, raw, seen))
            self._changed = (~found).to(torch.int64) + self._changed

    def _candidates(
        self, total: torch.Tensor, raw: torch.Tensor | None, seen: torch.Tensor
    ) -> Iterator[tuple[torch.Tensor, float]]:
        """Yield possible factors, and the relative error to allow; the likeliest first."""
        yield torch.ones_like(total), 0
        if self._max_grad_norm > 0:
            yield clip_coefficient(total, self._max_grad_norm), 0
        if raw is None:
            return
        # The best factor by least squares, and its neighbors in the type of a clipping factor.
        before, after = raw.double(), seen.double()
        best = (before * after).sum() / before.square().sum()
        best = torch.where(best > 0, best, float("nan")).float()
        near = best.to(total.dtype)
        yield from ((one, 0) for one in (near, *_neighbors(near), best))
        yield best, 2 * torch.finfo(seen.dtype).eps

    def compare_again(self, optimizer: Optimizer, *, inside: bool = False) -> None:
        """Find the factor of gradients that changed after `settle`, in a later hook of the step.

        Other changes are the optimizer's own. It is called after the step, and before the step of
        a base class, `inside` that of the optimizer.
        """
        for rows in self._rows_of(optimizer):
            parameter = rows.parameter.tensor
            mark = self._settled.get(parameter)
            if mark is None or mark.is_still(parameter.grad) or parameter not in self._taken:
                continue
            gradient = gradient_of(parameter)
            if gradient is not None:
                self._compare(rows, own_rows(gradient), only_factor=True)
            elif not self._was_inside:
                self.set_unknown_factor(optimizer)
                self._note(_REMOVED, rows, unproven=True)
        self._was_inside = inside

    def set_unknown_factor(self, optimizer: Optimizer) -> None:
        """Set `clip_coef` of the matrices of an optimizer to NaN."""
        for rows in self._rows_of(optimizer):
            if self.total_norm is not None:
                unknown = torch.full_like(self.total_norm, float("nan"))
                rows.set("clip_coef", self.as_norm(unknown))

    def release(self) -> None:
        """Release all tensors."""
        self.begin_step()
        self._parameters, self._rows = (), ()

    def last_note(self) -> None:
        """Report what was found on a device, where each step would have had to wait for it."""
        if int(self._changed):
            self._note(_CHANGED, self._rows[0])

    def as_norm(self, value: torch.Tensor) -> torch.Tensor:
        """Return a norm, or a factor of it, in the type of a norm of all gradients.

        A step may have gradients of some types only.
        """
        return value.to(torch.promote_types(value.dtype, self._norm_type))

    def _note(self, sentence: str, rows: ParameterRows, *, unproven: bool = False) -> None:
        self._on_note(sentence.format(name=rows.parameter.name), unproven=unproven)


def _neighbors(value: torch.Tensor) -> list[torch.Tensor]:
    """Return the next two numbers of the type on both sides."""
    found = []
    for end in (float("inf"), float("-inf")):
        one = torch.nextafter(value, torch.full_like(value, end))
        found += [one, torch.nextafter(one, torch.full_like(value, end))]
    return found
