"""The gradients of a step: as the backward passes left them, and as the optimizer consumed them.

A gradient is known by its tensor and the tensor's version, so unchanged gradients are recognized
without a read. The raw gradient is taken after the backward pass and the scaler's `unscale_`: the
loop may clip it afterwards. The gradient that the innermost step gets decides: the recorded `grad`
times `clip_coef` is that gradient in every bit, or `grad` is that gradient itself.
"""

# Longer than other rooms: raw and consumed gradients share the marks, doubts and norms of a step.

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Iterator, Sequence, Set
from typing import Any, NamedTuple

import torch
from torch.optim import Optimizer

from trajstore.trainers.recording.device_to_host import joint_type, same_bits
from trajstore.trainers.recording.notes import why_unproven
from trajstore.trainers.recording.parameter_rows import ParameterRows
from trajstore.trainers.recording.parameters import as_dense, gradient_of
from trajstore.trainers.recording.passes import Mark, Moment
from trajstore.trainers.recording.planned_run import Recording
from trajstore.trainers.recording.sharding import (
    agreed,
    has_fsdp,
    is_sharded,
    own_rows,
    total_norm,
    whole,
)
from trajstore.trainers.recording.torch_internals import (
    counts_versions,
    plain_total_norm,
    scale_in_step,
)

_CHANGED = (
    "the gradient of {name} changed between the backward pass and the optimizer's update, and not "
    "by one factor; grad is what the optimizer got, clip_coef is NaN"
)
_UNSEEN = (
    "the gradient of {name} changed between the backward pass and the optimizer's update; without "
    "grad, only the factor of clip_grad_norm_ is known, so clip_coef is NaN"
)
_SCALED = (
    "the loop changed the gradient of {name} while it was scaled; grad is that after the change, "
    "clip_coef and grad_norm are NaN"
)
_INSIDE = (
    "the gradient of {name} changed while optimizer.step() ran; grad is that at the beginning of "
    "step(), clip_coef is NaN"
)
_KEPT = (
    "calls of optimizer.step() before may have kept gradients of {name} without a change of "
    "parameters; what the step used is not known, so grad and clip_coef are NaN"
)
_OTHER_LIMIT = (
    "clipping did not follow from max_grad_norm={limit}; clip_coef is what the loop applied"
)
_NORM = (
    "gradients were replaced, or some removed and others changed, between the backward pass and "
    "the optimizer's step; grad_norm is NaN"
)
_REMOVED = (
    "the gradient of {name} was removed while optimizer.step() ran, so clipping there cannot be "
    "seen; clip_coef is NaN"
)
_BETWEEN = "a backward pass ran between the steps of the optimizers in a step, so grad_norm is NaN"
_ASSIGNED = (
    "the gradient of {name} in a step is not that of a backward pass that ended before the step; "
    "grad is what the optimizer got; clipping before cannot be seen, so clip_coef and grad_norm "
    "are NaN"
)
_AGAIN = "a step uses again the gradient of {name} of the step before"


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


