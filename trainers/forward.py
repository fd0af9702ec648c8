"""What the forward passes of a step show: its loss, its logits, its mean hidden state.

A step may have several micro-batches, and every one of them a forward pass.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

import torch

__all__ = ["Logits", "LogitsMode", "Losses", "Mean", "logits_of", "loss_of", "unembeds"]

LogitsMode = Literal["last", "mean"]


class Losses:
    """Loss of a step from those of its micro-batches."""

    def __init__(self, scale: float) -> None:
        self._scale = scale
        self._values: list[torch.Tensor] = []
        self._shares = False
        self._observed = False

    def add(self, loss: torch.Tensor, *, share: bool) -> None:
        """Of one micro-batch: its mean, or its share of the mean over the step."""
        if not self._observed:
            self._values.append(loss.detach())
            self._shares = share

    def observe(self, loss: torch.Tensor) -> None:
        """Of one micro-batch, as the loop tells it, in place of what was seen."""
        if not self._observed:
            self._observed, self._shares = True, False
            self._values.clear()
        self._values.append(loss.detach())

    def value(self) -> torch.Tensor | None:
        """Of the step until now; None if nothing was seen."""
        if not self._values:
            return None
        if len(self._values) == 1:
            loss = self._values[0].reshape(())
        else:
            stacked = torch.stack([value.reshape(()) for value in self._values])
            loss = stacked.sum() if self._shares else stacked.mean()
        return loss * self._scale if self._shares and self._scale != 1 else loss


class Mean:
    """Mean of means, weighted by how many things each is the mean of."""

    def __init__(self) -> None:
        self._mean: torch.Tensor | None = None
        self._count = 0

    def add(self, mean: torch.Tensor, count: int) -> None:
        """One more, of `count` things."""
        if self._mean is None:
            self._mean = mean
        else:
            weight = count / (self._count + count)
            self._mean = self._mean + (mean.float() - self._mean) * weight
        self._count += count

    def value(self) -> torch.Tensor | None:
        """Of the step until now; None if nothing was seen."""
        return self._mean


class Logits:
    """Logits of a step at the last position of its sequences."""

    def __init__(self, mode: LogitsMode) -> None:
        self._mode = mode
        self._first: torch.Tensor | None = None
        self._mean = Mean()

    def add(self, logits: torch.Tensor) -> None:
        """Of one micro-batch: (batch, position, token), or (batch, token)."""
        last = logits.detach()[:, -1] if logits.ndim == 3 else logits.detach()
        if self._mode == "mean":
            self._mean.add(last.mean(dim=0), len(last))
            self._dtype = last.dtype
        elif self._first is None:
            # A copy of one row: a view would keep the logits of the whole batch alive.
            self._first = last[0].clone()

    def value(self) -> torch.Tensor | None:
        """Of the step until now; None if nothing was seen."""
        mean = self._mean.value()
        return self._first if mean is None else mean.to(self._dtype)


def unembeds(model: torch.nn.Module, head: torch.nn.Module) -> bool:
    """Whether a module's output is logits: the model says so, or it is tied to an embedding."""
    if getattr(model, "get_output_embeddings", lambda: None)() is head:
        return True
    return any(
        isinstance(module, torch.nn.Embedding) and module.weight is getattr(head, "weight", None)
        for module in model.modules()
    )


def loss_of(output: Any) -> torch.Tensor | None:
    """Loss in what a model returned: by name, first of a tuple, or alone; None without one."""
    if isinstance(output, Mapping):
        output = output.get("loss")
    elif isinstance(output, tuple):
        output = output[0] if output else None
    scalar = isinstance(output, torch.Tensor) and output.numel() == 1 and output.ndim <= 1
    return output if scalar and output.is_floating_point() else None


def logits_of(output: Any) -> torch.Tensor | None:
    """What may be logits in what a model returned; None if nothing can be."""
    if isinstance(output, Mapping):
        output = output.get("logits")
    elif isinstance(output, tuple):
        output = next((o for o in output if isinstance(o, torch.Tensor) and o.ndim > 1), None)
    return output if isinstance(output, torch.Tensor) and output.ndim > 1 else None
