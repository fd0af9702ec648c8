"""The hooks of a training: they have the tape of the step in progress written, and read at its end.

The hooks of step t, in the order of their calls:

========================================  ===================================================
forward hooks on the model                loss of every micro-batch, and of its examples
forward hooks on the unembedding          logits, hidden states, of every micro-batch; the hidden
                                          states also from the output of a named module
hooks on the nodes of their graphs        the forward passes that a backward pass goes through
the call of autograd's engine             `Backward` or `Gradients`; the raw gradients
`GradScaler.scale`, `unscale_`            the factor of the loss; `Unscale`
`clip_grad_norm_`                         `Clip`
`step` of the optimizer                   what comes before it; `Begin` and `End` of each step
                                          inside it; when it has returned, the verdict
`GradScaler.step`                         the verdict about a skipped step
========================================  ===================================================

They decide the depth of a step: `TapeWriter` writes, and `Verdict` judges. An error in
a hook ends the recording, not the training, unless it is an interruption or the disk is full or has
failed.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
from torch.nn.modules.module import (
    register_module_module_registration_hook,
    register_module_parameter_registration_hook,
)
from torch.optim import Optimizer

from trajstore.trainers.recording.examples import OF_HIDDEN_STATES, HiddenStates, StepExamples
from trajstore.trainers.recording.forward_values import ForwardPass, ForwardPasses
from trajstore.trainers.recording.gradient_copies import GradientCopies
from trajstore.trainers.recording.graphs import mark_scaled
from trajstore.trainers.recording.hooks import (
    BACKWARD,
    CLIP,
    SCALE,
    SCALER_STEP,
    UNSCALE,
    ModuleHooks,
)
from trajstore.trainers.recording.matrices import FollowedMatrices
from trajstore.trainers.recording.optimizer_steps import OptimizerSteps
from trajstore.trainers.recording.parameter_rows import ParameterRows
from trajstore.trainers.recording.parameters import RecordedParameter
from trajstore.trainers.recording.planned_run import Recording
from trajstore.trainers.recording.tape import (
    Void,
)
from trajstore.trainers.recording.tape_writer import RunningPass, TapeWriter
from trajstore.trainers.recording.torch_internals import (
    found_overflow,
    has_other_hooks,
)
from trajstore.trainers.recording.verdict import STALE, Verdict

F = TypeVar("F", bound=Callable[..., Any])


def _guarded(method: F) -> F:
    """Make a method of the hooks end the recording when it fails; later calls do nothing."""

    @functools.wraps(method)
    def call(self: Listeners, *args: Any, **kwargs: Any) -> Any:
        if not self.are_registered:
            return None
        before = torch.is_grad_enabled()
        try:
            torch.set_grad_enabled(False)  # as `torch.no_grad`, which takes twice as long
            return method(self, *args, **kwargs)
        except BaseException as error:
            self._on_error(error)
        finally:
            torch.set_grad_enabled(before)

    return call  # type: ignore[return-value]


class Listeners:
    """All hooks of a recording, and the tape of the step in progress.

    Parameters
    ----------
    recording : Recording
    rows : sequence of ParameterRows
        One per recorded parameter; empty in a process that does not record.
    multiplied : RecordedParameter
        Matrix whose module gets the hidden states.
    on_error : callable
        Called with the error of a hook.
    on_step : callable, optional
        Called after every step, unless the recording has ended.

    Attributes
    ----------
    step : int
        Optimizer steps taken, with those before the recording.
    """

    def __init__(
        self,
        recording: Recording,
        rows: Sequence[ParameterRows],
        multiplied: RecordedParameter,
        *,
        on_error: Callable[[BaseException], None],
        on_step: Callable[[], None] | None = None,
    ) -> None:
        options, notes = recording.options, recording.notes
        self.step = recording.loop.first_step
        self._recording, self._rows, self._notes = recording, rows, notes
        self._optimizer = recording.optimizer
        self._on_error, self._on_step = on_error, on_step
        self._forward = ForwardPasses(
            logits_mode=options.logits_mode,
            vocabularies=(len(matrix.parameter.tensor) for matrix in rows),
            on_use=self._on_use,
            on_note=notes.add,
        )
        self._examples = StepExamples(options.resolved)
        receivers = (self._forward.hidden_part, self._examples.hidden_part)
        size = multiplied.tensor.shape[1]
        self._hidden = HiddenStates(self._forward, receivers, size, notes.add)
        self._copies = GradientCopies(recording, rows)
        self._writer = TapeWriter(recording, rows, self._copies)
        self._matrices = FollowedMatrices(recording, rows)
        self._verdict = Verdict(
            recording=recording,
            rows=rows,
            forward=self._forward,
            examples=self._examples,
            copies=self._copies,
            matrices=self._matrices,
        )
        self._running: dict[int, RunningPass] = {}  # those that run now, by their thread
        self._has_new_parameters = False  # some module has, perhaps one of the model
        self._begun = 0  # calls of steps, and steps inside them
        self._begin_step()
        self._steps: dict[Optimizer, OptimizerSteps] = {}
        self._handles: list[Any] = []
        try:
            self._register(recording.model, multiplied.head, options.hidden_from)
        except BaseException:
            self.remove()
            raise

    def _register(
        self, model: torch.nn.Module, head: torch.nn.Module | None, hidden_from: str | None
    ) -> None:
        """Register all hooks."""
        hooks = ModuleHooks(self._on_error)
        watched = {name for rows in self._rows for name in rows.watched}
        self._examples.watch(hooks, model, self._forward, self._notes.add)
        if not watched.union(self._examples.variables).isdisjoint(OF_HIDDEN_STATES):
            self._hidden.watch(hooks, model, head, hidden_from)
        if self._rows:
            self._forward.watch(hooks, model, head, watched)
            if self._recording.state is not None:
                self._recording.state.watch(hooks, model, self._forward, self._notes.mention)
        self._forward.watch_model(hooks, model)
        if self._recording.inputs is not None:
            self._recording.inputs.watch(hooks, model, self._forward)
        self._handles += [
            hooks,
            register_module_parameter_registration_hook(self._on_registration),
            register_module_module_registration_hook(self._on_registration),
        ]
        calls = self._on_call, self._on_begin, self._on_end, self._on_return
        for chain in self._optimizer.chains:
            self._steps[chain[-1]] = steps = OptimizerSteps(chain, *calls)
            self._handles.append(steps)
        self._handles += [
            BACKWARD.listen(self._on_backward),
            SCALE.listen(self._on_scale),
            UNSCALE.listen(self._on_unscale),
            SCALER_STEP.listen(self._on_scaler_step),
            *(clip.listen(self._on_clip) for clip in CLIP),
        ]

    def _on_registration(self, module: torch.nn.Module, name: str, part: Any) -> None:
        """Take note that some module has got a parameter or a module."""
        self._has_new_parameters = True

    @property
    def are_registered(self) -> bool:
        """False after `remove`."""
        return bool(self._handles)

    @property
    def loss(self) -> torch.Tensor:
        """Loss of the last step; NaN if there is none."""
        return self._verdict.loss

    def remove(self) -> None:
        """Remove all hooks."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def check_end(self) -> None:
        """Note what only the end of the recording can tell, and take the last keyframe."""
        try:
            self._matrices.check_last()
            with torch.no_grad():
                self._verdict.take_last_keyframe(self.step)
        finally:
            self._verdict.last_note()

    def release(self) -> None:
        """Release all tensors: the hooks refer to the recorder, and it to them."""
        self._begin_step()
        self._matrices.release()
        self._recording.release()
        self._verdict.release()
        self._forward.release()

    @_guarded
    def call(self, function: Callable[..., Any], *args: Any) -> Any:
        """Call a function as a hook: its error ends the recording."""
        return function(*args)

    def _begin_step(self) -> None:
        self._writer.begin_step()
        self._is_fresh = True  # nothing has happened since the last row
        self._is_skipped = False
        self._forward.begin_step()
        self._examples.begin_step()
        if self._recording.inputs is not None:
            self._recording.inputs.begin_step()
        self._verdict.begin_step()
        self._verdict.rates.begin_step()
        self._matrices.begin_step()

    def _first_event(self) -> None:
        """Find the matrices and the parameters again when a step begins."""
        self._notes.step = self.step + 1
        if not self._is_fresh or self._optimizer.turns:
            return
        self._is_fresh = False
        self._matrices.take_initial_again()
        if self._matrices.follow() or self._copies.are_others() or self._has_new_parameters:
            self._copies.find_parameters()
            self._has_new_parameters = False

    def observe(
        self,
        *,
        loss: torch.Tensor | None,
        logits: torch.Tensor | None,
        hidden: torch.Tensor | None,
        batch: Any,
        example_loss: Any,
        inputs: Any,
    ) -> None:
        """Use values from the loop in place of those from the hooks; see `Recorder.observe`."""
        deliver = dict(self._examples.observe(batch=batch, example_loss=example_loss))
        if hidden is not None:
            deliver["hidden"] = self._hidden.observe(hidden)
        if inputs is not None and self._recording.inputs is not None:
            deliver["inputs"] = self._recording.inputs.observe(inputs)
        if logits is not None:
            deliver["logits"] = self._forward.observed_logits(logits)
        if not self._writer.observe(loss, deliver, self._forward.number):
            self._notes.add(STALE)

    # Backward passes -----------------------------------------------------------------------------

    def _on_use(self, forward: ForwardPass) -> None:
        """Note that a backward pass goes through a forward pass."""
        running = self._running.get(threading.get_ident())
        if running is None and len(self._running) == 1:  # a device has a thread of its own
            (running,) = self._running.values()
        if running is not None and forward not in running.forwards:
            running.forwards.append(forward)

    def _on_backward(
        self,
        run: Callable[..., Any],
        tensors: Any,
        grad_tensors: Any = None,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        """Surround a call of autograd's engine."""
        thread = threading.get_ident()
        accumulates = kwargs.get("accumulate_grad", True)
        outer = self._running.get(thread)
        begun: RunningPass | None = None
        if outer is None or not accumulates:  # checkpointing calls it inside
            begun = self._begin_pass(tensors, grad_tensors, accumulates)
        if begun is None:
            return run(tensors, grad_tensors, *args, **kwargs)
        self._running[thread] = begun
        try:
            result = run(tensors, grad_tensors, *args, **kwargs)
        finally:
            del self._running[thread]
            if outer is not None:
                self._running[thread] = outer
        self._end_pass(begun, None if accumulates else result)
        return result

    @_guarded
    def _begin_pass(self, tensors: Any, grad_tensors: Any, accumulates: bool) -> RunningPass:
        if not self._is_stepping:
            for steps in self._steps.values():
                steps.order_hooks()  # a `step` that was bound early does not
            self._first_event()
        return self._writer.begin_pass(tensors, grad_tensors, accumulates=accumulates)

    @_guarded
    def _end_pass(self, running: RunningPass, results: Any) -> None:
        self._writer.end_pass(running, results, is_inside=self._is_stepping)
        self._verdict.check_passes(self._writer.tape)

    @property
    def _is_stepping(self) -> bool:
        return any(steps.is_running for steps in self._steps.values())

    # Calls of torch that change gradients --------------------------------------------------------

    def _on_scale(self, run: Callable[..., Any], scaler: Any, outputs: Any) -> Any:
        """Mark the losses that a gradient scaler multiplies."""
        result = run(scaler, outputs)
        if scaler.is_enabled():
            self.call(mark_scaled, result, scaler)
        return result

    def _on_unscale(self, run: Callable[..., Any], scaler: Any, optimizer: Any) -> Any:
        """Take the gradients that a gradient scaler has divided."""
        member = self._optimizer.member_of(optimizer) if scaler.is_enabled() else None
        if member is None:
            return run(scaler, optimizer)
        before = self.call(self._writer.before_unscale)
        result = run(scaler, optimizer)
        self.call(self._writer.after_unscale, member, before)
        return result

    def _on_clip(self, run: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Take gradients that a call of `clip_grad_norm_` will clip, and those after it."""
        named = dict(zip(("parameters", "max_norm", "total_norm"), args, strict=False)) | kwargs
        begins = self.call(self._writer.before_clip)
        result = run(*args, **kwargs)
        self.call(self._after_clip, float(named["max_norm"]), named["total_norm"], begins)
        return result

    def _after_clip(self, max_norm: float, total: torch.Tensor, begins: Any) -> None:
        self._writer.after_clip(max_norm, total, begins)
        for steps in self._steps.values():
            if steps.is_running and not steps.has_reached and steps.has_begun:
                self._write_begin(steps)  # an own optimizer clips, and then updates

    # The optimizer's step ------------------------------------------------------------------------

    def _on_scaler_step(
        self, run: Callable[..., Any], scaler: Any, optimizer: Any, *args: Any, **kwargs: Any
    ) -> Any:
        """Surround a call of `GradScaler.step`, to detect whether it calls the optimizer."""
        member = self._optimizer.member_of(optimizer) if scaler.is_enabled() else None
        before = self._begun
        result = run(scaler, optimizer, *args, **kwargs)
        if member is not None and self._begun == before:
            if self._steps[member].is_running:  # of a wrapper, which calls it
                self._is_skipped = True
            else:
                self._end_turn(self._skip, self._steps[member])
        return result

    @_guarded
    def _skip(self, steps: OptimizerSteps) -> None:
        """End the turn of an optimizer that the scaler has not called."""
        self._first_event()
        self._verdict.begin_turn(steps)
        self._end(steps, skipped=True)

    @_guarded
    def _on_call(self, steps: OptimizerSteps, args: Any, kwargs: Any) -> None:
        """A step of the loop begins."""
        self._begun += 1
        self._optimizer.check_turn(steps.member)
        self._is_skipped = False
        self._first_event()
        self._verdict.begin_turn(steps)
        closure = args[0] if args else kwargs.get("closure")
        self._writer.tape.has_closure = closure is not None  # accelerate passes None

    @_guarded
    def _on_begin(self, steps: OptimizerSteps) -> None:
        """A step of the innermost optimizer begins."""
        self._begun += 1
        self._verdict.begin_update(steps)
        self._write_begin(steps)

    def _write_begin(self, steps: OptimizerSteps) -> None:
        rates = self._verdict.rates.present(steps.member)
        self._writer.begin(steps.member, rates)
        self._verdict.rates.check_begin(steps.member, rates)

    @_guarded
    def _on_end(self, steps: OptimizerSteps) -> None:
        """A step of the innermost optimizer has ended, before other hooks."""
        member, tape = steps.member, self._writer.tape
        is_first = tape.turn_of(member)[1] is None
        self._writer.end(member, self._verdict.rates.present(member, waits=tape.has_closure))
        if (is_first and steps.wrapper is not None) or has_other_hooks(member):
            self._matrices.copy_updated()

    def _on_return(self, steps: OptimizerSteps, *, failed: bool) -> None:
        """A step of the loop has returned, or an exception has ended it."""
        if failed:
            self.call(self._writer.forget_turn, steps.member)
        else:
            self._end_turn(self._after_step, steps)

    @_guarded
    def _after_step(self, steps: OptimizerSteps) -> None:
        tape = self._writer.tape
        skipped = self._is_skipped or found_overflow(steps.member)
        if not skipped and self._verdict.is_void(steps, has_closure=tape.has_closure):
            self._writer.forget_turn(steps.member)
            tape.events.append(Void())
            return
        tape.has_reached = steps.has_reached
        self._end(steps, skipped=skipped)

    def _end(self, steps: OptimizerSteps, *, skipped: bool) -> None:
        """Read the turn of an optimizer; the last one ends the step."""
        self._verdict.end_turn(steps, self._writer.tape, skipped=skipped)
        if self._optimizer.end_turn(steps.member, skipped=skipped):
            self._verdict.complete_rows(self.step + 1, self._writer.tape)
            self._begin_step()
            self._optimizer.turns.clear()
            self.step += 1

    def _end_turn(self, end: Callable[[OptimizerSteps], None], steps: OptimizerSteps) -> None:
        """End the turn of an optimizer; call `on_step` if that ends the step."""
        before = self.step
        end(steps)
        if self.step > before and self._on_step is not None and self.are_registered:
            self._on_step()
