"""Capture of any training loop through public hooks.

The hooks of step t, in the order of their calls:

========================================  ===================================================
forward hooks on the unembedding          logits, hidden states, of every micro-batch; the hidden
                                          states also from the output of a named module
forward hooks on the model                loss of every micro-batch, and of its examples
end of a backward pass that reached a     the raw gradient, summed over the micro-batches so
recorded parameter                        far and over all processes; the norm of all gradients
step pre-hook of the optimizer            the learning rate, and the gradient after clipping
step post-hook of the optimizer           W and the moments, the summaries of all parameters of the
                                          model; the row is complete
`GradScaler.step`                         the mark of a skipped step; the row is complete
========================================  ===================================================

The forward hooks belong to `ForwardPasses`, `HiddenStates` and `StepExamples`, the others to
`Recorder`. Each
tensor is copied once, directly to its place in the writer's block (see `device_to_host`).
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Self

import numpy.typing as npt
import torch
from accelerate.optimizer import AcceleratedOptimizer
from accelerate.state import GradientState
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from trajstore.errors import RecordingError
from trajstore.store.storage.remote_path import Location
from trajstore.trainers.recording.compared_run import RowTarget
from trajstore.trainers.recording.forward_values import ForwardPasses, LogitsMode
from trajstore.trainers.recording.hidden_states import OF_HIDDEN_STATES, HiddenStates
from trajstore.trainers.recording.model_parameters import ModelParameters
from trajstore.trainers.recording.model_state import ModelState
from trajstore.trainers.recording.options import TrainingLoop
from trajstore.trainers.recording.parameter_rows import ParameterRows
from trajstore.trainers.recording.parameters import unwrap
from trajstore.trainers.recording.sharding import (
    agreed,
    is_distributed,
    is_sharded,
    own_logits,
    own_rows,
    total_norm,
    whole,
)
from trajstore.trainers.recording.step_examples import StepExamples
from trajstore.trainers.recording.torch_internals import (
    call_when_backward_ends,
    found_overflow,
    version,
)
from trajstore.values.optimizer_rule import MOMENTS

__all__ = ["Recorder", "clip_coefficient", "real_optimizer"]


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


def real_optimizer(optimizer: Any) -> Optimizer:
    """Return the optimizer inside accelerate's wrapper."""
    while isinstance(optimizer, AcceleratedOptimizer):
        optimizer = optimizer.optimizer
    if not isinstance(optimizer, Optimizer):
        raise RecordingError(
            f"got {type(optimizer).__name__}, expected a torch.optim.Optimizer; pass the optimizer "
            "that trains the parameter"
        )
    return optimizer


class _RawGradient(NamedTuple):
    """A gradient after the backward pass: the tensor, its version, its unscaled norm."""

    tensor: torch.Tensor
    version: int
    norm: torch.Tensor


