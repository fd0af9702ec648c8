"""Capture of any training loop through public hooks.

The hooks of step t, in the order of their calls:

========================================  ===================================================
forward hooks on the model                loss of every micro-batch, and of its examples
forward hooks on the unembedding          logits, hidden states, of every micro-batch; the hidden
                                          states also from the output of a named module
hooks on the nodes of their graphs        the forward passes that a backward pass goes through
`torch.autograd.backward`                 the root of the pass; at its end the raw gradients,
                                          summed over the micro-batches and processes so far
step pre-hook of the optimizer            the raw gradient compared with the optimizer's one
step post-hook of the optimizer           the learning rate, W and the moments, the summaries of
                                          all parameters; the row is complete
`GradScaler.step`                         the mark of a skipped step; the row is complete
========================================  ===================================================

Group, rate, state, scaler and parameter are found again in each step. An error in a hook ends the
recording, not the training, unless it is an interruption or the disk has failed.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import reprlib
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Self, TypeVar

import numpy.typing as npt
import torch
from torch.optim import Optimizer

from trajstore.errors import InvalidArgument, RecordingError
from trajstore.store.storage.remote_path import Location
from trajstore.trainers.recording.compared_run import RowTarget
from trajstore.trainers.recording.first_step import FirstStep
from trajstore.trainers.recording.followed_matrices import FollowedMatrices
from trajstore.trainers.recording.forward_values import (
    BackwardPass,
    ForwardPass,
    ForwardPasses,
)
from trajstore.trainers.recording.hidden_states import OF_HIDDEN_STATES, HiddenStates
from trajstore.trainers.recording.joined_optimizer import unwrapped
from trajstore.trainers.recording.module_hooks import ModuleHooks
from trajstore.trainers.recording.optimizer_hooks import OuterStep, watch_steps
from trajstore.trainers.recording.parameter_rows import ParameterRows
from trajstore.trainers.recording.parameters import RecordedParameter
from trajstore.trainers.recording.planned_run import Recording
from trajstore.trainers.recording.run_notes import CannotFollow
from trajstore.trainers.recording.sharding import own_logits, whole
from trajstore.trainers.recording.step_examples import StepExamples
from trajstore.trainers.recording.step_gradients import StepGradients
from trajstore.trainers.recording.torch_internals import found_overflow, outside_compile
from trajstore.trainers.recording.watched_calls import BACKWARD, SCALER_STEP

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
_LOOSE = (
    "gradients were assigned after several forward passes, so logits, hidden states and examples "
    "of the step are not known; pass them with observe()"
)


F = TypeVar("F", bound=Callable[..., Any])


def _guarded(method: F) -> F:
    """Make a method of the recorder end the recording when it fails; later calls do nothing."""

    @functools.wraps(method)
    def call(self: Recorder, *args: Any, **kwargs: Any) -> Any:
        if not self.is_recording:
            return None
        try:
            return method(self, *args, **kwargs)
        except BaseException as error:
            self._fail(error)

    return call  # type: ignore[return-value]


class Recorder:
    """Records parameters of a model while an optimizer trains it.

    `trainers.capture` or the callback of a Trainer creates it.

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
    ) -> None:
        options, loop, notes = recording.options, recording.loop, recording.notes
        self.step = loop.first_step
        self.loss = torch.tensor(float("nan"))
        self._recording = recording
        self._optimizer = recording.optimizer
        self._parameters = tuple(parameters)
        self._notes = notes
        self._on_step = on_step
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
        self._scaler = loop.scaler if loop.scaler and loop.scaler.is_enabled() else None
        self._gradients = StepGradients(recording, self._parameters)
        self._matrices = FollowedMatrices(recording, self._parameters)
        self.has_failed = False
        self._first_step = FirstStep(recording.model, self._optimizer)
        self._passes: dict[int, BackwardPass] = {}  # those that run now, by their thread
        self._backwards: list[BackwardPass] = []  # those that the step has used
        self._new_roots: list[weakref.ref[torch.Tensor]] = []  # of the step
        self._steps = OuterStep(self._before_step, self._on_step_end, self._inside_step)
        self._has_closure = self._in_step = False
        self._turns = 0  # of all optimizers
        self._scale = 1.0  # factor of the loss in the last backward pass
        self._handles: list[Any] = []
        self._begin_step()
        self._is_idle = False
        self._watch(recording.model, multiplied.head, options.hidden_from)
        atexit.register(self.close, complete=False)

    def _watch(
        self, model: torch.nn.Module, head: torch.nn.Module | None, hidden_from: str | None
    ) -> None:
        """Register all hooks."""
        before, after = outside_compile(self._steps.before), outside_compile(self._steps.after)
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
        self._handles = [hooks]
        for optimizer in self._optimizer.members:
            self._handles += watch_steps(optimizer, before, after)
        BACKWARD.listen(self._on_backward)
        SCALER_STEP.listen(self._on_scaler_step)

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
        if hidden is not None:
            self._hidden.observe(hidden)
        self._forward.observe(loss=loss, logits=logits)
        self._examples.observe(batch=batch, example_loss=example_loss)

    def close(self, *, complete: bool) -> None:
        """Remove all hooks and commit all complete rows; further calls have no effect."""
        if not self._handles:
            return
        atexit.unregister(self.close)
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        BACKWARD.ignore(self._on_backward)
        SCALER_STEP.ignore(self._on_scaler_step)
        with contextlib.ExitStack() as closing:  # closes each, also if another fails
            closing.callback(self._release)
            for rows in reversed(self._parameters):
                closing.callback(rows.close, complete=complete)
            closing.callback(self._gradients.last_note)
            closing.callback(self._matrices.check_last)

    def _release(self) -> None:
        """Release all tensors: the hooks refer to the recorder, and it to them."""
        self._begin_step()
        self._matrices.release()
        self._recording.release()
        self._gradients.release()
        self._forward.release()

    def _fail(self, error: BaseException) -> None:
        """End the recording after an error in a hook; raise it if the training has to know it.

        That is so for an interruption, a failed disk, and every error if `strict` is set.
        """
        self.has_failed = True
        shown = str(error) or type(error).__name__
        self._notes.mention(
            f"the recording ended in step {self.step + 1}: {shown}; the run keeps its complete rows"
        )
        try:
            self.close(complete=False)
        except Exception as failure:
            error.add_note(f"The recording ended with: {failure}")
        own = isinstance(error, RecordingError | OSError) and not isinstance(error, CannotFollow)
        if own or not isinstance(error, Exception) or self._notes.strict:
            raise error

    # Backward passes -----------------------------------------------------------------------------

    def _on_use(self, one: ForwardPass) -> None:
        """Note that a backward pass goes through a forward pass."""
        frame = self._passes.get(threading.get_ident())
        if frame is None and len(self._passes) == 1:  # a device has a thread of its own
            (frame,) = self._passes.values()
        if frame is None:  # `torch.autograd.grad`, whose result the loop may assign
            frame = self._loose
        if one not in frame.passes:
            frame.passes.append(one)

    @contextlib.contextmanager
    def _on_backward(
        self, tensors: Any, grad_tensors: Any = None, *args: Any, **kwargs: Any
    ) -> Iterator[None]:
        """Surround a call of `torch.autograd.backward`."""
        thread = threading.get_ident()
        if thread in self._passes or not self.is_recording:  # checkpointing calls it inside
            yield
            return
        begun = self._begin_backward(tensors, grad_tensors)
        if begun is None:
            yield
            return
        frame, before = begun
        self._passes[thread] = frame
        try:
            yield
        finally:
            del self._passes[thread]
        self._end_backward(frame, before)

    @_guarded
    def _begin_backward(self, tensors: Any, grad_tensors: Any) -> Any:
        """Return a new pass and the gradients before it; None if the step does not use it."""
        if self._in_step and not self._steps.is_running:
            self._in_step = False  # an exception has ended the step
        if self._gradients.are_discarded():
            if self._in_step and self._backwards:
                self._is_several = True
            elif not self._optimizer.turns:
                self._backwards.clear()
                self._gradients.begin_step()
        if self._backwards and not self._in_step and not self._optimizer.turns:
            self._matrices.check_weights(quick=True)
        if self._is_several:
            return None
        return self._with_root(tensors, grad_tensors), self._gradients.marks()

    @_guarded
    def _end_backward(self, frame: BackwardPass, before: Any) -> None:
        """Take the raw gradients before they can be clipped."""
        if not self._gradients.are_changed_since(before):
            return  # it trains something else
        self._is_idle = False
        self._backwards.append(frame)
        self._gradients.take(1.0 / self._scale)

    def _with_root(self, tensors: Any, grad_tensors: Any) -> BackwardPass:
        self._scale = 1.0 if self._scaler is None else self._scaler.get_scale()
        roots = [tensors] if isinstance(tensors, torch.Tensor) else list(tensors)
        if any(root.numel() != 1 for root in roots):
            return BackwardPass()
        values = [root.detach().reshape(()) for root in roots]
        if grad_tensors is not None:
            given = [grad_tensors] if isinstance(grad_tensors, torch.Tensor) else grad_tensors
            factors = [1 if one is None else one.detach().reshape(()) for one in given]
            values = [value * factor for value, factor in zip(values, factors, strict=True)]
        value = values[0] if len(values) == 1 else torch.stack(values).sum()
        loss = self._forward.model_loss_of(roots[0]) if len(roots) == 1 else None
        self._new_roots += map(weakref.ref, roots)
        return BackwardPass(root=value.clone(), scale=self._scale, loss=loss)

    # The optimizer's step ------------------------------------------------------------------------

    @contextlib.contextmanager
    def _on_scaler_step(
        self, scaler: Any, optimizer: Any, *args: Any, **kwargs: Any
    ) -> Iterator[None]:
        """Surround a call of `GradScaler.step`, to detect whether it calls the optimizer."""
        optimizer = unwrapped(optimizer)
        ours = optimizer in self._optimizer.members and scaler.is_enabled()
        if ours and scaler is not self._scaler:
            self._adopt(scaler)
        before = self._turns
        yield
        if ours and self._turns == before:
            self._after_turn(self._skip_step, optimizer)

    @_guarded
    def _adopt(self, scaler: Any) -> None:
        """Use a scaler that was not passed, or that replaces the one that was."""
        if len(self._optimizer.members) > 1:
            raise RecordingError(
                "the loop uses a GradScaler that was not passed, which may have unscaled some of "
                "the gradients; pass it: capture(…, scaler=scaler)"
            )
        self._scaler = scaler
        self._gradients.begin_step()
        self._was_adopted = True
        self._scale = scaler.get_scale()
        for one in self._backwards:
            one.scale = self._scale
        self._notes.mention(
            "the loop uses a GradScaler that was not passed as scaler=; the gradient of its first "
            "step is recorded as the optimizer got it"
        )

    @_guarded
    @torch.no_grad()
    def _before_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        """Find the parameters again, and compare the optimizer's gradient with the raw one."""
        self._optimizer.check_turn(optimizer)
        self._begin_turn(optimizer)
        if optimizer not in self._optimizer.turns:
            if self._recording.summaries is not None:
                self._recording.summaries.before_step(optimizer.param_groups)
            if self._parameters:
                self._first_step.begin(optimizer.param_groups)
        self._in_step = True
        self._has_closure = len(args) > 1 or kwargs.get("closure") is not None
        if not self._has_closure:
            self._settle(optimizer)

    def _begin_turn(self, optimizer: Optimizer) -> None:
        self._notes.step = self.step + 1
        if not self._optimizer.turns:
            self._matrices.find_again()
        self._matrices.begin_turn(optimizer)

    @_guarded
    @torch.no_grad()
    def _inside_step(self, optimizer: Optimizer) -> None:
        if not self._has_closure:
            self._gradients.compare_again(optimizer, inside=True)

    def _settle(self, optimizer: Optimizer) -> None:
        if not self._optimizer.turns and self._gradients.are_discarded():
            self._backwards.clear()
            self._gradients.begin_step()
        fused = hasattr(optimizer, "grad_scale")
        self._gradients.settle(
            optimizer, 1.0 / self._scale if fused else 1.0, may_be_assigned=not self._was_adopted
        )

    def _on_step_end(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        self._after_turn(self._after_step, optimizer)

    def _after_turn(self, end: Callable[[Optimizer], None], optimizer: Optimizer) -> None:
        """End the turn of an optimizer; call `on_step` if that ends the step."""
        before = self.step
        end(optimizer)
        if self.step > before and self._on_step is not None and self.is_recording:
            self._on_step(self)

    @_guarded
    @torch.no_grad()
    def _after_step(self, optimizer: Optimizer) -> None:
        if self._is_several:
            self._gradients.set_unknown_factor(optimizer)
            self._notes.mention(_SEVERAL, unproven=True)
        elif self._has_closure:
            self._settle(optimizer)
        else:
            self._gradients.compare_again(optimizer)
        skipped = found_overflow(optimizer)
        if skipped:
            self._gradients.set_unknown_factor(optimizer)
        self._end_turn(optimizer, skipped=skipped)

    @_guarded
    @torch.no_grad()
    def _skip_step(self, optimizer: Optimizer) -> None:
        """End the turn of an optimizer that the scaler has not called."""
        self._begin_turn(optimizer)
        self._gradients.settle(optimizer, may_be_assigned=False)
        self._gradients.set_unknown_factor(optimizer)
        self._end_turn(optimizer, skipped=True)

    def _end_turn(self, optimizer: Optimizer, *, skipped: bool) -> None:
        """Take what the next optimizer may change; the last one ends the step."""
        self._turns += 1
        self._matrices.end_turn(optimizer, may_change=self._has_closure)
        if self._recording.summaries is not None:
            groups = optimizer.param_groups
            self._recording.summaries.after_update(groups, skipped=skipped)
        if self._optimizer.end_turn(optimizer, skipped=skipped):
            self._end_step()

    def _end_step(self) -> None:
        """Take the results of the step, complete its rows, and start the next step."""
        self._matrices.set_rates()
        turns = self._optimizer.turns
        if len({*map(bool, turns.values())}) > 1:
            idle = self._optimizer.named(one for one, taken in turns.items() if not taken)
            self._notes.mention(_SOME_SKIPPED.format(idle=idle))
        backwards = self._backwards
        passes = {one.number: one for frame in backwards or [self._loose] for one in frame.passes}
        if not backwards and len(passes) > 1:
            passes = {}
            self._notes.mention(_LOOSE)
        for number in sorted(passes):
            passes[number].deliver()
        total = self._gradients.total_norm
        scalars = {
            **self._forward.values(backwards),
            **self._examples.values(),
            "grad_norm": None if total is None else self._gradients.as_norm(total),
        }
        if self._scaler is not None and self._recording.state is not None:
            scalars["scale"] = torch.tensor(self._scale, dtype=torch.float64)
        if self._recording.summaries is not None:
            scalars |= self._recording.summaries.after_step()
        logits = scalars.pop("logits")
        found = {name: whole(value) for name, value in scalars.items() if value is not None}
        self.loss = found.get("loss", torch.tensor(float("nan")))
        for rows in self._parameters:
            parameter = rows.parameter.tensor
            taken = self._optimizer.steps_of(rows.parameter.optimizer)
            if self._scaler is not None or self._optimizer.ends_step is not None:
                rows.set("skipped", torch.tensor({0: 1.0, 1: 0.0}.get(taken, float("nan"))))
            rows.set("W", parameter)
            rows.set_cells()
            rows.set_state()
            rows.set_change_norms()
            if self._recording.state is not None:
                state = self._recording.state.after_step(rows.variables, first=rows.writer is None)
                for name, vector in state.items():
                    rows.set(name, vector)
            if logits is not None and "logits" in rows.variables:
                own = own_logits(logits, parameter)
                if own is not None:
                    rows.set("logits", own)
            for name, value in found.items():
                rows.set(name, value)
            started = taken and total is not None and not self._optimizer.waiting
            rows.end_row(self.step + 1, had_effect=bool(started))
        for note in self._first_step.notes(self._forward.autocast_types):
            self._notes.mention(note)
        if self._forward.loss.looks_divided:
            self._notes.mention(_DIVIDED)
        self._begin_step()
        turns.clear()
        self.step += 1

    def _begin_step(self) -> None:
        self._forward.begin_step()
        self._hidden.begin_step()
        self._examples.begin_step()
        self._gradients.begin_step()
        self._backwards = []
        self._loose = BackwardPass()
        self._roots, self._new_roots = self._new_roots, []
        self._matrices.begin_step()
        self._is_idle = True
        self._in_step = self._is_several = self._was_adopted = False
