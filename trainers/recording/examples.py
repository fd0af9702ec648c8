"""Values of single examples of a step: indices, losses, hidden states.

All three have one order: by process, then by micro-batch. In a distributed training, processes that
do not record collect their share for the process that does. `HiddenStates` passes the states of a
micro-batch, from a module or from the loop, to all that compute values from them.
"""

from __future__ import annotations

import functools
import reprlib
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from trajstore.errors import InvalidArgument, RecordingError, did_you_mean
from trajstore.installation import imported
from trajstore.schema import OF_EXAMPLES
from trajstore.trainers.recording.device_to_host import type_name
from trajstore.trainers.recording.forward_values import (
    ForwardPass,
    ForwardPasses,
    logits_of,
    loss_of,
)
from trajstore.trainers.recording.hooks import ModuleHooks
from trajstore.trainers.recording.parameters import as_float64
from trajstore.trainers.recording.sharding import is_distributed

EXAMPLE_INDEX = "example_index"
"""Key of a model's inputs with the examples' indices; it is removed before the model runs."""

_NO_TARGET = -100
_LARGEST_PART = 1 << 24  # logits that are converted to float32 at once
_LOSS_TOLERANCE = 1e-2  # rounding to bfloat16 changes a loss by 0.4 % at most

Tensors = dict[str, torch.Tensor]


