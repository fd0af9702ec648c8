"""Values from the forward passes of a step: loss, logits, mean and spread of the hidden states.

A step may have several micro-batches, each with a forward pass. `ForwardPasses` accumulates their
values. They are combined when the step ends.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Literal

import torch
from torch.utils.hooks import RemovableHandle

from trajstore.trainers.recording.torch_internals import outside_compile

__all__ = [
    "ForwardPasses",
    "HiddenSpread",
    "LogitsMode",
    "StepLogits",
    "StepLoss",
    "WeightedMean",
    "is_trained",
    "logits_of",
    "loss_of",
]

LogitsMode = Literal["last", "mean"]


class ForwardPasses:
    """Loss, logits, mean and spread of the hidden states of the optimizer step in progress.

    Parameters
    ----------
    logits_mode : {'last', 'mean'}
        Logits at the last position: of the first sequence, or the mean over the step's sequences.
    loss_scale : float
        Factor by which the loop multiplies the loss of a model with ``num_items_in_batch``.
    vocabularies : iterable of int
        Possible lengths of the last dimension of logits.

    Attributes
    ----------
    loss_looks_divided : bool
        True if the loop gave several losses in a step, each the result of a division.
    """

    def __init__(
        self, *, logits_mode: LogitsMode, loss_scale: float, vocabularies: Iterable[int]
    ) -> None:
        self._logits_mode = logits_mode
        self._loss_scale = loss_scale
        self._vocabularies = frozenset(vocabularies)
        self._unembedding_was_called = False
        self._variables: frozenset[str] = frozenset()
        self.loss_looks_divided = False
        self._loss = StepLoss(loss_scale)
        self.begin_step()

    def begin_step(self) -> None:
        """Discard the values of the previous step."""
        self.loss_looks_divided |= self._loss.looks_divided
        self._loss = StepLoss(self._loss_scale)
        self._logits = StepLogits(self._logits_mode)
        self._logits_are_observed = False
        self._unembedding_was_called = False
        self.forget_hidden()

    def forget_hidden(self) -> None:
        """Discard the hidden states of the current step."""
        self._hidden = WeightedMean()
        self._spread = HiddenSpread()

    def watch(
        self, model: torch.nn.Module, head: torch.nn.Module | None, variables: set[str]
    ) -> list[RemovableHandle]:
        """Register the hooks that the variables need.

        Parameters
        ----------
        model : Module
        head : Module or None
            Module that multiplies hidden states by a recorded parameter.
        variables : set of str
        """
        self._variables = frozenset(variables)
        output = outside_compile(self._on_model_output)
        handles = [model.register_forward_hook(output, with_kwargs=True)]
        if head is not None and "logits" in variables and _makes_logits(model, head):
            handles.append(head.register_forward_hook(outside_compile(self._on_head_output)))
        return handles

    def observe(self, *, loss: torch.Tensor | None, logits: torch.Tensor | None) -> None:
        """Use values from the loop in place of those from the hooks."""
        if loss is not None:
            self._loss.observe(loss)
        if logits is not None:
            if not self._logits_are_observed:
                self._logits = StepLogits(self._logits_mode)
                self._logits_are_observed = True
            self._logits.add(logits)

    def add_hidden(self, states: torch.Tensor) -> None:
        """Add the hidden states of a micro-batch, (…, hidden)."""
        if "hidden_mean" in self._variables:
            mean = states.mean(dim=tuple(range(states.ndim - 1)), dtype=torch.float32)
            self._hidden.add(mean, states[..., 0].numel())
        if self._variables & {"hidden_trace", "hidden_cosine"}:
            self._spread.add(states.flatten(0, -2).float())

    def values(self) -> dict[str, torch.Tensor | None]:
        """Return the values of the current step by variable; None if there is none."""
        return {
            "loss": self._loss.value(),
            "logits": self._logits.value(),
            "hidden_mean": self._hidden.value(),
            "hidden_trace": self._spread.trace(),
            "hidden_cosine": self._spread.cosine(),
        }

    def _on_head_output(self, head: torch.nn.Module, args: Any, output: torch.Tensor) -> None:
        if is_trained(head):
            self._unembedding_was_called = True
            if not self._logits_are_observed:
                self._logits.add(output)

    def _on_model_output(
        self, model: torch.nn.Module, args: Any, kwargs: dict[str, Any], output: Any
    ) -> None:
        if not is_trained(model):
            return
        loss, logits = loss_of(output), logits_of(output)
        if loss is not None:
            self._loss.add(loss, share=kwargs.get("num_items_in_batch") is not None)
        known = self._unembedding_was_called or self._logits_are_observed
        if not known and logits is not None and self._are_of_a_vocabulary(logits):
            self._logits.add(logits)
        self._unembedding_was_called = False

    def _are_of_a_vocabulary(self, logits: torch.Tensor) -> bool:
        return logits.ndim in (2, 3) and logits.shape[-1] in self._vocabularies


class StepLoss:
    """Loss of a step from those of its micro-batches."""

    def __init__(self, scale: float) -> None:
        self._scale = scale
        self._values: list[torch.Tensor] = []
        self._quotients = 0
        self._shares = False
        self._is_observed = False

    def add(self, loss: torch.Tensor, *, share: bool) -> None:
        """Add the loss of a micro-batch: its mean, or its share of the mean over the step."""
        if not self._is_observed:
            self._values.append(loss.detach().clone())  # a loop may change it in place
            self._shares = share

    def observe(self, loss: torch.Tensor) -> None:
        """Add the loss of a micro-batch from the loop, in place of those from the hooks."""
        if not self._is_observed:
            self._is_observed, self._shares = True, False
            self._values.clear()
        self._values.append(loss.detach().clone())  # a loop may change it in place
        self._quotients += loss.grad_fn is not None and loss.grad_fn.name() == "DivBackward0"

    @property
    def looks_divided(self) -> bool:
        """True if the loop gave several losses, each of them a quotient."""
        return self._is_observed and len(self._values) > 1 and self._quotients == len(self._values)

    def value(self) -> torch.Tensor | None:
        """Return the loss of the current step; None if there is none."""
        if not self._values:
            return None
        if len(self._values) == 1:
            loss = self._values[0].reshape(())
        else:
            stacked = torch.stack([value.reshape(()) for value in self._values])
            loss = stacked.sum() if self._shares else stacked.mean()
        return loss * self._scale if self._shares and self._scale != 1 else loss


class WeightedMean:
    """Mean of means, weighted by the number of items in each."""

    def __init__(self) -> None:
        self._mean: torch.Tensor | None = None
        self._count = 0

    def add(self, mean: torch.Tensor, count: int) -> None:
        """Add the mean of `count` items."""
        if self._mean is None:
            self._mean = mean
        else:
            weight = count / (self._count + count)
            self._mean = self._mean + (mean.float() - self._mean) * weight
        self._count += count

    def value(self) -> torch.Tensor | None:
        """Return the mean of the current step; None if there is none."""
        return self._mean


class HiddenSpread:
    """Spread of vectors around their mean, and their cosine with the mean, in float32.

    Parts are joined as by Chan, Golub & LeVeque (1983), *Algorithms for computing the sample
    variance*: the spread of the whole is that of the parts plus that of their means.
    """

    def __init__(self) -> None:
        self._count = 0
        self._mean: torch.Tensor | None = None
        self._trace: torch.Tensor | None = None
        self._direction: torch.Tensor | None = None  # mean of the vectors at length 1

    def add(self, vectors: torch.Tensor) -> None:
        """Add vectors, (vector, hidden)."""
        mean = vectors.mean(dim=0)
        trace = (vectors - mean).square().sum(dim=1).mean()
        direction = (vectors / torch.linalg.vector_norm(vectors, dim=1, keepdim=True)).mean(dim=0)
        count = len(vectors)
        if self._mean is None or self._trace is None or self._direction is None:
            self._mean, self._trace, self._direction = mean, trace, direction
        else:
            weight = count / (self._count + count)
            apart = mean - self._mean
            between = weight * (1 - weight) * apart.square().sum()
            self._trace = self._trace + weight * (trace - self._trace) + between
            self._mean = self._mean + weight * apart
            self._direction = self._direction + weight * (direction - self._direction)
        self._count += count

    def trace(self) -> torch.Tensor | None:
        """Return the trace of the covariance (mean squared distance from the mean), or None."""
        return self._trace

    def cosine(self) -> torch.Tensor | None:
        """Return the mean cosine between the vectors and their mean, or None."""
        if self._mean is None or self._direction is None:
            return None
        length = torch.linalg.vector_norm(self._mean)
        return torch.dot(self._direction, self._mean / length)


class StepLogits:
    """Logits of a step at the last position of its sequences."""

    def __init__(self, mode: LogitsMode) -> None:
        self._mode = mode
        self._first: torch.Tensor | None = None
        self._mean = WeightedMean()

    def add(self, logits: torch.Tensor) -> None:
        """Add the logits of a micro-batch: (batch, position, token), or (batch, token)."""
        last = logits.detach()[:, -1] if logits.ndim == 3 else logits.detach()
        if self._mode == "mean":
            self._mean.add(last.mean(dim=0), len(last))
            self._dtype = last.dtype
        elif self._first is None:
            # A copy of one row: a view would keep the logits of the whole batch alive.
            self._first = last[0].clone()

    def value(self) -> torch.Tensor | None:
        """Return the logits of the current step; None if there are none."""
        mean = self._mean.value()
        return self._first if mean is None else mean.to(self._dtype)


def is_trained(module: torch.nn.Module) -> bool:
    """Return True if a forward pass belongs to the training, not to an evaluation."""
    return module.training and torch.is_grad_enabled()


def _makes_logits(model: torch.nn.Module, head: torch.nn.Module) -> bool:
    """Return True if a module is the output embedding of the model or tied to an embedding."""
    if getattr(model, "get_output_embeddings", lambda: None)() is head:
        return True
    return any(
        isinstance(module, torch.nn.Embedding) and module.weight is getattr(head, "weight", None)
        for module in model.modules()
    )


def loss_of(output: Any) -> torch.Tensor | None:
    """Return the loss of a model's output: by name, first of a tuple, or alone; else None."""
    if isinstance(output, Mapping):
        output = output.get("loss")
    elif isinstance(output, tuple):
        output = output[0] if output else None
    scalar = isinstance(output, torch.Tensor) and output.numel() == 1 and output.ndim <= 1
    return output if scalar and output.is_floating_point() else None


def logits_of(output: Any) -> torch.Tensor | None:
    """Return the possible logits of a model's output; None if there are none."""
    if isinstance(output, Mapping):
        output = output.get("logits")
    elif isinstance(output, tuple):
        output = next((o for o in output if isinstance(o, torch.Tensor) and o.ndim > 1), None)
    return output if isinstance(output, torch.Tensor) and output.ndim > 1 else None
