"""Capture of training through public hooks, whatever the loop.

What each hook sees of step t, in the order in which it happens:

========================================  ===================================================
forward hooks on the unembedding          logits, mean hidden state, of every micro-batch
forward hook on the model                 loss of every micro-batch
end of a backward pass that reached a     the raw gradient, summed over the micro-batches until
recorded parameter                        now and over all processes; the norm of all gradients
step pre-hook of the optimizer            the learning rate, and what became of the gradient
step post-hook of the optimizer           W and the moments; the row is complete
`GradScaler.step`                         that a step was skipped; the row is complete
========================================  ===================================================

Each tensor is copied once, straight into its place in the writer's block (see `transfer`).
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch
from accelerate.optimizer import AcceleratedOptimizer
from accelerate.state import GradientState
from torch.autograd import Variable
from torch.optim import Optimizer

from trainers.forward import Logits, LogitsMode, Losses, Mean, logits_of, loss_of, unembeds
from trainers.history import MOMENTS, History
from trainers.parameter import unwrap
from trajstore.errors import RecordingError
from trajstore.writer import RunWriter

__all__ = ["Recorder", "clip_coefficient", "real_optimizer"]


def clip_coefficient(total_norm: torch.Tensor, max_norm: float) -> torch.Tensor:
    """Factor that `torch.nn.utils.clip_grad_norm_` multiplies gradients by, with its own roundings.

    Parameters
    ----------
    total_norm : tensor, ()
    max_norm : float
        0 is no clipping.
    """
    if max_norm <= 0:
        return torch.ones_like(total_norm)
    return torch.clamp(max_norm / (total_norm + 1e-6), max=1.0)


def real_optimizer(optimizer: Any) -> Optimizer:
    """Optimizer inside accelerate's wrapper."""
    while isinstance(optimizer, AcceleratedOptimizer):
        optimizer = optimizer.optimizer
    if not isinstance(optimizer, Optimizer):
        raise RecordingError(f"got {type(optimizer).__name__}, expected a torch Optimizer")
    return optimizer


