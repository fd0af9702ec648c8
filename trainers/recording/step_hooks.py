"""Capture of any training loop through public hooks.

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

from __future__ import annotations

import atexit
import contextlib
import functools
import reprlib
import threading
import weakref
from collections.abc import Callable, Sequence
from typing import Any, Self, TypeVar

import numpy.typing as npt
import torch
from torch.nn.modules.module import (
    register_module_module_registration_hook,
    register_module_parameter_registration_hook,
)
from torch.optim import Optimizer

from trajstore.errors import InvalidArgument, RecordingError, RunNotFound
from trajstore.store.storage.remote_path import Location, RunPath
from trajstore.trainers.recording.device_to_host import RowTarget
from trajstore.trainers.recording.empty_steps import EmptySteps
from trajstore.trainers.recording.examples import OF_HIDDEN_STATES, HiddenStates, StepExamples
from trajstore.trainers.recording.followed_matrices import FollowedMatrices
from trajstore.trainers.recording.forward_values import (
    BackwardPass,
    ForwardPass,
    ForwardPasses,
    mark_scaled,
)
from trajstore.trainers.recording.hooks import (
    BACKWARD,
    CLIP,
    SCALE,
    SCALER_STEP,
    UNSCALE,
    ModuleHooks,
    StepCalls,
)
from trajstore.trainers.recording.notes import FirstStep
from trajstore.trainers.recording.parameter_rows import MatrixStep, ParameterRows
from trajstore.trainers.recording.parameters import RecordedParameter, as_float64
from trajstore.trainers.recording.planned_run import Recording
from trajstore.trainers.recording.sharding import own_logits, whole
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
_SCALED_BY_HAND = (
    "the GradScaler divides the gradients of a loss that the loop has multiplied itself, so loss "
    "is NaN; pass it with observe(loss=…)"
)
_NO_STEP = (
    "{count} backward passes have ended without a step of {names}; a row is recorded when its "
    "step() is called"
)
_DROPPED, _ACCUMULATED = 20, 64  # backward passes without a step, before there is a note
_LOOSE = (
    "gradients were assigned after several forward passes, so logits, hidden states and examples "
    "of the step are not known; pass them with observe()"
)

_NAN = torch.tensor(float("nan"), device="cpu")


F = TypeVar("F", bound=Callable[..., Any])


def _guarded(method: F) -> F:
    """Make a method of the recorder end the recording when it fails; later calls do nothing."""

    @functools.wraps(method)
    def call(self: Recorder, *args: Any, **kwargs: Any) -> Any:
        if not self._handles:
            return None
        before = torch.is_grad_enabled()
        try:
            torch.set_grad_enabled(False)  # as `torch.no_grad`, which takes twice as long
            return method(self, *args, **kwargs)
        except BaseException as error:
            self._fail(error)
        finally:
            torch.set_grad_enabled(before)

    return call  # type: ignore[return-value]


class Recorder:
    """Records parameters of a model while an optimizer trains it.

    `attach`, `capture` or the callback of a Trainer creates it.

    Parameters
    ----------
    recording : Recording
    parameters : sequence of ParameterRows
        One per recorded parameter; empty in a process that does not record. In a distributed
        training those have examples, too.
    multiplied : RecordedParameter
        Matrix whose module gets the hidden states.
    on_step : callable, optional
        Called with the recorder after every step.
    must_write : path-like, optional
        Path of the run, if it is an error to complete the recording without a step.

    Attributes
    ----------
    step : int
        Optimizer steps taken, with those before the recording.
    loss : tensor, ()
        Loss of the last step; NaN if there is none.
    has_failed : bool
        True if an error in a hook has ended the recording.
    """

    def __init__(
        self,
        recording: Recording,
        parameters: Sequence[ParameterRows],
        multiplied: RecordedParameter,
        *,
        on_step: Callable[[Recorder], None] | None = None,
        must_write: RunPath | None = None,
    ) -> None:
        options, loop, notes = recording.options, recording.loop, recording.notes
        self.step = loop.first_step
        self.loss = _NAN
        self._recording = recording
        self._optimizer = recording.optimizer
        self._parameters = tuple(parameters)
        self._notes = notes
        self._on_step = on_step
        self._must_write = must_write
        self._forward = ForwardPasses(
            logits_mode=options.logits_mode,
            vocabularies=(len(rows.parameter.tensor) for rows in self._parameters),
            on_use=self._on_use,
            on_note=notes.add,
        )
        self._examples = StepExamples(options.resolved)
        receivers = (self._forward.hidden_part, self._examples.hidden_part)
        size = multiplied.tensor.shape[1]
        self._hidden = HiddenStates(self._forward, receivers, size, notes.add)
        self._has_scaler = loop.scaler is not None and loop.scaler.is_enabled()
        self._gradients = StepGradients(recording, self._parameters)
        self._matrices = FollowedMatrices(recording, self._parameters)
        self.has_failed = False
        self._first_step = FirstStep(recording.model, self._optimizer)
        self._passes: dict[int, BackwardPass] = {}  # those that run now, by their thread
        self._new_roots: list[weakref.ref[torch.Tensor]] = []  # of the step
        self._calls: dict[Optimizer, StepCalls] = {}
        self._has_closure = self._in_step = False
        self._has_new_parameters = False  # some module has, perhaps one of the model
        self._begun = 0  # steps of all optimizers
        self._backwards_before = 0  # passes when a step began
        self._summands = 0  # of the loss, in the first step that adds some
        self._empty_steps = EmptySteps(self._optimizer, self._parameters)
        self._handles: list[Any] = []
        self._begin_step()
        self._is_idle = False
        self._watch(recording.model, multiplied.head, options.hidden_from)
        atexit.register(self.close, complete=False)

    def _watch(
        self, model: torch.nn.Module, head: torch.nn.Module | None, hidden_from: str | None
    ) -> None:
        """Register all hooks."""
        hooks = ModuleHooks(self._fail)
        watched = {name for rows in self._parameters for name in rows.watched}
        self._examples.watch(hooks, model, self._forward, self._notes.add)
        if not watched.union(self._examples.variables).isdisjoint(OF_HIDDEN_STATES):
            self._hidden.watch(hooks, model, head, hidden_from)
        if self._parameters:
            self._forward.watch(hooks, model, head, watched)
            if self._recording.state is not None:
                self._recording.state.watch(hooks, model, self._forward)
        self._forward.watch_model(hooks, model)
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

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        """Close as complete, or as interrupted when an exception leaves the ``with``."""
        try:
            self.close(complete=error is None)
        except RecordingError as failure:
            if error is None:
                raise
            # The failure often has the same cause as the error.
            error.add_note(f"The recording ended with: {failure}")

    @property
    def writer(self) -> RowTarget | None:
        """Writer of the first parameter's run; None until the first step is complete."""
        return self._parameters[0].writer if self._parameters else None

    @property
    def rows(self) -> int:
        """Rows of the first parameter's run, including those that are not committed yet."""
        return self._parameters[0].rows if self._parameters else 0

    @property
    def committed_rows(self) -> int:
        """Rows that are committed in every run."""
        return min((rows for _, rows in self.recorded_rows()), default=0)

    @property
    def is_recording(self) -> bool:
        """False after the recording was closed, or has ended because of an error."""
        return bool(self._handles)

    def recorded_rows(self) -> list[tuple[Location, int]]:
        """Return the path of each parameter's run and its number of rows."""
        writers = [rows.writer for rows in self._parameters]
        return [(one.path, one.committed_rows) for one in writers if one is not None]

    def mention(self, sentence: str) -> None:
        """Add a note about the recording."""
        self._notes.mention(sentence)

    def notes(self) -> list[str]:
        """Return the notes about missing or doubtful values of the steps so far."""
        return [str(entry["note"]) for entry in self._notes.entries]

    @property
    def at_block_end(self) -> bool:
        """True if the last step has a row, and that row is the last one of a block."""
        if self.writer is None or self._parameters[0].last_step != self.step:
            return False
        return self.rows % self.writer.layout.block_rows == 0

    def observe(
        self,
        *,
        loss: torch.Tensor | None = None,
        logits: torch.Tensor | None = None,
        hidden: torch.Tensor | None = None,
        batch: npt.ArrayLike | torch.Tensor | None = None,
        example_loss: npt.ArrayLike | torch.Tensor | None = None,
    ) -> None:
        """Pass values that the hooks cannot get, once per micro-batch, before the optimizer's step.

        Parameters
        ----------
        loss : tensor, ()
            Loss of each micro-batch, not divided by their number, in place of what the backward
            passes differentiate. The mean over a step's micro-batches is recorded.
        logits : tensor, (batch, position, token) or (batch, token)
            Logits, if neither the model nor its unembedding returns them.
        hidden : tensor, (batch, position, hidden)
            Hidden states that the model multiplies by the recorded matrix, if no module of it has
            the matrix and `hidden_from` names none.
        batch : array_like of int, (example,)
            Indices of the examples in the data set. Alternatively, give the model's inputs a tensor
            ``example_index``: it is recorded and removed before the model runs.
        example_loss : array_like of float, (example,)
            Loss of each example, unless the model is a causal language model of transformers with
            ``labels``.

        Raises
        ------
        InvalidArgument
            If a value is not a tensor of floats, `hidden` has another shape, or `batch` or
            `example_loss` does not have one number for each example, which is stored exactly.
        """
        if not self.is_recording:
            return
        for name, given in (("loss", loss), ("logits", logits)):
            if given is not None and not (
                isinstance(given, torch.Tensor) and given.is_floating_point()
            ):
                raise InvalidArgument(
                    f"{name}: got {reprlib.repr(given)}, expected a tensor of floats"
                )
        if loss is not None and loss.numel() != 1:
            raise InvalidArgument(f"loss: got shape {tuple(loss.shape)}, expected one value")
        if loss is not None and self._is_idle:
            alive = (root() for root in self._roots)  # the address of another may be used again
            if any(root is not None and root.data_ptr() == loss.data_ptr() for root in alive):
                self._notes.add(_STALE)
                loss = None
        others = dict(self._examples.observe(batch=batch, example_loss=example_loss))
        if hidden is not None:
            others["hidden"] = self._hidden.observe(hidden)
        self._forward.observe(loss=loss, logits=logits, others=others)

    @_guarded
    def commit(self) -> None:
        """Commit all rows so far, and return when they are on the disk, flushed if `fsync` is set.

        Call it before you save a checkpoint, in every process of a sharded training. Then the run
        has all rows up to the checkpoint, whatever ends the process.

        Raises
        ------
        OSError, RecordingError
            If the disk fails or is full.
        """
        for rows in self._parameters:
            rows.commit()

    def close(self, *, complete: bool = True) -> None:
        """End the recording, and commit all complete rows; further calls have no effect.

        Parameters
        ----------
        complete : bool
            Mark the run ``complete``, or ``interrupted``.

        Raises
        ------
        OSError, RecordingError
            If the disk fails or is full, or a complete recording has no step.
        """
        if not self._handles:
            return
        atexit.unregister(self.close)
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        try:
            with contextlib.ExitStack() as closing:  # closes each, also if another fails
                closing.callback(self._release)
                for rows in reversed(self._parameters):
                    closing.callback(rows.close, complete=complete)
                closing.callback(self._gradients.last_note)
                closing.callback(self._matrices.check_last)
        except Exception as error:
            if self.has_failed or self._ends_training(error):
                raise
            self._mention_end(error)
        if complete and self._must_write is not None and self._parameters and self.writer is None:
            raise RecordingError(
                f"no step of {self._optimizer.named(self._optimizer.waiting)} was taken, so "
                f"{self._must_write} was not written; call the step() of each given optimizer "
                "while the recorder is open, or give those that step"
            )

    def _release(self) -> None:
        """Release all tensors: the hooks refer to the recorder, and it to them."""
        self._begin_step()
        self._matrices.release()
        self._recording.release()
        self._gradients.release()
        self._forward.release()

    def _fail(self, error: BaseException) -> None:
        """End the recording after an error in a hook; raise it if the training has to know it.

        See `RunNotes.ends_training`.
        """
        ends_training = self._ends_training(error)
        self._mention_end(error)
        try:
            self.close(complete=False)
        except Exception as failure:
            error.add_note(f"The recording ended with: {failure}")
        if ends_training:
            raise error

    def _ends_training(self, error: BaseException) -> bool:
        has_begun = all(rows.has_begun for rows in self._parameters)
        return self._notes.ends_training(error, has_begun=has_begun)

    def _mention_end(self, error: BaseException) -> None:
        self.has_failed = True
        shown = str(error) or type(error).__name__
        rest = "" if isinstance(error, RunNotFound) else "; the run keeps its complete rows"
        self._notes.mention(f"the recording ended in step {self.step + 1}: {shown}{rest}")

    # Backward passes -----------------------------------------------------------------------------

    def _on_use(self, one: ForwardPass) -> None:
        """Note that a backward pass goes through a forward pass."""
        frame = self._passes.get(threading.get_ident())
        if frame is None and len(self._passes) == 1:  # a device has a thread of its own
            (frame,) = self._passes.values()
        if frame is None:  # `torch.autograd.grad`, whose result the loop may assign
            is_first = not self._loose
            if self._loose.setdefault(one.number, one if is_first else None) is None:
                self._loose[next(iter(self._loose))] = None  # the values of several are not used
        elif one not in frame.passes:
            frame.passes.append(one)

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
            self._call(self._gradients.remember_results, result)
            self._call(self._forward.end_backward, BackwardPass())
            return result
        if thread not in self._passes:
            begun = self._begin_backward(tensors, grad_tensors)
        if begun is None:  # checkpointing calls it inside
            return run(tensors, grad_tensors, *args, **kwargs)
        frame, before = begun
        self._passes[thread] = frame
        try:
            result = run(tensors, grad_tensors, *args, **kwargs)
        finally:
            del self._passes[thread]
        self._end_backward(frame, before)
        return result

    @_guarded
    def _call(self, function: Callable[..., Any], *args: Any) -> Any:
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
    def _end_backward(self, frame: BackwardPass, before: Any) -> None:
        """Take the raw gradients before they can be clipped."""
        is_scaled = frame.scale is not None
        frame.reached = self._gradients.end_backward(
            before, is_scaled=is_scaled, is_of_model=bool(frame.passes)
        )
        if not frame.reached:
            return  # it trains something else
        self._has_scaler |= is_scaled
        self._is_idle = False
        self._backwards.append(frame)
        self._forward.end_backward(frame)
        if len(self._backwards) == _ACCUMULATED:
            self._mention_no_step(_ACCUMULATED)

    def _drop_backwards(self) -> None:
        """Forget the backward passes whose gradients the loop has discarded."""
        self._dropped += len(self._backwards)
        for one in self._backwards:
            one.drop()
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
            self._call(mark_scaled, result, scaler)
        return result

    def _on_unscale(self, run: Callable[..., Any], scaler: Any, optimizer: Any) -> Any:
        """Take the gradients that a gradient scaler has divided."""
        member = self._optimizer.member_of(optimizer) if scaler.is_enabled() else None
        if member is None:
            return run(scaler, optimizer)
        were_still = self._call(self._gradients.are_still, member)
        result = run(scaler, optimizer)
        self._after_unscale(member, were_still)
        return result

    @_guarded
    def _after_unscale(self, optimizer: Optimizer, were_still: bool) -> None:
        by_hand = [one for one in self._backwards if one.scale is None and one.is_quotient]
        for one in by_hand:
            if one.loss is None:
                one.root = None
                self._notes.mention(_SCALED_BY_HAND)
        self._gradients.after_unscale(
            optimizer, were_still=were_still, is_scaled_by_hand=bool(by_hand)
        )

    def _on_clip(self, run: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Take the factor of a call of `clip_grad_norm_`, and gradients that it will clip."""
        named = dict(zip(("parameters", "max_norm", "total_norm"), args, strict=False)) | kwargs
        self._call(self._gradients.before_clipping)
        result = run(*args, **kwargs)
        self._call(self._gradients.after_clipping, named["max_norm"], named["total_norm"])
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
            self._has_scaler = True
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
            if self._parameters:
                self._first_step.begin(optimizer.param_groups)
        self._in_step, self._is_skipped = True, False
        self._backwards_before = len(self._backwards)
        closure = args[1] if len(args) > 1 else kwargs.get("closure")
        self._has_closure = closure is not None  # accelerate passes None
        self._empty_steps.begin(optimizer, self._calls[optimizer])
        if not self._has_closure:
            self._settle(optimizer)

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
            self._gradients.settle(optimizer, inside=True)

    def _settle(self, optimizer: Optimizer) -> None:
        if not self._optimizer.turns and self._gradients.are_discarded():
            self._drop_backwards()
        self._gradients.settle(optimizer)

    def _on_step_end(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        self._after_turn(self._after_step, optimizer)

    def _after_turn(self, end: Callable[[Optimizer], None], optimizer: Optimizer) -> None:
        """End the turn of an optimizer; call `on_step` if that ends the step."""
        before = self.step
        end(optimizer)
        if self.step > before and self._on_step is not None and self.is_recording:
            self._on_step(self)

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
            self._settle(optimizer)
        elif not skipped and (calls.is_plain or not calls.has_reached):
            has_kept = self._has_kept and self._dropped > 0 and not calls.is_plain
            self._gradients.compare_again(optimizer, has_kept=has_kept)
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
        """Take the results of the step, complete its rows, and start the next step."""
        rates = [self._matrices.rates(rows) for rows in self._parameters]
        turns = self._optimizer.turns
        if len({*map(bool, turns.values())}) > 1:
            idle = self._optimizer.named(one for one, taken in turns.items() if not taken)
            self._notes.mention(_SOME_SKIPPED.format(idle=idle))
        backwards = self._backwards
        found_passes = [one for frame in backwards for one in frame.passes]
        if not backwards:
            found_passes = [one for one in self._loose.values() if one is not None]
            if len(self._loose) > 1:
                self._notes.mention(_LOOSE)
        passes = {one.number: one for one in found_passes}
        self._forward.deliver(passes.values(), {*passes, *self._loose})
        total = self._gradients.total_norm
        scalars = {
            **self._forward.values(backwards),
            **self._examples.values(),
            "grad_norm": None if total is None else self._gradients.as_norm(total),
        }
        if self._has_scaler and self._recording.state is not None:
            scale = backwards[-1].scale if backwards else None
            scalars["scale"] = as_float64(1.0 if scale is None else scale)
        if self._recording.summaries is not None:
            scalars |= self._recording.summaries.after_step()
        logits = scalars.pop("logits")
        found = {name: whole(value) for name, value in scalars.items() if value is not None}
        self.loss = found.get("loss", _NAN)
        for rows, values in zip(self._parameters, rates, strict=True):
            taken = self._optimizer.steps_of(rows.parameter.optimizer)
            if self._has_scaler or self._optimizer.ends_step is not None:
                skipped = {0: 1.0, 1: 0.0}.get(taken, float("nan"))
                values["skipped"] = torch.tensor(skipped, device="cpu")
                if not taken and "skipped" not in rows.variables:
                    self._notes.mention(_LATE_SCALER)
            if self._recording.state is not None:
                is_first = rows.writer is None
                values.update(self._recording.state.after_step(rows.variables, first=is_first))
            if logits is not None and "logits" in rows.variables:
                own = own_logits(logits, rows.parameter.tensor)
                if own is not None:
                    values["logits"] = own
            started = taken and total is not None and not self._optimizer.waiting
            rows.complete(
                MatrixStep(number=self.step + 1, values=values | found, had_effect=bool(started))
            )
        for note in self._first_step.notes(self._forward.autocast_types):
            self._notes.mention(note)
        if self._forward.loss.looks_divided:
            self._notes.mention(_DIVIDED)
        if self._forward.loss.summands:
            self._summands = self._summands or self._forward.loss.summands
            self._notes.mention(_SUM.format(count=self._summands))
        self._begin_step()
        turns.clear()
        self.step += 1

    def _begin_step(self) -> None:
        self._forward.begin_step()
        self._examples.begin_step()
        self._gradients.begin_step()
        self._backwards: list[BackwardPass] = []  # those that the step has used
        # Passes that only `torch.autograd.grad` went through, by number; None if there are several.
        self._loose: dict[int, ForwardPass | None] = {}
        self._roots, self._new_roots = self._new_roots, []
        self._matrices.begin_step()
        self._has_kept = False  # calls of a step were empty
        self._dropped = 0  # backward passes since the last step whose gradients were discarded
        self._is_idle = True
        self._in_step = self._is_several = self._is_skipped = False
