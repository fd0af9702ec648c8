"""Calls of functions of torch that have no hook, observed while somebody listens."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from trajstore.trainers.recording.torch_internals import CLIPPING, ENGINE

Listener = Callable[..., Any]
"""Called with a function and the arguments of a call; it returns what the function returns."""


class Listening(NamedTuple):
    """Ends with `remove`, as a handle of torch."""

    remove: Callable[[], None]


class WatchedCall:
    """A function that is replaced while it has listeners.

    Another library may wrap the function, too, and remove its wrapper at any time. A replacement
    that its wrapper calls inside another one, with the same arguments, is left out.

    Parameters
    ----------
    owner : module or class
    name : str
        Name of the function in its owner.
    """

    def __init__(self, owner: Any, name: str) -> None:
        self._owner = owner
        self._name = name
        self._original: Callable[..., Any] | None = None
        self._replacement: Callable[..., Any] | None = None
        self._listeners: list[Listener] = []
        self._running: set[tuple[int, frozenset[int]]] = set()  # threads, arguments of their calls

    def listen(self, listener: Listener) -> Listening:
        """Pass each later call through a listener."""
        self._listeners.append(listener)
        listening = Listening(functools.partial(self._ignore, listener))
        original = getattr(self._owner, self._name)
        if original is self._replacement:
            return listening
        listeners, running = self._listeners, self._running

        @functools.wraps(original)
        def call(*args: Any, **kwargs: Any) -> Any:
            this = threading.get_ident(), frozenset(map(id, (*args, *kwargs.values())))
            if this in running:
                return original(*args, **kwargs)
            run = original
            for one in listeners:
                run = functools.partial(one, run)
            running.add(this)
            try:
                return run(*args, **kwargs)
            finally:
                running.discard(this)

        self._original, self._replacement = original, call
        setattr(self._owner, self._name, call)
        return listening

    def _ignore(self, listener: Listener) -> None:
        """Remove a listener; without any, the owner has its own function again."""
        self._listeners.remove(listener)
        # If another library has replaced the function since, it calls ours, which changes nothing.
        if not self._listeners and getattr(self._owner, self._name) is self._replacement:
            setattr(self._owner, self._name, self._original)
            self._original = self._replacement = None


BACKWARD = WatchedCall(torch.autograd, ENGINE)
"""The call of the engine behind every backward pass. No hook gets the root of a pass."""

SCALE = WatchedCall(torch.amp.GradScaler, "scale")
"""`GradScaler.scale`, which multiplies a loss."""

UNSCALE = WatchedCall(torch.amp.GradScaler, "unscale_")
"""`GradScaler.unscale_`, which `GradScaler.step` calls if the loop has not."""

SCALER_STEP = WatchedCall(torch.amp.GradScaler, "step")
"""`GradScaler.step`, which does not call the optimizer after an overflow."""

CLIP = (
    WatchedCall(torch.nn.utils.clip_grad, CLIPPING),
    WatchedCall(torch.nn.utils, "clip_grads_with_norm_"),
)
"""What multiplies gradients in `clip_grad_norm_`, also if the loop has imported that before."""


@functools.cache
def step_of(optimizer_class: type) -> WatchedCall:
    """Return the watched `step` of a class, which the step of a subclass may call."""
    return WatchedCall(optimizer_class, "step")