class Recorder:
    """Records parameters of a model while an optimizer trains it.

    Made by `trainers.capture`, or by the callback of a Trainer.

    Parameters
    ----------
    model : Module
        In training mode during training; forward passes in evaluation mode are not recorded.
    optimizer : Optimizer
        Or accelerate's wrapper of it.
    histories : sequence of History
        One for each recorded parameter; none in a process that does not record.
    logits_mode : {'last', 'mean'}
        Logits at the last position: of the first sequence, or the mean over the step's sequences.
    scaler : GradScaler, optional
        That the loop scales its loss with.
    max_grad_norm : float
        Global norm that the loop clips gradients to; 0 if it does not, or not to a global norm.
    loss_scale : float
        What the loop multiplies a loss by that the model was given ``num_items_in_batch`` for.
    first_step : int
        Optimizer steps taken before.
    on_step : callable, optional
        Called with the recorder after every optimizer step.

    Attributes
    ----------
    step : int
        Optimizer steps taken, those counted that a scaler skipped.
    loss : tensor, ()
        Of the last step.

    Raises
    ------
    RecordingError
        If a parameter is not the optimizer's.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        optimizer: Any,
        histories: Sequence[History],
        *,
        logits_mode: LogitsMode = "last",
        scaler: Any = None,
        max_grad_norm: float = 0.0,
        loss_scale: float = 1.0,
        first_step: int = 0,
        on_step: Callable[[Recorder], None] | None = None,
    ) -> None:
        self.step = first_step
        self.loss = torch.tensor(float("nan"))
        self._optimizer = real_optimizer(optimizer)
        self._histories = tuple(histories)
        self._groups = [_group(self._optimizer, history) for history in self._histories]
        self._logits_mode = logits_mode
        self._scaler = scaler if scaler is not None and scaler.is_enabled() else None
        self._max_grad_norm = max_grad_norm
        self._loss_scale = loss_scale
        self._on_step = on_step
        inner = unwrap(model)
        self._trained = [p for p in inner.parameters() if p.requires_grad]
        self._queued = False
        self._forget()
        self._handles = [
            self._optimizer.register_step_pre_hook(self._before_step),
            self._optimizer.register_step_post_hook(self._after_step),
        ]
        if self._histories:
            self._attach(inner)
        if self._scaler is not None:
            self._watch_scaler()

    @property
    def writer(self) -> RunWriter | None:
        """Writer of the first parameter's run; None until the first step is complete."""
        return self._histories[0].writer if self._histories else None

    @property
    def rows(self) -> int:
        """Rows of the first parameter's run, those included that are not committed yet."""
        return self._histories[0].rows if self._histories else 0

    @property
    def at_block_end(self) -> bool:
        """Whether the last step has a row, and that row is the last one of a block."""
        if self.writer is None or self._histories[0].last_step != self.step:
            return False
        return self.rows % self.writer.layout.block_rows == 0

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """Group of the optimizer that each recorded parameter belongs to."""
        return self._groups

    def observe(
        self, *, loss: torch.Tensor | None = None, logits: torch.Tensor | None = None
    ) -> None:
        """Tell what the hooks cannot see, once for each micro-batch, before the optimizer steps.

        Parameters
        ----------
        loss : tensor, ()
            Where the model does not return it. The mean over a step's micro-batches is recorded.
        logits : tensor, (batch, position, token) or (batch, token)
            Where they are not what the model returns or its unembedding makes.
        """
        if loss is not None:
            self._losses.observe(loss)
        if logits is not None:
            if not self._logits_observed:
                self._logits = Logits(self._logits_mode)
                self._logits_observed = True
            self._logits.add(logits)

    def close(self, *, complete: bool) -> None:
        """Remove all hooks, and commit what is whole. Twice does no harm."""
        if not self._handles:
            return
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        if self._scaler is not None:
            del self._scaler.step  # the class's own is seen again
        for history in self._histories:
            history.close(complete=complete)

    def _attach(self, model: torch.nn.Module) -> None:
        # A hook that is compiled into the model's graph could not copy anything.
        eager: Callable[[Any], Any] = (
            torch.compiler.disable if "torch._dynamo" in sys.modules else lambda hook: hook
        )
        self._handles.append(
            model.register_forward_hook(eager(self._on_model_output), with_kwargs=True)
        )
        head = next((h.parameter.head for h in self._histories if h.parameter.head), None)
        wanted = {name for history in self._histories for name in history.variables}
        if head is not None and "logits" in wanted and unembeds(model, head):
            self._handles.append(head.register_forward_hook(eager(self._on_logits)))
        if head is not None and "hidden_mean" in wanted:
            self._handles.append(head.register_forward_pre_hook(eager(self._on_hidden)))
        self._handles += [
            h.parameter.tensor.register_post_accumulate_grad_hook(self._on_gradient)
            for h in self._histories
        ]

    def _watch_scaler(self) -> None:
        original = self._scaler.step

        def step(optimizer: Any, *args: Any, **kwargs: Any) -> Any:
            before = self.step
            result = original(optimizer, *args, **kwargs)
            if real_optimizer(optimizer) is self._optimizer and self.step == before:
                self._skip_step()
            return result

        self._scaler.step = step

    def _forget(self) -> None:
        """Begin the next step."""
        self._losses = Losses(self._loss_scale)
        self._logits = Logits(self._logits_mode)
        self._logits_observed = False
        self._head_seen = False
        self._hidden = Mean()
        self._total_norm: torch.Tensor | None = None
        self._raw: list[tuple[torch.Tensor, int, torch.Tensor]] = []

    # Forward ---------------------------------------------------------------------------------

    def _on_hidden(self, module: torch.nn.Module, args: tuple[Any, ...]) -> None:
        if module.training and torch.is_grad_enabled() and isinstance(args[0], torch.Tensor):
            hidden = args[0].detach()
            mean = hidden.mean(dim=tuple(range(hidden.ndim - 1)), dtype=torch.float32)
            self._hidden.add(mean, hidden[..., 0].numel())

    def _on_logits(self, module: torch.nn.Module, args: Any, output: torch.Tensor) -> None:
        if module.training and torch.is_grad_enabled():
            self._head_seen = True
            if not self._logits_observed:
                self._logits.add(output)

    def _on_model_output(
        self, module: torch.nn.Module, args: Any, kwargs: dict[str, Any], output: Any
    ) -> None:
        if not (module.training and torch.is_grad_enabled()):
            return
        loss, logits = loss_of(output), logits_of(output)
        if loss is not None:
            self._losses.add(loss, share=kwargs.get("num_items_in_batch") is not None)
        if not self._head_seen and not self._logits_observed and logits is not None:
            rows = {len(history.parameter.tensor) for history in self._histories}
            if logits.ndim in (2, 3) and logits.shape[-1] in rows:
                self._logits.add(logits)
        self._head_seen = False

    # Backward --------------------------------------------------------------------------------

    def _on_gradient(self, parameter: torch.nn.Parameter) -> None:
        if not self._queued:
            self._queued = True
            Variable._execution_engine.queue_callback(self._backward_ends)

    def _backward_ends(self) -> None:
        if torch.distributed.is_available() and torch.distributed.is_initialized():
            # Gradients are averaged over the processes by another such callback: be after it.
            Variable._execution_engine.queue_callback(self._after_backward)
        else:
            self._after_backward()

    @torch.no_grad()
    def _after_backward(self) -> None:
        self._queued = False
        if not GradientState().sync_gradients:
            return  # accelerate, or the Trainer, has more micro-batches for this step
        unscale = 1.0 if self._scaler is None else 1.0 / self._scaler.get_scale()
        self._raw.clear()
        for history in self._histories:
            gradient = history.parameter.tensor.grad
            if gradient is None:
                raise RecordingError(f"{history.parameter.name} got no gradient")
            norm = torch.linalg.vector_norm(gradient) * unscale
            self._raw.append((gradient, gradient._version, norm))
            raw = gradient if unscale == 1.0 else gradient * unscale
            history.take("grad", raw)
            history.take_grad_norm(raw)
        gradients = [p.grad for p in self._trained if p.grad is not None]
        self._total_norm = torch.nn.utils.get_total_norm(gradients) * unscale

    # The optimizer's step ----------------------------------------------------------------------

    @torch.no_grad()
    def _before_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        for history, group in zip(self._histories, self._groups, strict=True):
            history.take("lr", torch.as_tensor(group["lr"], dtype=torch.float64))
        for history, (gradient, version, norm) in zip(self._histories, self._raw, strict=False):
            history.take("clip_coef", self._observed_factor(history, gradient, version, norm))

    def _observed_factor(
        self, history: History, gradient: torch.Tensor, version: int, norm: torch.Tensor
    ) -> torch.Tensor:
        """What the gradient was multiplied by since the backward pass; NaN if that is unknown."""
        assert self._total_norm is not None
        total = self._total_norm
        consumed = history.parameter.tensor.grad
        if consumed is gradient and consumed._version == version:
            return torch.ones_like(total)
        unknown = torch.full_like(total, float("nan"))
        if consumed is None:
            return unknown
        raw = history.taken("grad")
        seen = history.selected(consumed)
        factor = unknown
        candidates = [torch.ones_like(total), clip_coefficient(total, self._max_grad_norm)]
        for candidate in candidates:
            if raw is not None and raw.device == seen.device:
                expected = raw * candidate
                same = ((expected == seen) | (expected.isnan() & seen.isnan())).all()
            else:
                after = torch.linalg.vector_norm(consumed).double()
                same = torch.isclose(after, norm.double() * candidate.double(), rtol=1e-2, atol=0)
            factor = torch.where(same, candidate, factor)
        return factor

    def _after_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        # Fused optimizers are called also when the scaler found an overflow, and do nothing then.
        found = getattr(optimizer, "found_inf", None)
        self._complete(skipped=found is not None and bool(found))

    def _skip_step(self) -> None:
        for history, group in zip(self._histories, self._groups, strict=True):
            history.take("lr", torch.as_tensor(group["lr"], dtype=torch.float64))
            if self._total_norm is not None:
                history.take("clip_coef", torch.full_like(self._total_norm, float("nan")))
        self._complete(skipped=True)

    @torch.no_grad()
    def _complete(self, *, skipped: bool) -> None:
        small = {
            "loss": self._losses.value(),
            "logits": self._logits.value(),
            "hidden_mean": self._hidden.value(),
            "grad_norm": self._total_norm,
            "skipped": torch.tensor(float(skipped)) if self._scaler is not None else None,
        }
        if small["loss"] is not None:
            self.loss = small["loss"]
        for history in self._histories:
            parameter = history.parameter.tensor
            history.take("W", parameter)
            state = self._optimizer.state.get(parameter, {})
            for name in MOMENTS:
                if name in state:
                    history.take(name, state[name])
            history.take_motion()
            for name, value in small.items():
                if value is not None and (name != "logits" or len(value) == len(parameter)):
                    history.take(name, value)
            history.finish(self.step + 1, skipped=skipped)
        self.step += 1
        self._forget()
        if self._on_step is not None:
            self._on_step(self)


def _group(optimizer: Optimizer, history: History) -> dict[str, Any]:
    for group in optimizer.param_groups:
        if any(p is history.parameter.tensor for p in group["params"]):
            return group
    raise RecordingError(
        f"{history.parameter.name} is not among the parameters that the optimizer trains"
    )