class StepExamples:
    """Indices, losses and hidden states of the examples of the optimizer step in progress.

    Parameters
    ----------
    variables : collection of str
        Recorded variables; those outside `trajstore.schema.OF_EXAMPLES` are ignored.

    Attributes
    ----------
    variables : tuple of str
        The others.
    """

    def __init__(self, variables: Collection[str]) -> None:
        self.variables = tuple(name for name in OF_EXAMPLES if name in variables)
        self._adds_up: bool | None = None  # unknown before the first loss
        self.begin_step()

    def begin_step(self) -> None:
        """Discard the values of the previous step."""
        self._parts: dict[str, list[torch.Tensor]] = {name: [] for name in self.variables}

    def watch(
        self,
        hooks: ModuleHooks,
        model: torch.nn.Module,
        passes: ForwardPasses,
        on_note: Callable[[str], None],
    ) -> None:
        """Add the hooks that the variables need, inside the pass of the model.

        `on_note` is called with a sentence about values that cannot be recorded.
        """
        self._passes, self._on_note = passes, on_note
        if "batch" in self.variables:
            hooks.before(model, self._on_model_input)
        if "example_loss" in self.variables:
            hooks.after(model, self._on_model_output)

    def observe(self, *, batch: Any, example_loss: Any) -> Iterator[tuple[str, Callable[[], None]]]:
        """Yield names, and functions that use values from the loop in place of the hooks'.

        Raises
        ------
        InvalidArgument
            If there is not one number for each example.
        """
        for name, value in (("batch", batch), ("example_loss", example_loss)):
            if value is not None:
                values = _observed(name, value)
                if name in self.variables:
                    yield name, functools.partial(self._add, name, _as_recorded(name, values))

    def values(self) -> Mapping[str, torch.Tensor]:
        """Return the values of the current step by variable; missing ones are left out.

        In a distributed training every process calls it. The first process gets all shares.

        They are left out if the variables have different numbers of examples.
        """
        if not self.variables:
            return {}
        joined = {name: _joined(parts) for name, parts in self._parts.items() if parts}
        joined = _of_all_processes(joined)
        lengths = {name: len(values) for name, values in joined.items()}
        if len(set(lengths.values())) > 1:
            counts = ", ".join(f"{name} {length}" for name, length in lengths.items())
            self._on_note(
                f"the values of examples are not recorded in each step, because their numbers "
                f"differ: {counts}; pass them for every micro-batch, or for none"
            )
            return {}
        return joined

    def _on_model_input(
        self, model: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        if EXAMPLE_INDEX not in kwargs:
            return None
        if self._passes.current is not None:
            index = _as_recorded("batch", kwargs[EXAMPLE_INDEX])
            self._passes.current.keep("batch", self._add, "batch", index)
        return args, {key: value for key, value in kwargs.items() if key != EXAMPLE_INDEX}

    def _on_model_output(
        self, model: torch.nn.Module, args: Any, kwargs: dict[str, Any], output: Any
    ) -> None:
        forward = self._passes.current
        labels, logits, loss = kwargs.get("labels"), logits_of(output), loss_of(output)
        if forward is None or self._adds_up is False:
            return
        shifts = kwargs.get("shift_labels") is None  # the model itself
        causal_loss = imported("transformers.loss.loss_utils", "ForCausalLMLoss")
        is_causal = shifts and getattr(model, "loss_function", None) is causal_loss
        if labels is None or logits is None or loss is None or not is_causal:
            return
        losses = example_losses(logits.detach(), labels)
        if self._adds_up is None:
            problem = _difference(losses, labels, loss.detach(), kwargs.get("num_items_in_batch"))
            self._adds_up = problem is None
            if problem is not None:
                self._on_note(problem)
                return
        forward.keep("example_loss", self._add, "example_loss", losses)

    def _add(self, name: str, values: torch.Tensor) -> None:
        self._parts[name].append(values)

    def hidden_part(self, states: torch.Tensor) -> Callable[[], None]:
        """Return a function that adds the hidden states of a micro-batch."""

        def add() -> None:
            if "hidden_states" in self._parts and states.ndim == 3:
                self._parts["hidden_states"].append(states)
            elif "hidden_states" in self._parts:
                self._on_note(
                    f"hidden_states are not recorded: got states of shape {tuple(states.shape)}, "
                    "expected (example, position, hidden)"
                )

        return add


def example_losses(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Return the cross-entropy of each example, as causal language models of transformers do.

    Parameters
    ----------
    logits : tensor, (example, position, token)
    labels : tensor of int, (example, position)
        The target of a position is the label of the next one; −100 is no target.

    Returns
    -------
    tensor of float32, (example,)
        Mean over the example's targets; NaN without targets.
    """
    targets = torch.nn.functional.pad(labels[:, 1:], (0, 1), value=_NO_TARGET).to(logits.device)
    size = max(1, _LARGEST_PART // max(logits[0].numel(), 1))
    losses = []
    for part_logits, part_targets in zip(logits.split(size), targets.split(size), strict=True):
        token_losses = torch.nn.functional.cross_entropy(
            part_logits.flatten(0, 1).float(),
            part_targets.flatten(),
            ignore_index=_NO_TARGET,
            reduction="none",
        )
        losses.append(
            token_losses.view(part_targets.shape).sum(1) / (part_targets != _NO_TARGET).sum(1)
        )
    return torch.cat(losses)


def padded(values: torch.Tensor, shape: Sequence[int]) -> torch.Tensor:
    """Return values in a tensor of a larger shape, padded with NaN along each dimension."""
    if tuple(values.shape) == tuple(shape):
        return values
    whole = values.new_full(tuple(shape), float("nan"))
    whole[tuple(slice(length) for length in values.shape)] = values
    return whole


def _observed(name: str, value: Any) -> torch.Tensor:
    """Return values from the loop, which the type of the variable holds exactly."""
    try:
        values = value if isinstance(value, torch.Tensor) else torch.as_tensor(value, device="cpu")
        values = values.detach()
        if values.is_floating_point() and not hasattr(value, "dtype"):
            values = torch.as_tensor(value, dtype=torch.float64, device="cpu")  # as Python's floats
    except (TypeError, ValueError, RuntimeError):
        raise InvalidArgument(
            f"{name}: got {reprlib.repr(value)}, expected one number for each example"
        ) from None
    kind = "whole numbers" if name == "batch" else "floats"
    has_kind = values.is_floating_point() == (name == "example_loss")
    if values.ndim != 1 or not has_kind or values.dtype == torch.bool or values.is_complex():
        raise InvalidArgument(
            f"{name}: got {values.dtype} of shape {tuple(values.shape)}, expected {kind}, "
            "one for each example of the micro-batch"
        )
    if values.dtype in (torch.float64, torch.int64):
        kept = _as_recorded(name, values).to(values.dtype)
        if (wrong := (kept != values) & (values == values)).any():
            position = int(wrong.nonzero()[0])
            stored = "float64" if name == "batch" else "float32"
            raise InvalidArgument(
                f"{name}: got {values[position].item()} at position {position}, expected {kind} "
                f"that {stored} holds exactly; convert them"
            )
    return values


def _as_recorded(name: str, values: torch.Tensor) -> torch.Tensor:
    # float64 is exact for integers up to 2^53, and has NaN for a missing index.
    return as_float64(values) if name == "batch" else values.float()


def _difference(
    losses: torch.Tensor, labels: torch.Tensor, loss: torch.Tensor, items: Any
) -> str | None:
    """Return a sentence if the examples' losses do not add up to the loss of the model."""
    targets = (labels[:, 1:] != _NO_TARGET).sum(1).to(losses.device)
    total = torch.where(targets > 0, losses * targets, 0.0).sum()
    mean = float(total) / float(targets.sum() if items is None else items)
    if abs(mean - float(loss)) <= _LOSS_TOLERANCE * abs(float(loss)):
        return None
    return (
        f"example_loss is not recorded: the mean of the examples' cross-entropies is {mean:.6g}, "
        f"but the model's loss is {float(loss):.6g}, so it has other terms; pass the losses with "
        "observe(example_loss=…)"
    )


def _joined(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    """Concatenate micro-batches; shorter ones are padded with NaN."""
    if len(parts) == 1:
        return parts[0]
    longest = [max(lengths) for lengths in zip(*(part.shape[1:] for part in parts), strict=True)]
    return torch.cat([padded(part, (len(part), *longest)) for part in parts])


def _of_all_processes(values: Tensors) -> Tensors:
    """Return the shares of all processes in the first one, and the own share in the others."""
    if not is_distributed():
        return values
    first = torch.distributed.get_rank() == 0
    shares: list[Any] = [None] * torch.distributed.get_world_size()
    sent = {name: tensor.cpu() for name, tensor in values.items()}
    torch.distributed.gather_object(sent, shares if first else None, dst=0)
    if not first:
        return values
    names = [name for name in values if all(name in share for share in shares)]
    return {name: _joined([share[name] for share in shares]) for name in names}


OF_HIDDEN_STATES = ("hidden_mean", "hidden_trace", "hidden_cosine", "hidden_states")
"""Variables computed from hidden states."""


@dataclass(eq=False)
class HiddenStates:
    """Passes the hidden states of each micro-batch to those that compute variables from them.

    Parameters
    ----------
    passes : ForwardPasses
    receivers : sequence of callable
        Each reduces the states of a micro-batch, and returns a function that adds the result. That
        is called if the step uses the pass.
    size : int
        Elements of a hidden state.
    on_note : callable
        Called with a sentence about states that cannot be recorded.
    """

    passes: ForwardPasses
    receivers: Sequence[Callable[[torch.Tensor], Callable[[], None]]]
    size: int
    on_note: Callable[[str], None]

    def watch(
        self,
        hooks: ModuleHooks,
        model: torch.nn.Module,
        head: torch.nn.Module | None,
        source: str | None,
    ) -> None:
        """Add the hook on the module that has the states, if there is one.

        Parameters
        ----------
        hooks : ModuleHooks
        model : Module
        head : Module or None
            Module whose input they are.
        source : str or None
            Name of the module whose output they are, in place of `head`.

        Raises
        ------
        RecordingError
            If the model has no such module, or its output has another order of dimensions.
        """
        if source is None:
            if head is not None:
                hooks.before(head, self._on_head_input)
            return
        modules = {name: module for name, module in model.named_modules() if name}
        if source not in modules:
            raise RecordingError(
                f"hidden_from={source!r}: {type(model).__name__} has no such module"
                f"{did_you_mean(source, modules)}; its modules are {', '.join(modules)}"
            )
        _check_order(source, modules[source])

        def on_output(module: torch.nn.Module, args: Any, kwargs: Any, output: Any) -> None:
            states = _first_tensor(output)
            with self.passes.of(output) as forward:
                if forward is not None and self._is_state(states) and states.ndim == 3:
                    self._keep(forward, states)
                elif forward is not None:
                    self.on_note(f"{self._unfit(f'hidden_from={source!r}', states)}; not recorded")

        hooks.after(modules[source], on_output)

    def observe(self, states: torch.Tensor) -> Callable[[], None]:
        """Return a function that uses states from the loop in place of those from the hook.

        Raises
        ------
        InvalidArgument
            If they are not floats of shape (batch, position, hidden).
        """
        if not (self._is_state(states) and states.ndim == 3):
            raise InvalidArgument(self._unfit("hidden", states))
        parts = [receiver(states.detach()) for receiver in self.receivers]
        return functools.partial(self._deliver, parts)

    def _on_head_input(
        self, head: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        states: Any = next(iter((*args, *kwargs.values())), None)
        # A module may have the parameter and take other inputs, such as the ids of tokens.
        if not self._is_state(states):
            return
        with self.passes.of(states) as forward:
            if forward is not None:
                forward.head_inputs += 1
                self._keep(forward, states)

    def _keep(self, forward: ForwardPass, states: torch.Tensor) -> None:
        parts = [receiver(states.detach()) for receiver in self.receivers]
        forward.keep("hidden", self._deliver, parts, forward)

    def _deliver(
        self, parts: Sequence[Callable[[], None]], forward: ForwardPass | None = None
    ) -> None:
        # Several inputs of the unembedding are chunks, whose order is not known.
        if forward is None or forward.head_inputs <= 1:
            for add in parts:
                add()

    def _is_state(self, value: Any) -> bool:
        floats = isinstance(value, torch.Tensor) and value.is_floating_point()
        return floats and value.ndim > 1 and value.shape[-1] == self.size

    def _unfit(self, name: str, value: Any) -> str:
        received = type(value).__name__
        if isinstance(value, torch.Tensor):
            received = f"{type_name(value.dtype)} of shape {tuple(value.shape)}"
        return f"{name}: got {received}, expected floats of shape (batch, position, {self.size})"


def _first_tensor(output: Any) -> Any:
    """Return the output of a module, or its first part."""
    if isinstance(output, Mapping):
        output = tuple(output.values())
    return output[0] if isinstance(output, tuple) and output else output


def _check_order(name: str, module: torch.nn.Module) -> None:
    """Check that a module of torch returns the batch first."""
    is_of_torch = type(module).__module__.startswith("torch.nn.")
    if is_of_torch and any(
        getattr(part, "batch_first", True) is False for part in module.modules()
    ):
        raise RecordingError(
            f"hidden_from={name!r}: {type(module).__name__} has batch_first=False, so its output "
            "is (position, batch, hidden); pass it with observe(hidden=output.transpose(0, 1))"
        )
