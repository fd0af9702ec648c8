"""Hooks on modules that a copy of the model, or a file of it, does not inherit."""

from __future__ import annotations

import functools
import sys
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch.utils.hooks import RemovableHandle

from trajstore.trainers.recording.torch_internals import outside_compile

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