class Recorder:
    """Records parameters of a model while an optimizer trains it.

    `trainers.capture` or the callback of a Trainer creates it.

    Parameters
    ----------
    model : Module
        In training mode during training; forward passes in evaluation mode are not recorded.
    optimizer : Optimizer
        An optimizer, or accelerate's wrapper of one.
    parameters : sequence of ParameterRows
        One per recorded parameter; empty in a process that does not record.
    model_parameters : ModelParameters, optional
        Given if summaries of all parameters of the model are recorded.
    model_state : ModelState, optional
        Given if the state of the model is recorded.
    loop : TrainingLoop
    examples : StepExamples
        In a distributed training all processes have one, also those that do not record.
    head : Module or None
        Module that multiplies hidden states by a recorded parameter.
    hidden_size : int
        Elements of a hidden state.
    hidden_from : str, optional
        Name of the module whose output is the hidden states; default: they are the input of `head`.
    logits_mode : {'last', 'mean'}
        Logits at the last position: of the first sequence, or the mean over the step's sequences.
    on_step : callable, optional
        Called with the recorder after every optimizer step.

    Attributes
    ----------
    step : int
        Optimizer steps taken, including those that a scaler skipped.
    loss : tensor, ()
        Loss of the last step.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        optimizer: Any,
        parameters: Sequence[ParameterRows],
        model_parameters: ModelParameters | None = None,
        model_state: ModelState | None = None,
        *,
        loop: TrainingLoop,
        examples: StepExamples,
        head: torch.nn.Module | None,
        hidden_size: int,
        hidden_from: str | None = None,
        logits_mode: LogitsMode = "last",
        on_step: Callable[[Recorder], None] | None = None,
    ) -> None:
        self.step = loop.first_step
        self.loss = torch.tensor(float("nan"))
        self._optimizer = real_optimizer(optimizer)
        self._parameters = tuple(parameters)
        self._whole = model_parameters
        self._state = model_state
        self._forward = ForwardPasses(
            logits_mode=logits_mode,
            loss_scale=loop.loss_scale,
            vocabularies=(len(rows.parameter.tensor) for rows in self._parameters),
        )
        self._examples = examples
        self._hidden = HiddenStates((self._forward, examples), hidden_size)
        scaler = loop.scaler
        self._scaler = scaler if scaler is not None and scaler.is_enabled() else None
        self._max_grad_norm = loop.max_grad_norm
        self._on_step = on_step
        inner = unwrap(model)
        self._all = list(inner.parameters())
        types = {p.dtype for p in self._all if p.requires_grad and p.is_floating_point()}
        self._norm_type = functools.reduce(torch.promote_types, types, torch.bool)
        self._backward_end_is_queued = False
        self._total_norm: torch.Tensor | None = None
        self._raw_gradients: list[_RawGradient] = []
        self._handles: list[RemovableHandle] = [
            self._optimizer.register_step_pre_hook(self._before_step),
            self._optimizer.register_step_post_hook(self._after_step),
        ]
        self._handles += examples.watch(inner)
        watched = {name for rows in self._parameters for name in rows.watched}
        if not watched.union(examples.variables).isdisjoint(OF_HIDDEN_STATES):
            self._handles += self._hidden.watch(inner, head, hidden_from)
        if self._parameters:
            self._watch_passes(inner, head, watched)
        if self._scaler is not None:
            self._watch_scaler(self._scaler)

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

    def recorded_rows(self) -> list[tuple[Location, int]]:
        """Return the path of each parameter's run and its number of rows."""
        writers = [rows.writer for rows in self._parameters]
        return [(one.path, one.committed_rows) for one in writers if one is not None]

    def notes(self) -> list[str]:
        """Return notes about missing or doubtful values of the steps so far."""
        found = []
        if any("loss" in rows.left_out for rows in self._parameters):
            found.append(
                "loss is not recorded, because the model does not return it; pass it before each "
                "optimizer.step() with observe(loss=loss)"
            )
        if self._forward.loss_looks_divided:
            found.append(
                "observe(loss=…) got several quotients in a step; their mean is recorded. If each "
                "is loss / accumulation, this is too small: pass the loss before the division"
            )
        return found

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
            Loss of each micro-batch, not divided by their number, if the model does not return it.
            The mean over a step's micro-batches is recorded.
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
            If `hidden` has another shape, or `batch` or `example_loss` does not have one number for
            each example.
        """
        if hidden is not None:
            self._hidden.observe(hidden)
        self._forward.observe(loss=loss, logits=logits)
        self._examples.observe(batch=batch, example_loss=example_loss)

    def close(self, *, complete: bool) -> None:
        """Remove all hooks and commit all complete rows; further calls have no effect."""
        if not self._handles:
            return
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        if self._scaler is not None:
            del self._scaler.step  # restores the method of the class
        with contextlib.ExitStack() as closing:  # closes each, also if another fails
            for rows in reversed(self._parameters):
                closing.callback(rows.close, complete=complete)

    def _watch_passes(
        self, model: torch.nn.Module, head: torch.nn.Module | None, variables: set[str]
    ) -> None:
        """Register the hooks of the forward and backward passes."""
        recorded = [rows.parameter for rows in self._parameters]
        self._handles += self._forward.watch(model, head, variables)
        reached = [parameter.tensor for parameter in recorded]
        if self._state is not None:  # a backward pass may reach some parameters only
            self._handles += self._state.watch(model)
            reached = [p for p in self._all if p.requires_grad]
        self._handles += [
            parameter.register_post_accumulate_grad_hook(self._on_gradient) for parameter in reached
        ]

    def _watch_scaler(self, scaler: Any) -> None:
        """Wrap the scaler's `step`, to detect whether it calls the optimizer."""
        original = scaler.step

        def step(optimizer: Any, *args: Any, **kwargs: Any) -> Any:
            before = self.step
            result = original(optimizer, *args, **kwargs)
            if real_optimizer(optimizer) is self._optimizer and self.step == before:
                self._skip_step()
            return result

        scaler.step = step

    # Backward --------------------------------------------------------------------------------

    def _on_gradient(self, parameter: torch.Tensor) -> None:
        # Other gradients, or other processes' shares of this one, may still be missing.
        if not self._backward_end_is_queued:
            self._backward_end_is_queued = True
            call_when_backward_ends(self._on_backward_end)

    def _on_backward_end(self) -> None:
        if is_distributed():
            # Such a callback also averages gradients over the processes; run after it.
            call_when_backward_ends(self._after_backward)
        else:
            self._after_backward()

    @torch.no_grad()
    def _after_backward(self) -> None:
        """Take the raw gradient before it can be clipped."""
        self._backward_end_is_queued = False
        if not GradientState().sync_gradients:
            return  # accelerate or the Trainer has more micro-batches for this step
        gradients = [p.grad for p in self._all if p.grad is not None]
        if any(gradient.is_sparse for gradient in gradients):
            raise RecordingError(
                "got a sparse gradient, expected dense ones; build the embedding with sparse=False"
            )
        unscale = 1.0 if self._scaler is None else 1.0 / self._scaler.get_scale()
        self._raw_gradients.clear()
        for rows in self._parameters:
            gradient = rows.parameter.tensor.grad
            if self._state is not None:
                self._state.after_backward(rows, unscale)
                if gradient is None:  # another backward pass of the step may reach it
                    continue
            if gradient is None:
                raise RecordingError(
                    f"{rows.parameter.name} has no gradient after the backward pass; use it in the "
                    "forward pass of every step"
                )
            gradient = own_rows(gradient)
            norm = torch.linalg.vector_norm(gradient) * unscale
            self._raw_gradients.append(_RawGradient(gradient, version(gradient), norm))
            raw = gradient if unscale == 1.0 else gradient * unscale
            rows.set("grad", raw)
            rows.set_gradient_norms(raw)
        if self._whole is not None:
            self._whole.after_backward(unscale)
        self._total_norm = total_norm(gradients) * unscale

    # The optimizer's step ----------------------------------------------------------------------

    @torch.no_grad()
    def _before_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        """Take the learning rate, and compare the optimizer's gradient with the raw one."""
        self._set_learning_rates()
        if self._whole is not None:
            self._whole.before_step()
        # There are no raw gradients if no backward pass has reached a recorded parameter.
        for rows, raw in zip(self._parameters, self._raw_gradients, strict=False):
            rows.set("clip_coef", self._as_norm(self._observed_clip_coefficient(rows, raw)))

    def _set_learning_rates(self) -> None:
        for rows in self._parameters:
            rate = rows.parameter.group["lr"]
            if isinstance(rate, torch.Tensor) and rate.device.type == "mps":
                rate = rate.cpu()  # MPS has no float64
            rows.set("lr", torch.as_tensor(rate, dtype=torch.float64))
            if self._state is not None:
                self._state.before_step(rows)

    def _observed_clip_coefficient(self, rows: ParameterRows, raw: _RawGradient) -> torch.Tensor:
        """Return the factor of the gradient since the backward pass; NaN if unknown."""
        assert self._total_norm is not None
        total = self._total_norm
        parameter = rows.parameter.tensor
        unknown = torch.full_like(total, float("nan"))
        if parameter.grad is None:
            return unknown
        consumed = own_rows(parameter.grad)
        # If several processes hold the gradient, all compare, and the result has to agree.
        untouched = consumed is raw.tensor and version(consumed) == raw.version
        if untouched and not is_sharded(parameter):
            return torch.ones_like(total)
        recorded = rows.copy_of("grad")
        seen = rows.recorded_tokens(consumed)
        factor = unknown
        for candidate in (torch.ones_like(total), clip_coefficient(total, self._max_grad_norm)):
            if recorded is not None and recorded.device == seen.device:
                expected = recorded * candidate
                same = ((expected == seen) | (expected.isnan() & seen.isnan())).all()
            else:
                after = torch.linalg.vector_norm(consumed).float()  # MPS has no float64
                before = raw.norm.float()
                same = torch.isclose(after, before * candidate.float(), rtol=1e-2, atol=0)
            factor = torch.where(agreed(same, parameter), candidate, factor)
        return factor

    def _as_norm(self, value: torch.Tensor) -> torch.Tensor:
        """Return a norm, or a factor of it, in the type of a norm of all gradients.

        A step may have gradients of some types only.
        """
        return value.to(torch.promote_types(value.dtype, self._norm_type))

    def _scale(self) -> torch.Tensor | None:
        """Return the factor by which the scaler multiplied the loss of the step."""
        if self._scaler is None or self._state is None:
            return None
        return torch.tensor(self._scaler.get_scale(), dtype=torch.float64)

    def _after_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        self._end_step(skipped=found_overflow(optimizer))

    def _skip_step(self) -> None:
        """End a step in which the scaler has not called the optimizer."""
        self._set_learning_rates()
        if self._total_norm is not None:
            for rows in self._parameters:
                unknown = torch.full_like(self._total_norm, float("nan"))
                rows.set("clip_coef", self._as_norm(unknown))
        self._end_step(skipped=True)

    @torch.no_grad()
    def _end_step(self, *, skipped: bool) -> None:
        """Take the results of the step, complete its rows, and start the next step."""
        scalars = {
            **self._forward.values(),
            **self._examples.values(),
            "grad_norm": None if self._total_norm is None else self._as_norm(self._total_norm),
            "skipped": torch.tensor(float(skipped)) if self._scaler is not None else None,
            "scale": self._scale(),
        }
        if self._whole is not None:
            scalars |= self._whole.after_step(skipped=skipped)
        logits = scalars.pop("logits")
        scalars = {name: None if value is None else whole(value) for name, value in scalars.items()}
        if scalars["loss"] is not None:
            self.loss = scalars["loss"]
        for rows in self._parameters:
            parameter = rows.parameter.tensor
            rows.set("W", parameter)
            rows.set_cells()
            state = self._optimizer.state.get(parameter, {})
            for name in MOMENTS:
                if name in state:
                    rows.set(name, state[name])
            rows.set_change_norms()
            if self._state is not None:
                self._state.after_step(rows)
            if logits is not None and "logits" in rows.variables:
                scalars["logits"] = own_logits(logits, parameter)
            for name, value in scalars.items():
                if value is not None:
                    rows.set(name, value)
            rows.end_row(self.step + 1, skipped=skipped)
        self.step += 1
        self._forward.begin_step()
        self._hidden.begin_step()
        self._examples.begin_step()
        self._total_norm = None
        self._raw_gradients.clear()
        if self._on_step is not None:
            self._on_step(self)
