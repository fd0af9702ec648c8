"""The verdict about a step: it reads the tape after each optimizer's step, and completes the rows.

`gradient`, `loss` and `rates` judge one value each. Here their results meet the rows, and each
doubt becomes a note.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.optim import Optimizer

from trajstore.trainers.recording.device_to_host import Value
from trajstore.trainers.recording.examples import StepExamples
from trajstore.trainers.recording.forward_values import ForwardPasses
from trajstore.trainers.recording.gradient import (
    CHANGED,
    SEVERAL,
    Gradient,
    clip_coefficient,
    gradient,
)
from trajstore.trainers.recording.gradient_copies import GradientCopies
from trajstore.trainers.recording.loss import loss_of_step, observed_values, used_passes
from trajstore.trainers.recording.matrices import FollowedMatrices
from trajstore.trainers.recording.model_state import State
from trajstore.trainers.recording.notes import FirstStep, why_unproven
from trajstore.trainers.recording.optimizer_steps import OptimizerSteps
from trajstore.trainers.recording.parameter_rows import ParameterRows
from trajstore.trainers.recording.parameters import as_float64
from trajstore.trainers.recording.planned_run import Recording
from trajstore.trainers.recording.rates import StepRates
from trajstore.trainers.recording.sharding import own_logits, whole
from trajstore.trainers.recording.tape import Backward, Tape, Unscale
from trajstore.trainers.recording.torch_internals import counts_versions, versions

_OTHER_LIMIT = (
    "clipping did not follow from max_grad_norm={limit}; clip_coef is what the loop applied"
)
_SOME_SKIPPED = (
    "the GradScaler skipped the step of {idle} only; skipped is that of the matrix's optimizer"
)
_LATE_SCALER = (
    "the GradScaler skipped a step, which the run cannot mark, because no scaler was used in the "
    "first step; pass it: capture(…, scaler=scaler)"
)
_NO_KEYFRAME = (
    "the run has no keyframe of its last step, because parameters or buffers have changed since; "
    "close the recording before you load other weights or call the model in training mode"
)
_NO_STEP = (
    "{count} backward passes have ended without a step of {names}; a row is recorded when its "
    "step() is called"
)
_VOID = (
    "optimizer.step() found no gradient or changed no parameter in a call, so the call has no row; "
    "its backward passes belong to the next step"
)
STALE = (
    "observe(loss=…) got the loss of the step before, after optimizer.step(); it is not recorded: "
    "call observe before optimizer.step()"
)

_NAN = torch.tensor(math.nan, device="cpu")
_PASSES = 64  # backward passes without a step, before there is a note


class Traces:
    """What a step of an optimizer changes: versions, values of some parameters, and its state."""

    def __init__(self, optimizer: Optimizer, rows: Sequence[ParameterRows]) -> None:
        self._trained = [p for group in optimizer.param_groups for p in group["params"]]
        self._rows = rows
        matrices = {rows.parameter.tensor for rows in rows}
        others = [p for p in self._trained if p.grad is not None and p not in matrices]
        smallest = sorted(others, key=torch.Tensor.numel)[:1]
        self._read = [*(p for p in self._trained if p in matrices), *smallest]
        self._versions = versions(self._trained)
        self._values = [parameter.detach().clone() for parameter in self._read]
        self._states = [rows.marks_of_state() for rows in rows]

    def are_unchanged(self) -> bool:
        """Return True if nothing has changed. A device is waited for if no version tells."""
        return (
            counts_versions()
            and self._versions == versions(self._trained)
            and self._states == [rows.marks_of_state() for rows in self._rows]
            and all(map(torch.equal, self._values, self._read))
        )


@dataclass(kw_only=True, eq=False)
class Verdict:
    """Reads tapes, and completes the rows of a recording.

    Attributes
    ----------
    loss : tensor, ()
        Loss of the last step; NaN if there is none.
    """

    recording: Recording
    rows: Sequence[ParameterRows]
    forward: ForwardPasses
    examples: StepExamples
    copies: GradientCopies
    matrices: FollowedMatrices

    def __post_init__(self) -> None:
        scaler = self.recording.loop.scaler
        self.loss = _NAN
        self.rates = StepRates(self.recording, self.rows)
        self._first_step = FirstStep(self.recording.model, self.recording.optimizer)
        self._has_scaler = scaler is not None and scaler.is_enabled()
        self._optimizer = self.recording.optimizer
        self._on_note = self.recording.notes.mention
        self._of_last: dict[str, Any] = {}  # values of the last step, for its keyframe
        self._are_factors: torch.Tensor | None = None  # all changes of gradients on a device so far
        self._constants: dict[Any, torch.Tensor] = {}
        self._before: Traces | None = None
        self._has_gradients = False
        self.begin_step()

    def begin_step(self) -> None:
        """Forget the gradients of the step before."""
        self._gradients: dict[ParameterRows, Gradient] = {}

    def release(self) -> None:
        """Release all tensors."""
        self._constants.clear()
        self._of_last.clear()
        self._before = self._are_factors = None
        self.begin_step()

    # The turn of an optimizer --------------------------------------------------------------------

    def begin_turn(self, steps: OptimizerSteps) -> None:
        """Look at what a call of `step` is about to change."""
        member, turns = steps.member, self._optimizer.turns
        if not turns:
            self.matrices.find_groups()
            self.matrices.check_weights()
        if member not in turns:
            if self.recording.summaries is not None:
                self.recording.summaries.before_step(member.param_groups)
            if self.rows:
                self._first_step.begin(member.param_groups)
        self._has_gradients = (bool(turns) and self._has_gradients) or any(
            p.grad is not None for group in member.param_groups for p in group["params"]
        )
        may_be_void = not steps.is_plain and len(self._optimizer.members) == 1
        self._before = Traces(member, self.rows) if may_be_void else None

    def begin_update(self, steps: OptimizerSteps) -> None:
        """Note what makes a step unproven before its update begins."""
        if steps.wrapper is not None:
            self.matrices.check_inner_begin(steps.wrapper)
        for _, rows in self._of_turn(steps.member):
            owner, parameter = rows.parameter.optimizer, rows.parameter.tensor
            if owner is None or parameter.grad is None:
                continue
            reason = why_unproven(owner, parameter, is_compiled=steps.is_compiled)
            if reason is not None:
                self._on_note(reason, unproven=True)

    def is_void(self, steps: OptimizerSteps, *, has_closure: bool) -> bool:
        """Return True if a call of `step` has changed nothing, with a note."""
        before, self._before = self._before, None
        self._has_gradients |= has_closure
        if len(self._optimizer.members) > 1:
            return False
        if self._has_gradients:
            if steps.has_reached or before is None or not before.are_unchanged():
                return False
            is_reached = steps.has_begun and not steps.is_of_torch
            if is_reached and not any(group.get("lr", 1) for group in steps.member.param_groups):
                return False
        self._on_note(_VOID)
        return True

    def end_turn(self, steps: OptimizerSteps, tape: Tape, *, skipped: bool) -> None:
        """Read what an optimizer has got and done, before the next one can change it."""
        member = steps.member
        begin, end = tape.turn_of(member)
        for number, rows in self._of_turn(member):
            self._gradients[rows] = self._read_gradient(number, rows, tape, skipped=skipped)
        self.matrices.check_returned(steps.wrapper)
        rates = self.rates.present(member) if begin is None else begin.rates
        self.rates.end_turn(
            member, rates, end.rates if end else rates, has_closure=tape.has_closure
        )
        if self.recording.summaries is not None:
            self.recording.summaries.after_update(member.param_groups, skipped=skipped)

    def _of_turn(self, optimizer: Optimizer) -> list[tuple[int, ParameterRows]]:
        """Return the rows of an optimizer that has its first step, and those of none."""
        if optimizer in self._optimizer.turns:
            return []
        pairs = enumerate(self.rows)
        return [(n, rows) for n, rows in pairs if rows.parameter.optimizer in (optimizer, None)]

    def _read_gradient(
        self, number: int, rows: ParameterRows, tape: Tape, *, skipped: bool
    ) -> Gradient:
        """Read the gradient of a matrix, and put it into the row."""
        parameter = rows.parameter.tensor
        limit = self.recording.loop.max_grad_norm
        read = gradient(
            tape,
            number,
            parameter,
            rows.copy_of("grad"),
            limit=limit,
            skipped=skipped,
            optimizer=rows.parameter.optimizer,
            as_norm=self.copies.as_norm,
        )
        if read.is_gone and read.is_known:
            rows.forget("grad", "grad_token_norm")
        elif read.is_gone:
            rows.replace_gradient(torch.full_like(rows.own_W(), math.nan))
        elif read.grad is not None:
            rows.replace_gradient(read.grad)
        if read.are_products is not None:
            before = self._are_factors
            self._are_factors = read.are_products if before is None else before & read.are_products
        elif isinstance(read.coef, torch.Tensor) and read.coef.device.type == "cpu":
            self._check_limit(rows, read.norm, read.coef)
        for doubt in read.doubts:
            self._on_note(doubt.format(name=rows.parameter.name), unproven=doubt is SEVERAL)
        return read

    def _check_limit(self, rows: ParameterRows, total: Any, factor: torch.Tensor) -> None:
        """Note a factor of clipping that does not follow from the recorded limit."""
        schedule = self.recording.loop.schedule
        limit = schedule.get("max_grad_norm")
        if limit is None or factor == 1 or not isinstance(total, torch.Tensor):
            return
        if factor == self.copies.as_norm(clip_coefficient(total, limit)):
            return
        is_new = rows.writer is None
        if is_new and isinstance(schedule, dict):
            del schedule["max_grad_norm"]  # the run does not know the limit
        self._on_note(_OTHER_LIMIT.format(limit=limit), unproven=limit > 0 and not is_new)

    def _as_number(self, value: torch.Tensor | float, like: torch.Tensor) -> torch.Tensor:
        """Return a number in the type of a norm of gradients `like` that; constants made once."""
        if isinstance(value, torch.Tensor):
            return value
        key = (str(value), like.dtype, like.device)
        if key not in self._constants:
            constant = torch.full((), value, dtype=like.dtype, device=like.device)
            self._constants[key] = self.copies.as_norm(constant)
        return self._constants[key]

    # The end of a step ---------------------------------------------------------------------------

    def complete_rows(self, number: int, tape: Tape) -> None:
        """Complete the row of each matrix; `number` steps are taken, with this one."""
        settings = [self.rates.values(rows) for rows in self.rows]
        turns = self._optimizer.turns
        if len({*map(bool, turns.values())}) > 1:
            idle = self._optimizer.named(member for member, taken in turns.items() if not taken)
            self._on_note(_SOME_SKIPPED.format(idle=idle))
        scalars = self._scalars(tape)
        logits = scalars.pop("logits")
        values = {name: whole(value) for name, value in scalars.items() if value is not None}
        self.loss = values.get("loss", _NAN)
        for rows, of_matrix in zip(self.rows, settings, strict=True):
            self._complete(rows, number, of_matrix, logits, values)
        for note in self._first_step.notes(self.forward.autocast_types):
            self._on_note(note)

    def _scalars(self, tape: Tape) -> dict[str, torch.Tensor | None]:
        """Return what the rows of all matrices have alike, and the logits."""
        gradients = [*self._gradients.values()]
        used = used_passes(tape, gradients)
        forward = self.forward
        observed = observed_values(tape, used, forward.watched, forward.first, forward.number)
        names: set[str] = set()
        for event in observed:
            names |= event.deliver.keys()
            for call in event.deliver.values():
                call()
            event.deliver = {}  # the loop may keep the loss, whose node refers to it
        for each in sorted(used.forwards, key=lambda each: each.number):
            each.deliver(names)
        loss, about_loss = loss_of_step(tape, used, gradients, observed)
        for doubt in about_loss:
            self._on_note(doubt)
        for read in gradients:  # without a wait for the device
            if loss is not None and read.are_products is not None and tape.drops(read.source):
                loss = torch.where(read.are_products, loss, math.nan)
        norm = self._norm(tape, gradients)
        scalars = {
            **forward.values(),
            **self.examples.values(),
            "loss": loss,
            "grad_norm": norm if norm is None else self.copies.as_norm(norm),
        }
        self._has_scaler |= tape.last(Unscale) is not None or any(
            event.root.scale is not None for event in tape.all(Backward)
        )
        if self._has_scaler and self.recording.state is not None:
            scale = used.backwards[-1].root.scale if used.backwards else None
            scalars["scale"] = as_float64(1.0 if scale is None else scale)
        if self.recording.summaries is not None:
            scalars |= self.recording.summaries.after_step()
        if self.recording.inputs is not None:
            recorded = any("inputs" in rows.variables for rows in self.rows)
            scalars["inputs"] = self.recording.inputs.value() if recorded else None
        if self.recording.digests is not None:
            scalars |= self.recording.digests.after_step()
        return scalars

    def _norm(self, tape: Tape, gradients: Sequence[Gradient]) -> torch.Tensor | None:
        """Return the norm of all gradients of the step; None without gradients."""
        norms = [read.norm for read in gradients]
        if not norms:  # no step of the matrix's optimizer
            norms = [event.norm for event in tape.all(Backward)[-1:]]
        norms = [norm for norm in norms if norm is not None]
        if not norms:
            return None
        unscaled = {event.optimizer: event.norm for event in tape.all(Unscale)}
        of_several = len(self._optimizer.members) > 1
        if any(isinstance(n, float) for n in (*norms, *(unscaled.values() if of_several else ()))):
            return _NAN
        if len(self._optimizer.members) > 1 and unscaled:
            parts = [norm for norm in unscaled.values() if isinstance(norm, torch.Tensor)]
            total: torch.Tensor = torch.linalg.vector_norm(torch.stack(parts))
            return total
        norm = norms[0]
        assert isinstance(norm, torch.Tensor)
        return norm

    def _complete(
        self,
        rows: ParameterRows,
        number: int,
        values: dict[str, Value],
        logits: torch.Tensor | None,
        scalars: dict[str, torch.Tensor],
    ) -> None:
        """Complete the row of a matrix; `values` has the settings of its optimizer."""
        taken = self._optimizer.steps_of(rows.parameter.optimizer)
        if (read := self._gradients.get(rows)) is not None:
            values["clip_coef"] = self._as_number(read.coef, rows.parameter.tensor)
        if self._has_scaler or self._optimizer.ends_step is not None:
            skipped = {0: 1.0, 1: 0.0}.get(taken, math.nan)
            values["skipped"] = torch.tensor(skipped, device="cpu")
            if not taken and "skipped" not in rows.variables:
                self._on_note(_LATE_SCALER)
        keyframes = rows.keyframes
        is_keyframe = keyframes is not None and keyframes.is_due(number)
        of_state: State = {}
        if self.recording.state is not None:
            of_state = self.recording.state.after_step(
                (*rows.variables, *(keyframes.variables if keyframes else ())),
                first=rows.writer is None or (keyframes is not None and keyframes.writer is None),
                is_keyframe=is_keyframe or not self.recording.options.has_keyframes,
            )
        of_row = {name: value for name, value in of_state.items() if name in rows.variables}
        values.update(of_row if self.recording.options.has_keyframes else of_state)
        if logits is not None and "logits" in rows.variables:
            of_tokens = own_logits(logits, rows.parameter.tensor)
            if of_tokens is not None:
                values["logits"] = of_tokens
        had_effect = bool(taken and self._has_gradients and not self._optimizer.waiting)
        rows.complete(number, values | scalars, had_effect=had_effect)
        if keyframes is not None:
            self._of_last = {k: value for k, value in (values | scalars).items() if k != "logits"}
            if is_keyframe:
                row = self._of_last | of_state
                keyframes.complete(number, row, had_effect=had_effect)

    def take_last_keyframe(self, number: int) -> None:
        """Take a keyframe of the last step, unless the loop has changed the parameters since."""
        state, digests = self.recording.state, self.recording.digests
        keyframes = self.rows[0].keyframes if self.rows else None
        if keyframes is None or state is None or digests is None:
            return
        if keyframes.writer is None or keyframes.last_step == number or not self._of_last:
            return
        if not digests.is_still():
            self._on_note(_NO_KEYFRAME)
            return
        row = self._of_last | state.after_step(keyframes.variables, first=False)
        keyframes.complete(number, row, had_effect=True)

    def check_passes(self, tape: Tape) -> None:
        """Note that many passes have ended without a step."""
        if tape.forgotten + len(tape.all(Backward)) == _PASSES:
            names = self._optimizer.named(self._optimizer.members)
            self._on_note(_NO_STEP.format(count=_PASSES, names=names))

    def last_note(self) -> None:
        """Report what was found on a device, where each step would have had to wait for it."""
        if self._are_factors is not None and not self._are_factors:
            self._on_note(CHANGED.format(name=self.rows[0].parameter.name))
