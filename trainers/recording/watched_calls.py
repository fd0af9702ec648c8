"""Calls of public functions of torch that have no hook, observed while somebody listens."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from typing import Any

import torch

Listener = Callable[..., contextlib.AbstractContextManager[None]]
"""Called with the arguments of each call; the call runs inside its context."""


class WatchedCall:
    """A function that is replaced while it has listeners.

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

    def listen(self, listener: Listener) -> None:
        """Run each later call inside the context that the listener returns."""
        self._listeners.append(listener)
        if self._replacement is None:
            self._original = original = getattr(self._owner, self._name)

            @functools.wraps(original)
            def call(*args: Any, **kwargs: Any) -> Any:
                with contextlib.ExitStack() as stack:
                    for one in tuple(self._listeners):
                        stack.enter_context(one(*args, **kwargs))
                    return original(*args, **kwargs)

            self._replacement = call
            setattr(self._owner, self._name, call)

    def ignore(self, listener: Listener) -> None:
        """Remove a listener; without any, the owner has its own function again."""
        self._listeners.remove(listener)
        # If another library has replaced the function since, it calls ours, which changes nothing.
        if not self._listeners and getattr(self._owner, self._name) is self._replacement:
            setattr(self._owner, self._name, self._original)
            self._replacement = None


BACKWARD = WatchedCall(torch.autograd, "backward")
"""`torch.autograd.backward`, which `Tensor.backward` calls. No hook gets the root of a pass."""

SCALER_STEP = WatchedCall(torch.amp.GradScaler, "step")
"""`GradScaler.step`, which does not call the optimizer after an overflow."""
