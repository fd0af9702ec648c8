"""Hooks of modules, and of functions of torch that have none.

A copy of a model, or a file of it, does not inherit the hooks of its modules.
"""

from __future__ import annotations

import functools
import sys
import threading
import weakref
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch.utils.hooks import RemovableHandle

from trajstore.trainers.recording.torch_internals import CLIPPING, ENGINE, outside_compile

Failure = Callable[[BaseException], None]


class ModuleHooks:
    """The hooks of one recording on modules.

    Parameters
    ----------
    on_error : callable
        Called with an error of a hook, which the forward pass need not see.
    """

    def __init__(self, on_error: Failure) -> None:
        self._on_error = on_error
        self._handles: list[RemovableHandle] = []

    def after(
        self, module: torch.nn.Module, call: Callable[..., Any], *, always: bool = False
    ) -> None:
        """Call a function with (module, args, kwargs, output) after each forward pass.

        With `always` also after one that has failed, whose output is None.
        """
        hook = _ModuleHook(module, call, self._on_error)
        handle = module.register_forward_hook(hook, with_kwargs=True, always_call=always)
        self._handles.append(handle)

    def before(
        self, module: torch.nn.Module, call: Callable[..., Any], *, first: bool = False
    ) -> None:
        """Call a function with (module, args, kwargs) before each forward pass.

        With `first`, it is called before all hooks so far.
        """
        hook = _ModuleHook(module, call, self._on_error)
        handle = module.register_forward_pre_hook(hook, with_kwargs=True, prepend=first)
        self._handles.append(handle)

    def remove(self) -> None:
        """Remove all hooks."""
        while self._handles:
            self._handles.pop().remove()


class _ModuleHook:
    """Calls a function with the values of a hook, for one module only.

    A copy of the module holds the same hook, which does nothing there.
    """

    def __init__(
        self, module: torch.nn.Module, call: Callable[..., Any], on_error: Failure
    ) -> None:
        self._module = weakref.ref(module)
        self._call = outside_compile(_safe(call, on_error))

    def __call__(self, module: torch.nn.Module, *values: Any) -> Any:
        return self._call(module, *values) if module is self._module() else None

    def __reduce__(self) -> tuple[Any, ...]:
        # A file of the model must not need this package. `sys.audit` takes any values and returns
        # None, as a hook without effect does.
        return functools.partial, (sys.audit, "trajstore.removed_hook")


def _safe(call: Callable[..., Any], on_error: Failure) -> Callable[..., Any]:
    @functools.wraps(call)
    def safe(*values: Any) -> Any:
        try:
            return call(*values)
        except BaseException as error:
            on_error(error)
            return None

    return safe


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
            for listener in listeners:
                run = functools.partial(listener, run)
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
