"""Hidden states of the micro-batches of a step, from a module of the model or from the loop."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import torch
from torch.utils.hooks import RemovableHandle

from trajstore.errors import InvalidArgument, RecordingError
from trajstore.nearest_name import did_you_mean
from trajstore.trainers.recording.forward_values import is_trained
from trajstore.trainers.recording.torch_internals import outside_compile

__all__ = ["OF_HIDDEN_STATES", "HiddenStates"]

OF_HIDDEN_STATES = ("hidden_mean", "hidden_trace", "hidden_cosine", "hidden_states")
"""Variables computed from hidden states."""


class _Receiver(Protocol):
    def add_hidden(self, states: torch.Tensor) -> None: ...

    def forget_hidden(self) -> None: ...


class HiddenStates:
    """Passes the hidden states of each micro-batch to those that compute variables from them.

    Parameters
    ----------
    receivers : sequence
        The `ForwardPasses` and `StepExamples` of the recording.
    size : int
        Elements of a hidden state.
    """

    def __init__(self, receivers: Sequence[_Receiver], size: int) -> None:
        self._receivers = receivers
        self._size = size
        self.begin_step()

    def begin_step(self) -> None:
        """Use the module's states again, until the loop passes some."""
        self._are_observed = False

    def watch(
        self, model: torch.nn.Module, head: torch.nn.Module | None, source: str | None
    ) -> list[RemovableHandle]:
        """Register the hook on the module that has the states, if there is one.

        Parameters
        ----------
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
            take = outside_compile(self._on_head_input)
            return [] if head is None else [head.register_forward_pre_hook(take, with_kwargs=True)]
        modules = {name: module for name, module in model.named_modules() if name}
        if source not in modules:
            raise RecordingError(
                f"hidden_from={source!r}: {type(model).__name__} has no such module"
                f"{did_you_mean(source, modules)}; its modules are {', '.join(modules)}"
            )
        _check_order(source, modules[source])

        def on_output(module: torch.nn.Module, args: Any, output: Any) -> None:
            if is_trained(module) and not self._are_observed:
                self._add(self._checked(f"hidden_from={source!r}", _first_tensor(output)))

        return [modules[source].register_forward_hook(outside_compile(on_output))]

    def observe(self, states: torch.Tensor) -> None:
        """Use the states of a micro-batch from the loop, in place of those from the hook.

        Raises
        ------
        InvalidArgument
            If they are not floats of shape (batch, position, hidden).
        """
        states = self._checked("hidden", states)
        if not self._are_observed:
            self._are_observed = True
            for receiver in self._receivers:
                receiver.forget_hidden()
        self._add(states)

    def _on_head_input(
        self, head: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        given: Any = next(iter((*args, *kwargs.values())), None)
        # A module may have the parameter and take other inputs, such as the ids of tokens.
        if is_trained(head) and not self._are_observed and self._is_state(given):
            self._add(given)

    def _add(self, states: torch.Tensor) -> None:
        for receiver in self._receivers:
            receiver.add_hidden(states.detach())

    def _is_state(self, given: Any) -> bool:
        floats = isinstance(given, torch.Tensor) and given.is_floating_point()
        return floats and given.ndim > 1 and given.shape[-1] == self._size

    def _checked(self, name: str, given: Any) -> torch.Tensor:
        if self._is_state(given) and given.ndim == 3:
            states: torch.Tensor = given
            return states
        shown = type(given).__name__
        if isinstance(given, torch.Tensor):
            shown = f"{str(given.dtype).removeprefix('torch.')} of shape {tuple(given.shape)}"
        raise InvalidArgument(
            f"{name}: got {shown}, expected floats of shape (batch, position, {self._size})"
        )


def _first_tensor(output: Any) -> Any:
    """Return the output of a module, or its first part."""
    if isinstance(output, Mapping):
        output = tuple(output.values())
    return output[0] if isinstance(output, tuple) and output else output


def _check_order(name: str, module: torch.nn.Module) -> None:
    """Check that a module of torch returns the batch first."""
    own = type(module).__module__.startswith("torch.nn.")
    if own and any(getattr(part, "batch_first", True) is False for part in module.modules()):
        raise RecordingError(
            f"hidden_from={name!r}: {type(module).__name__} has batch_first=False, so its output "
            "is (position, batch, hidden); pass it with observe(hidden=output.transpose(0, 1))"
        )
