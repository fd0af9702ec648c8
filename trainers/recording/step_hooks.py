"""The hooks of a training: they take the values of the step in progress.

The hooks of step t, in the order of their calls:

========================================  ===================================================
forward hooks on the model                loss of every micro-batch, and of its examples
forward hooks on the unembedding          logits, hidden states, of every micro-batch; the hidden
                                          states also from the output of a named module
hooks on the nodes of their graphs        the forward passes that a backward pass goes through
the call of autograd's engine             the root of the pass; at its end the raw gradients,
                                          summed over the micro-batches and processes so far
`GradScaler.scale`, `unscale_`            the factor of the loss; the raw gradients without it
`clip_grad_norm_`                         the factor of clipping
step pre-hook of the optimizer            the raw gradient compared with the optimizer's one; again
                                          at the beginning of each step inside the step
step post-hook of the optimizer           the learning rate, W and the moments, the summaries of
                                          all parameters; the row is complete
`GradScaler.step`                         the mark of a skipped step; the row is complete
========================================  ===================================================

Group, rate, state, scaler and parameter are found again in each step. An error in a hook ends the
recording, not the training, unless it is an interruption or the disk is full or has failed.
"""

# Longer than other rooms: all hooks share the flags of the step in progress.

from __future__ import annotations

import functools
import threading
import weakref
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
from torch.nn.modules.module import (
    register_module_module_registration_hook,
    register_module_parameter_registration_hook,
)
from torch.optim import Optimizer

from trajstore.trainers.recording.examples import OF_HIDDEN_STATES, HiddenStates, StepExamples
from trajstore.trainers.recording.followed_matrices import FollowedMatrices
from trajstore.trainers.recording.forward_values import ForwardPasses
from trajstore.trainers.recording.hooks import (
    BACKWARD,
    CLIP,
    SCALE,
    SCALER_STEP,
    UNSCALE,
    ModuleHooks,
    StepCalls,
)
from trajstore.trainers.recording.parameter_rows import ParameterRows
from trajstore.trainers.recording.parameters import RecordedParameter
from trajstore.trainers.recording.passes import BackwardPass, ForwardPass, mark_scaled
from trajstore.trainers.recording.planned_run import Recording
from trajstore.trainers.recording.step_end import EmptySteps, StepEnd
from trajstore.trainers.recording.step_gradients import StepGradients
from trajstore.trainers.recording.torch_internals import found_overflow

_SEVERAL = (
    "optimizer.step() differentiates the loss several times; loss, logits and grad are those of "
    "the first time, at the weights of the row before, and clip_coef is NaN"
)
_STALE = (
    "observe(loss=…) got the loss of the step before, after optimizer.step(); it is not recorded: "
    "call observe before optimizer.step()"
)
_SCALED_BY_HAND = (
    "the GradScaler divides the gradients of a loss that the loop has multiplied itself, so loss "
    "is NaN; pass it with observe(loss=…)"
)
_NO_STEP = (
    "{count} backward passes have ended without a step of {names}; a row is recorded when its "
    "step() is called"
)
_DROPPED, _ACCUMULATED = 20, 64  # backward passes without a step, before there is a note

F = TypeVar("F", bound=Callable[..., Any])


def _guarded(method: F) -> F:
    """Make a method of the hooks end the recording when it fails; later calls do nothing."""

    @functools.wraps(method)
    def call(self: StepHooks, *args: Any, **kwargs: Any) -> Any:
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


