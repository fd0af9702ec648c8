"""The end of an optimizer's step: whether it was one, and the rows that it completes.

An optimizer that somebody wrote may only collect gradients in a call of its step. It counts its
changes of parameters, unless it writes to `Tensor.data`; then the values of a few parameters tell.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.optim import Optimizer

from trajstore.trainers.recording.device_to_host import Value, bit_sums
from trajstore.trainers.recording.examples import StepExamples
from trajstore.trainers.recording.followed_matrices import FollowedMatrices
from trajstore.trainers.recording.forward_values import ForwardPasses
from trajstore.trainers.recording.hooks import StepCalls
from trajstore.trainers.recording.model_state import State
from trajstore.trainers.recording.notes import FirstStep
from trajstore.trainers.recording.parameter_rows import ParameterRows
from trajstore.trainers.recording.parameters import JoinedOptimizer, as_float64
from trajstore.trainers.recording.passes import BackwardPass, ForwardPass
from trajstore.trainers.recording.planned_run import Recording
from trajstore.trainers.recording.sharding import own_logits, whole
from trajstore.trainers.recording.step_gradients import StepGradients
from trajstore.trainers.recording.torch_internals import counts_versions, versions

_DIVIDED = (
    "observe(loss=…) got several quotients in a step; their mean is recorded. If each is loss / "
    "accumulation, this is too small: pass the loss before the division"
)
_SOME_SKIPPED = (
    "the GradScaler skipped the step of {idle} only; skipped is that of the matrix's optimizer"
)
_SUM = (
    "loss is the sum of what {count} backward passes of a step differentiated; for their mean, "
    "pass each loss with observe(loss=…)"
)
_LATE_SCALER = (
    "the GradScaler skipped a step, which the run cannot mark, because no scaler was used in the "
    "first step; pass it: capture(…, scaler=scaler)"
)
_SEVERAL_ASSIGNED = (
    "gradients were assigned after several forward passes, so logits, hidden states and examples "
    "of the step are not known; pass them with observe()"
)
_NO_KEYFRAME = (
    "the run has no keyframe of its last step, because parameters or buffers have changed since; "
    "close the recording before you load other weights or call the model in training mode"
)

_NAN = torch.tensor(float("nan"), device="cpu")

_WITNESS_ELEMENTS = 1 << 16  # elements that are read to see a step


class EmptySteps:
    """Compares the parameters of an optimizer before and after a call of its step.

    Parameters
    ----------
    optimizer : JoinedOptimizer
        With several members, each call is a step.
    rows : sequence of ParameterRows
    """

    def __init__(self, optimizer: JoinedOptimizer, rows: Sequence[ParameterRows]) -> None:
        self._optimizer = optimizer
        self._rows = tuple(rows)
        self._has_gradients = True
        self._versions: list[int] = []
        self._witnesses: dict[Optimizer, list[torch.Tensor]] = {}  # parameters that a step changes
        self._before: list[torch.Tensor] = []  # parameters whose sums were taken
        self._sums: list[tuple[int, int]] = []
        self._states: list[dict[str, tuple[int, int]]] = []  # what it kept of the matrices

    def begin(self, optimizer: Optimizer, calls: StepCalls) -> None:
        """Look at the parameters before a call."""
        self._has_gradients = any(
            parameter.grad is not None
            for group in optimizer.param_groups
            for parameter in group["params"]
        )
        if self._may_be_empty(calls):
            trained = self._optimizer.parameters(optimizer)
            self._versions = versions(trained)
            # A step that writes to `Tensor.data` counts nothing. At first all are read.
            self._before = self._witnesses.get(optimizer, trained)
            self._sums = bit_sums(self._before)
            self._states = [rows.marks_of_state() for rows in self._rows]

    def is_empty(self, optimizer: Optimizer, calls: StepCalls, *, has_closure: bool) -> bool:
        """Return True if the call since `begin` has changed no parameter."""
        if len(self._optimizer.members) > 1:
            return False
        counts = counts_versions() and self._may_be_empty(calls)
        if has_counted := counts and self._versions != versions(
            self._optimizer.parameters(optimizer)
        ):
            self._witnesses[optimizer] = []
        if calls.has_reached:
            return not (self._has_gradients or has_closure)
        if has_counted or not counts:
            return False
        before, self._before = self._before, []
        sums = zip(before, self._sums, bit_sums(before), strict=True)
        changed = {parameter for parameter, old, new in sums if old != new}
        if before:
            self._choose_witnesses(optimizer, changed)
        return not changed and self._states == [rows.marks_of_state() for rows in self._rows]

    def _may_be_empty(self, calls: StepCalls) -> bool:
        return not calls.is_plain and len(self._optimizer.members) == 1

    def _choose_witnesses(self, optimizer: Optimizer, changed: set[torch.Tensor]) -> None:
        """Read only the recorded and some small parameters in the next step; all after none."""
        self._witnesses.pop(optimizer, None)
        if changed:
            recorded = {rows.parameter.tensor for rows in self._rows}
            small = sorted(changed - recorded, key=torch.Tensor.numel)
            sizes = itertools.accumulate(parameter.numel() for parameter in small)
            chosen = [
                parameter
                for parameter, size in zip(small, sizes, strict=True)
                if size <= _WITNESS_ELEMENTS
            ]
            kept = recorded.intersection(self._optimizer.parameters(optimizer))
            self._witnesses[optimizer] = [*kept, *(chosen or small[:1])]


@dataclass(kw_only=True, eq=False)
class StepEnd:
    """Completes the rows of a step from what the hooks have taken.

    Attributes
    ----------
    loss : tensor, ()
        Loss of the last step; NaN if there is none.
    first_step : FirstStep
    has_scaler : bool
        True after the first use of a gradient scaler.
    """

    recording: Recording
    rows: Sequence[ParameterRows]
    forward: ForwardPasses
    examples: StepExamples
    gradients: StepGradients
    matrices: FollowedMatrices

    def __post_init__(self) -> None:
        scaler = self.recording.loop.scaler
        self.loss = _NAN
        self.first_step = FirstStep(self.recording.model, self.recording.optimizer)
        self.has_scaler = scaler is not None and scaler.is_enabled()
        self._optimizer = self.recording.optimizer
        self._on_note = self.recording.notes.mention
        self._summands = 0  # of the loss, in the first step that adds some
        self._of_last: dict[str, Any] = {}  # values of the last step, for its keyframe

    def complete_rows(
        self,
        number: int,
        backwards: Sequence[BackwardPass],
        grad_passes: Mapping[int, ForwardPass | None],
    ) -> None:
        """Take the results of a step, and complete the row of each matrix.

        Parameters
        ----------
        number : int
            Steps taken, with this one.
        backwards : sequence of BackwardPass
            Backward passes that the step has used.
        grad_passes : mapping of int to ForwardPass or None
            Passes that only `torch.autograd.grad` went through, by number; None for several.
        """
        settings = [self.matrices.rates(rows) for rows in self.rows]
        turns = self._optimizer.turns
        if len({*map(bool, turns.values())}) > 1:
            idle = self._optimizer.named(member for member, taken in turns.items() if not taken)
            self._on_note(_SOME_SKIPPED.format(idle=idle))
        self._deliver(backwards, grad_passes)
        scalars = self._scalars(backwards)
        logits = scalars.pop("logits")
        values = {name: whole(value) for name, value in scalars.items() if value is not None}
        self.loss = values.get("loss", _NAN)
        for rows, of_matrix in zip(self.rows, settings, strict=True):
            self._complete(rows, number, of_matrix, logits, values)
        self._add_notes()

    def _deliver(
        self, backwards: Sequence[BackwardPass], grad_passes: Mapping[int, ForwardPass | None]
    ) -> None:
        """Let the used forward passes deliver their values."""
        used = [forward for backward in backwards for forward in backward.passes]
        if not backwards:
            used = [forward for forward in grad_passes.values() if forward is not None]
            if len(grad_passes) > 1:
                self._on_note(_SEVERAL_ASSIGNED)
        by_number = {forward.number: forward for forward in used}
        self.forward.deliver(by_number.values(), {*by_number, *grad_passes})

    def _scalars(self, backwards: Sequence[BackwardPass]) -> dict[str, torch.Tensor | None]:
        """Return what the rows of all matrices have alike, and the logits."""
        total = self.gradients.total_norm
        scalars = {
            **self.forward.values(backwards),
            **self.examples.values(),
            "grad_norm": None if total is None else self.gradients.as_norm(total),
        }
        if self.has_scaler and self.recording.state is not None:
            scale = backwards[-1].scale if backwards else None
            scalars["scale"] = as_float64(1.0 if scale is None else scale)
        if self.recording.summaries is not None:
            scalars |= self.recording.summaries.after_step()
        if self.recording.inputs is not None:
            recorded = any("inputs" in rows.variables for rows in self.rows)
            scalars["inputs"] = self.recording.inputs.value() if recorded else None
        if self.recording.digests is not None:
            scalars |= self.recording.digests.after_step()
        return scalars

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
        if self.has_scaler or self._optimizer.ends_step is not None:
            skipped = {0: 1.0, 1: 0.0}.get(taken, float("nan"))
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
        has_gradients = self.gradients.total_norm is not None
        had_effect = bool(taken and has_gradients and not self._optimizer.waiting)
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

    def _add_notes(self) -> None:
        """Note what the step tells about the loop."""
        for note in self.first_step.notes(self.forward.autocast_types):
            self._on_note(note)
        if self.forward.loss.looks_divided:
            self._on_note(_DIVIDED)
        if self.forward.loss.summands:
            self._summands = self._summands or self.forward.loss.summands
            self._on_note(_SUM.format(count=self._summands))
