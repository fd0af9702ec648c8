"""Hidden states of the micro-batches of a step, from a module of the model or from the loop."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from trajstore.errors import InvalidArgument, RecordingError, did_you_mean
from trajstore.trainers.recording.flat_vectors import type_name
from trajstore.trainers.recording.forward_values import ForwardPass, ForwardPasses
from trajstore.trainers.recording.module_hooks import ModuleHooks

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
            with self.passes.of(output) as one:
                if one is not None and self._is_state(states) and states.ndim == 3:
                    self._keep(one, states)
                elif one is not None:
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
        given: Any = next(iter((*args, *kwargs.values())), None)
        # A module may have the parameter and take other inputs, such as the ids of tokens.
        if not self._is_state(given):
            return
        with self.passes.of(given) as one:
            if one is not None:
                one.head_inputs += 1
                self._keep(one, given)

    def _keep(self, one: ForwardPass, states: torch.Tensor) -> None:
        parts = [receiver(states.detach()) for receiver in self.receivers]
        one.keep("hidden", self._deliver, parts, one)

    def _deliver(self, parts: Sequence[Callable[[], None]], one: ForwardPass | None = None) -> None:
        # Several inputs of the unembedding are chunks, whose order is not known.
        if one is None or one.head_inputs <= 1:
            for add in parts:
                add()

    def _is_state(self, given: Any) -> bool:
        floats = isinstance(given, torch.Tensor) and given.is_floating_point()
        return floats and given.ndim > 1 and given.shape[-1] == self.size

    def _unfit(self, name: str, given: Any) -> str:
        shown = type(given).__name__
        if isinstance(given, torch.Tensor):
            shown = f"{type_name(given.dtype)} of shape {tuple(given.shape)}"
        return f"{name}: got {shown}, expected floats of shape (batch, position, {self.size})"


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