class StepHooks:
    """All hooks of a recording, and what they have taken since the last step.

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
        self._recording = recording
        self._optimizer = recording.optimizer
        self._rows = rows
        self._notes = notes
        self._on_error = on_error
        self._on_step = on_step
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
        self._gradients = StepGradients(recording, rows)
        self._matrices = FollowedMatrices(recording, rows)
        self._end = StepEnd(
            recording=recording,
            rows=rows,
            forward=self._forward,
            examples=self._examples,
            gradients=self._gradients,
            matrices=self._matrices,
        )
        self._running: dict[int, BackwardPass] = {}  # those that run now, by their thread
        self._new_roots: list[weakref.ref[torch.Tensor]] = []  # of the step
        self._calls: dict[Optimizer, StepCalls] = {}
        self._has_closure = self._in_step = False
        self._has_new_parameters = False  # some module has, perhaps one of the model
        self._begun = 0  # steps of all optimizers
        self._backwards_before = 0  # passes when a step began
        self._empty_steps = EmptySteps(self._optimizer, rows)
        self._handles: list[Any] = []
        self._begin_step()
        self._is_idle = False
        self._register(recording.model, multiplied.head, options.hidden_from)

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
        self._handles = [
            hooks,
            register_module_parameter_registration_hook(self._on_registration),
            register_module_module_registration_hook(self._on_registration),
        ]
        for chain in self._optimizer.chains:
            calls = StepCalls(chain, self._before_step, self._on_step_end, self._inside_step)
            self._calls[chain[-1]] = calls
            self._handles.append(calls)
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
        return self._end.loss

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
                self._end.take_last_keyframe(self.step)
        finally:
            self._gradients.last_note()

    def release(self) -> None:
        """Release all tensors: the hooks refer to the recorder, and it to them."""
        self._begin_step()
        self._matrices.release()
        self._recording.release()
        self._gradients.release()
        self._forward.release()

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
        if loss is not None and self._is_idle:
            alive = (root() for root in self._roots)  # the address of another may be used again
            if any(root is not None and root.data_ptr() == loss.data_ptr() for root in alive):
                self._notes.add(_STALE)
                loss = None
        others = dict(self._examples.observe(batch=batch, example_loss=example_loss))
        if hidden is not None:
            others["hidden"] = self._hidden.observe(hidden)
        if inputs is not None and self._recording.inputs is not None:
            others["inputs"] = self._recording.inputs.observe(inputs)
        self._forward.observe(loss=loss, logits=logits, others=others)

    # Backward passes -----------------------------------------------------------------------------

    def _on_use(self, forward: ForwardPass) -> None:
        """Note that a backward pass goes through a forward pass."""
        backward = self._running.get(threading.get_ident())
        if backward is None and len(self._running) == 1:  # a device has a thread of its own
            (backward,) = self._running.values()
        if backward is None:  # `torch.autograd.grad`, whose result the loop may assign
            is_first = not self._grad_passes
            if self._grad_passes.setdefault(forward.number, forward if is_first else None) is None:
                self._grad_passes[next(iter(self._grad_passes))] = (
                    None  # the values of several are not used
                )
        elif forward not in backward.passes:
            backward.passes.append(forward)

    def _on_backward(
        self,
        run: Callable[..., Any],
        tensors: Any,
        grad_tensors: Any = None,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        """Surround a call of autograd's engine; `torch.autograd.grad` accumulates nothing."""
        thread = threading.get_ident()
        begun = None
        if not kwargs.get("accumulate_grad", True):
            result = run(tensors, grad_tensors, *args, **kwargs)
            self.call(self._gradients.remember_results, result)
            self.call(self._forward.end_backward, BackwardPass())
            return result
        if thread not in self._running:
            begun = self._begin_backward(tensors, grad_tensors)
        if begun is None:  # checkpointing calls it inside
            return run(tensors, grad_tensors, *args, **kwargs)
        backward, before = begun
        self._running[thread] = backward
        try:
            result = run(tensors, grad_tensors, *args, **kwargs)
        finally:
            del self._running[thread]
        self._end_backward(backward, before)
        return result

    @_guarded
    def call(self, function: Callable[..., Any], *args: Any) -> Any:
        """Call a function as a hook: its error ends the recording."""
        return function(*args)

    @_guarded
    def _begin_backward(self, tensors: Any, grad_tensors: Any) -> Any:
        """Return a new pass and the gradients before it; None if the step does not use it."""
        self._notes.step = self.step + 1
        if self._in_step and not self._is_stepping:
            self._in_step = False  # an exception has ended the step
        if self._gradients.are_discarded():
            if self._in_step and len(self._backwards) > self._backwards_before:
                self._is_several = True
            elif not self._optimizer.turns:
                self._drop_backwards()
        if not self._in_step and not self._optimizer.turns:
            for calls in self._calls.values():
                calls.call_last()
            if self._backwards:
                self._matrices.check_weights(quick=True)
            elif (
                self._matrices.follow()
                or self._gradients.are_others_trained()
                or self._has_new_parameters
            ):
                self._gradients.find_parameters()
                self._has_new_parameters = False
            self._matrices.take_initial_again()
        if self._is_several:
            return None
        single = isinstance(tensors, torch.Tensor)
        roots = [tensors] if single else list(tensors)
        factors = [grad_tensors] if single or grad_tensors is None else list(grad_tensors)
        factors += [None] * (len(roots) - len(factors))
        self._new_roots += (weakref.ref(root) for root in roots if isinstance(root, torch.Tensor))
        return BackwardPass.of(roots, factors), self._gradients.moment()

    @_guarded
    def _end_backward(self, backward: BackwardPass, before: Any) -> None:
        """Take the raw gradients before they can be clipped."""
        is_scaled = backward.scale is not None
        backward.reached = self._gradients.end_backward(
            before, is_scaled=is_scaled, is_of_model=bool(backward.passes)
        )
        if not backward.reached:
            return  # it trains something else
        self._end.has_scaler |= is_scaled
        self._is_idle = False
        self._backwards.append(backward)
        self._forward.end_backward(backward)
        if len(self._backwards) == _ACCUMULATED:
            self._mention_no_step(_ACCUMULATED)

    def _drop_backwards(self) -> None:
        """Forget the backward passes whose gradients the loop has discarded."""
        self._dropped += len(self._backwards)
        for backward in self._backwards:
            backward.drop()
        self._backwards.clear()
        self._gradients.begin_step()
        if self._dropped >= _DROPPED:
            self._mention_no_step(_DROPPED)

    def _mention_no_step(self, count: int) -> None:
        names = self._optimizer.named(self._optimizer.members)
        self._notes.mention(_NO_STEP.format(count=count, names=names))

    @property
    def _is_stepping(self) -> bool:
        return any(calls.is_running for calls in self._calls.values())

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
        were_still = self.call(self._gradients.are_still, member)
        result = run(scaler, optimizer)
        self._after_unscale(member, were_still)
        return result

    @_guarded
    def _after_unscale(self, optimizer: Optimizer, were_still: bool) -> None:
        by_hand = [
            backward
            for backward in self._backwards
            if backward.scale is None and backward.is_quotient
        ]
        for backward in by_hand:
            if backward.loss is None:
                backward.root = None
                self._notes.mention(_SCALED_BY_HAND)
        self._gradients.after_unscale(
            optimizer, were_still=were_still, is_scaled_by_hand=bool(by_hand)
        )

    def _on_clip(self, run: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Take the factor of a call of `clip_grad_norm_`, and gradients that it will clip."""
        named = dict(zip(("parameters", "max_norm", "total_norm"), args, strict=False)) | kwargs
        self.call(self._gradients.before_clipping)
        result = run(*args, **kwargs)
        self.call(self._gradients.after_clipping, named["max_norm"], named["total_norm"])
        return result

    # The optimizer's step ------------------------------------------------------------------------

    def _on_scaler_step(
        self, run: Callable[..., Any], scaler: Any, optimizer: Any, *args: Any, **kwargs: Any
    ) -> Any:
        """Surround a call of `GradScaler.step`, to detect whether it calls the optimizer."""
        member = self._optimizer.member_of(optimizer) if scaler.is_enabled() else None
        before = self._begun
        result = run(scaler, optimizer, *args, **kwargs)
        if member is not None and self._begun == before:
            self._end.has_scaler = True
            if self._is_stepping:  # of a wrapper, which calls it
                self._is_skipped = True
            else:
                self._after_turn(self._skip_step, member)
        return result

    @_guarded
    def _before_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        """Find the parameters again, and compare the optimizer's gradient with the raw one."""
        self._begun += 1
        self._optimizer.check_turn(optimizer)
        self._begin_turn(optimizer)
        if optimizer not in self._optimizer.turns:
            if self._recording.summaries is not None:
                self._recording.summaries.before_step(optimizer.param_groups)
            if self._rows:
                self._end.first_step.begin(optimizer.param_groups)
        self._in_step, self._is_skipped = True, False
        self._backwards_before = len(self._backwards)
        closure = args[1] if len(args) > 1 else kwargs.get("closure")
        self._has_closure = closure is not None  # accelerate passes None
        self._empty_steps.begin(optimizer, self._calls[optimizer])
        if not self._has_closure:
            self._compare_gradients(optimizer)

    def _begin_turn(self, optimizer: Optimizer) -> None:
        self._notes.step = self.step + 1
        if not self._optimizer.turns:
            self._matrices.take_initial_again()
            if self._matrices.find_again():
                self._gradients.find_parameters()
        self._matrices.begin_turn(optimizer)

    @_guarded
    def _inside_step(self, optimizer: Optimizer, *, ended: bool = False) -> None:
        """Compare the gradient that an inner step gets; look at what its wrapper changes."""
        if ended:
            self._matrices.end_inner_step()
            return
        if self._calls[optimizer].wrapper is not None:
            self._matrices.check_inner_step(self._calls[optimizer].wrapper, begins=True)
        if not self._has_closure:
            self._gradients.compare(optimizer, inside=True)

    def _compare_gradients(self, optimizer: Optimizer) -> None:
        if not self._optimizer.turns and self._gradients.are_discarded():
            self._drop_backwards()
        self._gradients.compare(optimizer)
        if self._recording.digests is not None:
            self._recording.digests.add_gradients(optimizer.param_groups)

    def _on_step_end(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        self._after_turn(self._after_step, optimizer)

    def _after_turn(self, end: Callable[[Optimizer], None], optimizer: Optimizer) -> None:
        """End the turn of an optimizer; call `on_step` if that ends the step."""
        before = self.step
        end(optimizer)
        if self.step > before and self._on_step is not None and self.are_registered:
            self._on_step()

    @_guarded
    def _after_step(self, optimizer: Optimizer) -> None:
        calls = self._calls[optimizer]
        if not self._is_skipped and self._empty_steps.is_empty(
            optimizer, calls, has_closure=self._has_closure
        ):
            self._in_step, self._has_kept = False, True
            return
        skipped = self._is_skipped or found_overflow(optimizer)
        if self._is_several:
            self._gradients.set_unknown_factor(optimizer)
            self._notes.mention(_SEVERAL, unproven=True)
        elif self._has_closure:
            self._compare_gradients(optimizer)
        elif not skipped and (calls.is_plain or not calls.has_reached):
            has_kept = self._has_kept and self._dropped > 0 and not calls.is_plain
            self._gradients.check_after_step(optimizer, has_kept=has_kept)
        self._matrices.check_inner_step(calls.wrapper or "a hook after the step", begins=False)
        if skipped:
            self._gradients.set_unknown_factor(optimizer)
        self._end_turn(optimizer, skipped=skipped)

    @_guarded
    def _skip_step(self, optimizer: Optimizer) -> None:
        """End the turn of an optimizer that the scaler has not called."""
        self._begin_turn(optimizer)
        self._gradients.skip(optimizer)
        self._end_turn(optimizer, skipped=True)

    def _end_turn(self, optimizer: Optimizer, *, skipped: bool) -> None:
        """Take what the next optimizer may change; the last one ends the step."""
        self._matrices.end_turn(optimizer, may_change=self._has_closure)
        if self._recording.summaries is not None:
            groups = optimizer.param_groups
            self._recording.summaries.after_update(groups, skipped=skipped)
        if self._optimizer.end_turn(optimizer, skipped=skipped):
            self._end_step()

    def _end_step(self) -> None:
        """Complete the rows of the step, and start the next one."""
        self._end.complete_rows(self.step + 1, self._backwards, self._grad_passes)
        self._begin_step()
        self._optimizer.turns.clear()
        self.step += 1

    def _begin_step(self) -> None:
        self._forward.begin_step()
        self._examples.begin_step()
        if self._recording.inputs is not None:
            self._recording.inputs.begin_step()
        self._gradients.begin_step()
        self._backwards: list[BackwardPass] = []  # those that the step has used
        # Passes that only `torch.autograd.grad` went through, by number; None if there are several.
        self._grad_passes: dict[int, ForwardPass | None] = {}
        self._roots, self._new_roots = self._new_roots, []
        self._matrices.begin_step()
        self._has_kept = False  # calls of a step were empty
        self._dropped = 0  # backward passes since the last step whose gradients were discarded
        self._is_idle = True
        self._in_step = self._is_several = self._is_skipped = False