class _Clipping(NamedTuple):
    """A call of `clip_grad_norm_` that changed a gradient which was as it had been taken."""

    max_norm: float
    total_norm: torch.Tensor
    after: Mark


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
        self.find_parameters()
        self._are_factors: torch.Tensor | None = None  # all changes of gradients on a device so far
        types = {p.dtype for p in self._parameters if p.requires_grad and p.is_floating_point()}
        self._norm_type = functools.reduce(torch.promote_types, types, torch.bool)
        self._constants: dict[Any, torch.Tensor] = {}
        self._before: dict[torch.Tensor, Mark] = {}
        self._compared: dict[torch.Tensor, Mark] = {}
        self.begin_step()

    def begin_step(self) -> None:
        """Forget the gradients so far: a step begins, or the loop has discarded them."""
        self.total_norm: torch.Tensor | None = None
        self._norms: dict[Optimizer, torch.Tensor] = {}  # of the gradients of each optimizer
        self._taken: Moment | None = None  # when the gradients were taken
        self._scaled: set[Optimizer] = set()  # whose gradients are to be taken after unscale_
        self._doubtful: dict[torch.Tensor, str] = {}  # parameters with a note in place of a factor
        self._clippings: dict[torch.Tensor, _Clipping | None] = {}  # None: not the only change
        self._before = self._compared or self._before
        self._compared = {}  # of the matrices when compared
        self._replaced: set[torch.Tensor] = set()  # whose `grad` is not the raw gradient
        self._divided: set[torch.Tensor] = set()  # whose gradients the step divides by a scale
        self._results: list[Mark] = []  # of `torch.autograd.grad`
        self._reached: Set[int] = frozenset()  # places whose gradients the last pass changed

    # Backward passes -----------------------------------------------------------------------------

    def find_parameters(self) -> None:
        """Find the parameters of the model and of the optimizer again."""
        trained = self._of_optimizer = self._optimizer.parameters(*self._optimizer.members)
        self._parameters = tuple(dict.fromkeys([*self._model.parameters(), *trained]))
        self._places = {parameter: place for place, parameter in enumerate(self._parameters)}
        self._trained = frozenset(map(self._places.__getitem__, trained))
        self._are_sharded = any(map(is_sharded, self._parameters))

    def are_others_trained(self) -> bool:
        """Return True if the optimizer has other parameters than before."""
        now, before = self._optimizer.parameters(*self._optimizer.members), self._of_optimizer
        return len(now) != len(before) or not all(map(operator.is_, now, before))

    def moment(self) -> Moment:
        """Return the present gradients of the parameters of the model and of the optimizer."""
        return Moment(self._places, self._present())

    def _present(self) -> list[torch.Tensor | None]:
        return [parameter.grad for parameter in self._parameters]

    def _mark(self, parameter: torch.Tensor) -> Mark | None:
        """Return the gradient of a parameter when it was taken; None if it was not."""
        return None if self._taken is None else self._taken.mark(parameter)

    def end_backward(self, before: Moment, *, is_scaled: bool, is_of_model: bool) -> Set[int]:
        """Take the gradients of a backward pass, before the loop can change them.

        Parameters
        ----------
        before : Moment
            Gradients before the pass.
        is_scaled : bool
            A gradient scaler has multiplied the loss; the gradients are taken when it divides them.
        is_of_model : bool
            The pass went through a forward pass of the model.

        Returns
        -------
        set of int
            Places of the parameters whose gradients have changed; empty if the pass trains
            something else.
        """
        present = self._present()
        reached = before.changed(present)
        if self._trained.isdisjoint(reached):
            # Without synchronization, FSDP2 adds the gradient to that of a later pass.
            is_held_back = is_of_model and has_fsdp(self._model)
            return self._trained if is_held_back else frozenset()
        self._reached = reached
        if is_scaled:
            self._taken = Moment(self._places, present)
            self._scaled = {*self._optimizer.members}
        else:
            self._take(present)
        return self._reached

    def remember_results(self, gradients: Sequence[torch.Tensor | None]) -> None:
        """Remember the results of `torch.autograd.grad`, which the loop may assign."""
        self._results += (Mark.of(gradient) for gradient in gradients if gradient is not None)

    def are_discarded(self) -> bool:
        """Return True if the loop has discarded the gradients of the last backward pass."""
        reached = self._reached & self._trained
        return bool(self._reached) and all(
            self._is_discarded(self._parameters[place]) for place in reached
        )

    def _is_discarded(self, parameter: torch.Tensor) -> bool:
        mark = self._mark(parameter)
        gradient = gradient_of(parameter)
        if gradient is None or mark is None or not mark.is_tensor(parameter.grad):
            return gradient is None
        if self._is_clipped(parameter):
            return False
        # A read of a gradient on a device would wait for it; there zeros count as a change.
        on_host = gradient.device.type == "cpu"
        return on_host and not mark.is_still(parameter.grad) and not bool(own_rows(gradient).any())

    def _take(
        self,
        present: Sequence[torch.Tensor | None],
        *,
        only: Optimizer | None = None,
        scale: float | None = None,
    ) -> None:
        """Take the present gradients of all optimizers, or of `only` one, divided by `scale`."""
        others = {*self._optimizer.members} - {only} if only is not None else set()
        kept = {*self._optimizer.parameters(*others)}
        consumed = {*self._optimizer.parameters(*self._optimizer.turns)}
        unscale = 1.0 if scale is None else 1.0 / scale
        self._scaled &= others
        before, self._taken = self._taken, Moment(self._places, present)
        if before is not None:
            self._taken.keep(kept, before)
        for rows in self._rows:
            if rows.parameter.tensor.grad is not None and rows.parameter.tensor not in kept:
                self._compared.pop(rows.parameter.tensor, None)
                self._clippings.pop(rows.parameter.tensor, None)
                self._replaced.discard(rows.parameter.tensor)
        gradients = [gradient for gradient in present if gradient is not None]
        if not gradients:
            return
        self._take_of_others(unscale, consumed)
        for rows in self._rows:
            parameter = rows.parameter
            gradient = gradient_of(parameter.tensor)
            if gradient is None or parameter.tensor in consumed or parameter.optimizer in others:
                continue
            if scale is None:
                rows.set_gradient(own_rows(gradient))
            else:
                rows.set_gradient(own_rows(gradient) / scale)
                self._divided.add(parameter.tensor)
        if only is not None and others:
            pairs = zip(self._parameters, present, strict=True)
            gradients_of_step = [g for p, g in pairs if g is not None and p not in kept]
            if gradients_of_step:
                self._norms[only] = self._norm(gradients_of_step) * unscale
            norms = list(self._norms.values())
            self.total_norm = torch.linalg.vector_norm(torch.stack(norms)) if norms else None
            return
        norm = self._norm(gradients)
        self.total_norm = norm if scale is None else norm * unscale
        if consumed:
            self.total_norm = torch.full_like(self.total_norm, float("nan"))
            self._on_note(_BETWEEN)

    def _norm(self, gradients: Sequence[torch.Tensor]) -> torch.Tensor:
        """Return the norm of gradients together, as `clip_grad_norm_` computes it."""
        if any(map(operator.attrgetter("is_sparse"), gradients)):
            gradients = [*map(as_dense, gradients)]
        return total_norm(gradients) if self._are_sharded else plain_total_norm(gradients)

    def _take_of_others(self, unscale: float, consumed: Set[torch.Tensor] = frozenset()) -> None:
        if (state := self._recording.state) is not None:
            for rows in self._rows:
                before = rows.copy_of("params_grad")
                rows.set(state.after_backward(rows.variables, unscale, consumed, before))
        if self._recording.summaries is not None:
            self._recording.summaries.after_backward(unscale, consumed)

    def _rows_of(self, optimizer: Optimizer) -> list[ParameterRows]:
        """Return the rows of an optimizer that has its first step, and those of none."""
        if optimizer in self._optimizer.turns:
            return []
        return [rows for rows in self._rows if rows.parameter.optimizer in (optimizer, None)]

    # Changes that torch makes --------------------------------------------------------------------

    def are_still(self, optimizer: Optimizer) -> bool:
        """Return True if no recorded gradient of an optimizer has changed since it was taken."""
        return all(
            mark is None or mark.is_still(rows.parameter.tensor.grad)
            for rows in self._rows_of(optimizer)
            for mark in [self._mark(rows.parameter.tensor)]
        )

    def after_unscale(
        self, optimizer: Optimizer, *, were_still: bool, is_scaled_by_hand: bool = False
    ) -> None:
        """Take the gradients that a gradient scaler has divided."""
        if optimizer in self._scaled or is_scaled_by_hand:
            self._take_scaled(optimizer, were_still=were_still)
        else:
            self._take_assigned()

    def before_clipping(self) -> None:
        """Take gradients that no backward pass has left, before they are clipped."""
        if not (self._optimizer.turns or self._scaled):
            self._take_assigned()
        self._were_still = {
            rows.parameter.tensor: mark is not None and mark.is_still(rows.parameter.tensor.grad)
            for rows in self._rows
            for mark in [self._mark(rows.parameter.tensor)]
        }

    def _take_assigned(self) -> None:
        """Take gradients that no backward pass has left, if there are some."""
        rows = [matrix for matrix in self._rows if self._mark(matrix.parameter.tensor) is None]
        rows = [matrix for matrix in rows if matrix.parameter.tensor.grad is not None]
        if rows:
            self._take(self._present())
            unknown = [
                matrix for matrix in rows if not self._is_known(matrix.parameter.tensor.grad)
            ]
            self._doubt(unknown, _ASSIGNED)

    def _is_known(self, gradient: torch.Tensor | None) -> bool:
        """Return True for an unchanged result of `torch.autograd.grad`."""
        return any(mark.is_still(gradient) for mark in self._results)

    def _doubt(self, rows: Sequence[ParameterRows], sentence: str) -> None:
        """Use a note in place of the factor of clipping, and of the norm before it."""
        for matrix in rows:
            self._doubtful[matrix.parameter.tensor] = sentence
        if rows and self.total_norm is not None:
            self.total_norm = torch.full_like(self.total_norm, float("nan"))

    def after_clipping(self, max_norm: float, norm: torch.Tensor) -> None:
        """Remember the factor of a call of `clip_grad_norm_`."""
        for parameter, was_still in self._were_still.items():
            mark, gradient = self._mark(parameter), parameter.grad
            if mark is None or gradient is None or mark.is_still(gradient):
                continue  # the call was about others
            known = was_still and parameter not in self._clippings
            self._clippings[parameter] = (
                _Clipping(float(max_norm), norm, Mark.of(gradient)) if known else None
            )

    def _is_clipped(self, parameter: torch.Tensor) -> bool:
        """Return True if one call of `clip_grad_norm_` alone has changed a gradient."""
        clipping = self._clippings.get(parameter)
        return clipping is not None and clipping.after.is_still(parameter.grad)

    def _take_scaled(
        self, optimizer: Optimizer, scale: float | None = None, *, were_still: bool
    ) -> None:
        """Take gradients of a scaled loss, which the scaler has divided or the step divides."""
        self._take(self._present(), only=optimizer, scale=scale)
        if not were_still:
            self._doubt(self._rows_of(optimizer), _SCALED)

    # The optimizer's step ------------------------------------------------------------------------

    def compare(self, optimizer: Optimizer, *, inside: bool = False) -> None:
        """Compare the gradients with those that an optimizer gets, and set `clip_coef`.

        It is called at the beginning of a step, and at that of each step `inside` it.
        """
        if optimizer in self._scaled:
            still = self.are_still(optimizer)
            self._take_scaled(optimizer, scale_in_step(optimizer), were_still=still)
        for rows in self._rows_of(optimizer):
            self._compare(rows, inside=inside)
            if (gradient := rows.parameter.tensor.grad) is not None:
                self._compared[rows.parameter.tensor] = Mark.of(gradient)
        if inside or self._optimizer.turns:
            return  # another optimizer has consumed gradients
        present = self._present()
        if self._taken is not None and self._taken.are_tensors(present):
            return
        gradients = [gradient for gradient in present if gradient is not None]
        if gradients:
            norm = self._norm(gradients)
            pairs = ((self._mark(p), p.grad) for p in self._parameters)
            unchanged = all(
                mark.is_still(gradient)
                for mark, gradient in pairs
                if mark is not None and gradient is not None
            )
            known = unchanged and not self._doubtful
            self.total_norm = norm if known else torch.full_like(norm, float("nan"))
            if not unchanged:
                self._on_note(_NORM)
            else:
                self._take_of_others(1.0)

    def skip(self, optimizer: Optimizer) -> None:
        """Leave the gradients of a step that a gradient scaler skips as they were taken."""
        if optimizer in self._scaled:
            self._take_scaled(optimizer, were_still=self.are_still(optimizer))
        for rows in self._rows_of(optimizer):
            if rows.parameter.tensor.grad is None:
                rows.forget("grad", "grad_token_norm")
        self.set_unknown_factor(optimizer)

    def _compare(self, rows: ParameterRows, *, inside: bool) -> None:
        parameter = rows.parameter.tensor
        before, taken = self._compared.get(parameter), self._mark(parameter)
        gradient = gradient_of(parameter)
        if gradient is None:
            rows.forget("grad", "grad_token_norm", "clip_coef")
            return
        is_same = before is not None and before.is_still(parameter.grad)
        if is_same and not (
            inside and taken is not None and self._has_changed(rows, gradient, taken)
        ):
            return
        owner = rows.parameter.optimizer
        if owner is not None and (sentence := why_unproven(owner, parameter)) is not None:
            self._on_note(sentence, unproven=True)
        if taken is None:
            rows.set_gradient(own_rows(gradient))
            again = self._before.get(parameter)
            if again is not None and again.is_still(parameter.grad):
                self._note(_AGAIN, rows)
            elif not self._is_known(parameter.grad):
                self._doubt([rows], _ASSIGNED)
        elif is_sharded(parameter) or self._has_changed(rows, gradient, taken):
            # If several processes hold the gradient, all compare, and the result has to agree.
            self._set_factor(rows, own_rows(gradient), taken)
            if parameter not in self._doubtful:
                return
        if sentence := self._doubtful.get(parameter):
            rows.set({"clip_coef": self._constant(math.nan, gradient)})
            self._note(sentence, rows)
        else:
            rows.set({"clip_coef": self._constant(1.0, gradient)})

    def _has_changed(self, rows: ParameterRows, gradient: torch.Tensor, taken: Mark) -> bool:
        """Return True if a gradient has changed since it was taken.

        A change of its `Tensor.data` is not counted, so on the CPU the bits are compared.
        """
        parameter = rows.parameter.tensor
        if not taken.is_still(parameter.grad):
            return True
        raw = rows.copy_of("grad")
        if raw is None or gradient.device.type != "cpu" or raw.dtype != gradient.dtype:
            return False
        if parameter in self._divided:
            return False
        return not same_bits(raw, rows.recorded_tokens(gradient))

    def _set_factor(self, rows: ParameterRows, consumed: torch.Tensor, taken: Mark) -> None:
        """Set the factor between the raw and the consumed gradient, or the latter itself."""
        parameter, total = rows.parameter.tensor, self.total_norm
        assert total is not None
        selected, raw = rows.recorded_tokens(consumed), rows.copy_of("grad")
        clipping, is_clipped = self._clippings.get(parameter), self._is_clipped(parameter)
        on_host = selected.device.type == "cpu" and not is_sharded(parameter)
        is_elsewhere = raw is not None and raw.device != selected.device
        if raw is None or (is_elsewhere and is_clipped):  # without a wait for the device
            is_still = taken.is_still(parameter.grad)
            known = self._constant(1.0 if is_still else math.nan, total)
            rows.set({"clip_coef": self.as_norm(self._factor(clipping)) if is_clipped else known})
            if not (is_clipped or is_still):
                self._note(_UNSEEN, rows)
            return
        if parameter in self._replaced:
            rows.replace_gradient(selected)
            return
        if is_elsewhere:
            selected = selected.cpu()
            on_host = not is_sharded(parameter)
        candidates: Any = (
            [self._factor(clipping)] if is_clipped else self._candidates(total, raw, selected)
        )
        factors = (self.as_norm(candidate.to(total.dtype)) for candidate in candidates)
        if on_host:
            factor = next(
                (candidate for candidate in factors if _is_product(selected, raw, candidate)), None
            )
            rows.set({"clip_coef": self._constant(math.nan, total) if factor is None else factor})
            if factor is not None:
                self._check_limit(rows, total, factor)
                return
            self._note(_CHANGED, rows)
            rows.replace_gradient(selected)
            self._replaced.add(parameter)
            return
        factor = self._constant(math.nan, total)  # without a wait for the device
        are_products = None
        for candidate in reversed([*factors]):  # the likeliest last
            matches = agreed(_equal(selected, raw * candidate), parameter)
            factor = torch.where(matches, candidate, factor)
            are_products = matches if are_products is None else matches | are_products
        assert are_products is not None
        rows.set({"clip_coef": factor})
        self._are_factors = (
            are_products if self._are_factors is None else self._are_factors & are_products
        )
        rows.replace_gradient(torch.where(are_products, raw, selected))

    def _check_limit(self, rows: ParameterRows, total: torch.Tensor, factor: torch.Tensor) -> None:
        """Note a factor of clipping that does not follow from the recorded limit."""
        schedule = self._recording.loop.schedule
        limit = schedule.get("max_grad_norm")
        if limit is None or factor == 1:
            return
        if factor == self.as_norm(clip_coefficient(total, limit)):
            return
        is_new = rows.writer is None
        if is_new and isinstance(schedule, dict):
            del schedule["max_grad_norm"]  # the run does not know the limit
        self._on_note(_OTHER_LIMIT.format(limit=limit), unproven=limit > 0 and not is_new)

    def _factor(self, clipping: _Clipping | None) -> torch.Tensor:
        assert clipping is not None
        return clip_coefficient(whole(clipping.total_norm), clipping.max_norm)

    def _candidates(
        self, total: torch.Tensor, raw: torch.Tensor, selected: torch.Tensor
    ) -> Iterator[torch.Tensor]:
        """Yield possible factors; the likeliest first."""
        yield torch.ones_like(total)
        if self._max_grad_norm:
            yield clip_coefficient(total, self._max_grad_norm)
        # The best factor by least squares, and its neighbors in the type of a clipping factor.
        before, after = raw.double(), selected.double()
        best = (before * after).sum() / before.square().sum()
        near = self.as_norm(torch.where(best > 0, best, float("nan")).to(total.dtype))
        yield near
        yield from _neighbors(near)

    def check_after_step(self, optimizer: Optimizer, *, has_kept: bool = False) -> None:
        """Look at gradients that a step has changed; its use of them is not known.

        `has_kept` says that empty calls of the step may have kept gradients before.
        """
        if not counts_versions():
            return
        for rows in self._rows_of(optimizer):
            parameter = rows.parameter.tensor
            mark, gradient = self._compared.get(parameter), gradient_of(parameter)
            if mark is None or parameter in self._doubtful:
                continue
            if has_kept:
                rows.replace_gradient(torch.full_like(rows.own_W(), float("nan")))
                self._note(_KEPT, rows)
            elif mark.is_still(parameter.grad):
                continue
            elif gradient is not None:
                raw = rows.copy_of("grad")
                if self._is_clipped(parameter):
                    factor = self._factor(self._clippings[parameter])
                    rows.set({"clip_coef": self.as_norm(factor)})
                    continue
                if raw is not None and parameter in self._divided:
                    selected = rows.recorded_tokens(own_rows(gradient))
                    if selected.device.type == "cpu" and not same_bits(raw, selected):
                        rows.replace_gradient(selected)  # it divides with other roundings
                    continue
                self._note(_INSIDE, rows)
            else:
                self._note(_REMOVED, rows)
            self.set_unknown_factor(optimizer)

    def set_unknown_factor(self, optimizer: Optimizer) -> None:
        """Set `clip_coef` of the matrices of an optimizer to NaN."""
        for rows in self._rows_of(optimizer):
            if self.total_norm is not None:
                rows.set({"clip_coef": self._constant(math.nan, self.total_norm)})

    def release(self) -> None:
        """Release all tensors."""
        self.begin_step()
        self._parameters, self._places, self._rows, self._before = (), {}, (), {}
        self._of_optimizer = []
        self._constants.clear()

    def last_note(self) -> None:
        """Report what was found on a device, where each step would have had to wait for it."""
        if self._are_factors is not None and not self._are_factors:
            self._note(_CHANGED, self._rows[0])

    def as_norm(self, value: torch.Tensor) -> torch.Tensor:
        """Return a norm, or a factor of it, in the type of a norm of all gradients.

        A step may have gradients of some types only.
        """
        return value.to(joint_type(frozenset((value.dtype, self._norm_type))))

    def _constant(self, value: float, like: torch.Tensor) -> torch.Tensor:
        """Return a number in the type of a norm of gradients `like` that; made once."""
        key = (str(value), type(like), like.dtype, like.device)
        if key not in self._constants:
            self._constants[key] = self.as_norm(like.new_full((), value))
        return self._constants[key]

    def _note(self, sentence: str, rows: ParameterRows) -> None:
        self._on_note(sentence.format(name=rows.parameter.name))


def _equal(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Return whether all elements are equal, or NaN in both."""
    return ((a == b) | (a.isnan() & b.isnan())).all()


def _is_product(product: torch.Tensor, matrix: torch.Tensor, factor: torch.Tensor) -> bool:
    """Return the same on the host: `product` is `matrix` times `factor` in every bit or NaN."""
    scaled = matrix * factor
    return torch.equal(scaled, product) or bool(product.isnan().any() and _equal(scaled, product))


def _neighbors(value: torch.Tensor) -> list[torch.Tensor]:
    """Return the next two numbers of the type on both sides."""
    neighbors = []
    for end in (float("inf"), float("-inf")):
        nearest = torch.nextafter(value, torch.full_like(value, end))
        neighbors += [nearest, torch.nextafter(nearest, torch.full_like(value, end))]
    return neighbors
