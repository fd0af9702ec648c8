"""Capture of one parameter's history through public hooks.

What each hook sees of step t, in the order in which it happens:

========================================  ===================================================
forward hook on the model                 loss
forward hook on the unembedding           logits
post-accumulate-grad hook of each         the raw gradient, before anyone clips it; the norm of
parameter                                 every gradient
`before_clipped_step` (by the loop)       the global norm and the clipping factor
step pre-hook of the optimizer            the learning rate
step post-hook of the optimizer           W and the moments; the row is complete
========================================  ===================================================

Each tensor is copied once, straight into its place in the writer's block. The run is created when
the first step is complete, because only then every native type is known; until then the initial
state and the first step are held here.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch.optim import Optimizer

from trajstore.bits import NATIVE_TYPES
from trajstore.errors import RecordingError
from trajstore.schema import VARIABLES
from trajstore.writer import RunWriter

__all__ = ["Recorder", "WriterFactory", "clip_coefficient", "unembedding"]

WriterFactory = Callable[[dict[str, str]], RunWriter]
"""Makes the run, given the native type of each variable."""

_MOMENTS = ("exp_avg", "exp_avg_sq")


def unembedding(model: torch.nn.Module) -> torch.nn.Module:
    """Module that turns hidden states into logits.

    Raises
    ------
    RecordingError
        If the model does not tell.
    """
    head = getattr(model, "get_output_embeddings", lambda: None)()
    if head is None or getattr(head, "weight", None) is None:
        raise RecordingError(
            f"{type(model).__name__} names no output embeddings, so there is no parameter to record"
        )
    return head


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


class Recorder:
    """Records the unembedding matrix of a model while an optimizer trains it.

    Parameters
    ----------
    model : Module
        In training mode during training; forward passes in evaluation mode are not recorded.
    optimizer : Optimizer
        The real one, not a wrapper.
    variables : tuple of str
        What to record. Moments are left out where the optimizer has none.
    create : callable
        Makes the run when the first step is complete.
    first_step : int
        Optimizer steps taken before.

    Raises
    ------
    RecordingError
        If the parameter is frozen, or not the optimizer's.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        optimizer: Optimizer,
        *,
        variables: tuple[str, ...],
        create: WriterFactory,
        first_step: int = 0,
    ) -> None:
        head = unembedding(model)
        self.parameter: torch.nn.Parameter = head.weight
        if not self.parameter.requires_grad:
            raise RecordingError(
                "the recorded parameter is frozen (requires_grad is False), so nothing would move"
            )
        groups = [
            g for g in optimizer.param_groups if any(p is self.parameter for p in g["params"])
        ]
        if not groups:
            raise RecordingError(
                "the recorded parameter is not among those that the optimizer trains"
            )
        self.param_group: dict[str, Any] = groups[0]
        self.step = first_step
        self.loss = torch.tensor(float("nan"))
        self.writer: RunWriter | None = None
        self._optimizer = optimizer
        self._variables = variables
        self._create = create
        self._trained = [p for p in model.parameters() if p.requires_grad]
        self._norms: dict[torch.nn.Parameter, torch.Tensor] = {}
        self._places: dict[str, torch.Tensor] = {}
        self._pending: dict[str, torch.Tensor] = {}
        self._seen: set[str] = set()
        self._initial = self.parameter.detach().to("cpu", copy=True)
        self._handles = [
            model.register_forward_hook(self._on_model_output),
            head.register_forward_hook(self._on_logits),
            *(p.register_post_accumulate_grad_hook(self._on_gradient) for p in self._trained),
            optimizer.register_step_pre_hook(self._before_step),
            optimizer.register_step_post_hook(self._after_step),
        ]

    def before_clipped_step(self, max_norm: float) -> None:
        """Tell what the loop clipped the gradients to, between clipping and `optimizer.step()`.

        Parameters
        ----------
        max_norm : float
            Greatest global norm; 0 if it did not clip.
        """
        norms = [self._norms[p] for p in self._trained if p in self._norms]
        total = torch.linalg.vector_norm(torch.stack(norms))
        self._take("grad_norm", total)
        self._take("clip_coef", clip_coefficient(total, max_norm))

    def close(self, *, complete: bool) -> None:
        """Remove all hooks, and commit what is whole."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        if self.writer is not None:
            self.writer.close("complete" if complete else "interrupted")

    def _take(self, name: str, value: torch.Tensor) -> None:
        """Copy a value of the step in progress to where it will be stored."""
        if name not in self._variables:
            return
        if name in self._seen:
            raise RecordingError(
                f"{name} came twice within step {self.step + 1}; a step of several micro-batches "
                "cannot be recorded yet, so set gradient accumulation to 1"
            )
        self._seen.add(name)
        if self.writer is None:
            self._pending[name] = value.detach().to("cpu", copy=True)
        elif name in self._places:
            place = self._places[name]
            if place.dtype != value.dtype or place.shape != value.shape:
                raise RecordingError(
                    f"{name} is {value.dtype} {tuple(value.shape)} at step {self.step + 1}, "
                    f"and was {place.dtype} {tuple(place.shape)} before"
                )
            place.copy_(value.detach())

    def _on_model_output(self, module: torch.nn.Module, args: Any, output: Any) -> None:
        if module.training and torch.is_grad_enabled():
            loss = output.get("loss") if isinstance(output, Mapping) else output[0]
            if loss is None:
                raise RecordingError("the model returned no loss; pass it labels")
            self.loss = loss.detach()
            self._take("loss", loss)

    def _on_logits(self, module: torch.nn.Module, args: Any, output: torch.Tensor) -> None:
        if module.training and torch.is_grad_enabled():
            # A copy of one row: a view would keep the logits of the whole batch alive.
            self._take("logits", output[0, -1])

    def _on_gradient(self, parameter: torch.nn.Parameter) -> None:
        gradient = parameter.grad
        assert gradient is not None
        self._norms[parameter] = torch.linalg.vector_norm(gradient)
        if parameter is self.parameter:
            self._take("grad", gradient)

    def _before_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        lr = self.param_group["lr"]
        self._take("lr", torch.as_tensor(lr, dtype=torch.float64))

    def _after_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        self._take("W", self.parameter)
        state = optimizer.state.get(self.parameter, {})
        for name in _MOMENTS:
            if name in state:
                self._take(name, state[name])
        wanted = self._places if self.writer else set(self._variables) - set(_MOMENTS)
        unseen = [name for name in wanted if name not in self._seen]
        if unseen:
            raise RecordingError(
                f"step {self.step + 1} left {', '.join(sorted(unseen))} unseen, "
                "so its row is not whole"
            )
        if self.writer is None:
            self.writer = self._begin()
        else:
            self.writer.commit_row(self.step + 1)
        self.step += 1
        self._norms.clear()
        self._seen.clear()
        self._places = {
            name: _as_tensor(place, self.writer.layout.arrays[name].native.name)
            for name, place in self.writer.next_row().items()
        }

    def _begin(self) -> RunWriter:
        """Create the run, and append the initial state and the first step."""
        first = {name: self._pending[name] for name in self._variables if name in self._pending}
        writer = self._create(
            {name: str(value.dtype).removeprefix("torch.") for name, value in first.items()}
        )
        start = {"zero": 0.0, "nan": float("nan")}
        initial = {
            name: self._initial
            if VARIABLES[name].row0 == "initial"
            else torch.full_like(value, start[VARIABLES[name].row0])
            for name, value in first.items()
        }
        writer.append(self.step, **initial)
        writer.append(self.step + 1, **first)
        self._pending.clear()
        return writer


def _as_tensor(place: npt.NDArray[Any], native: str) -> torch.Tensor:
    """Tensor of the native type over the memory of native bits."""
    signed = np.dtype(f"i{NATIVE_TYPES[native].itemsize}")
    return torch.from_numpy(place.view(signed)).view(getattr(torch, native))
