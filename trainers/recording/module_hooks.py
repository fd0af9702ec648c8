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

__all__ = ["add_forward_hook", "add_forward_pre_hook"]


class _ModuleHook:
    """Calls a function with the values of a hook, for one module only.

    A copy of the module holds the same hook, which does nothing there.
    """

    def __init__(self, module: torch.nn.Module, call: Callable[..., Any]) -> None:
        self._module = weakref.ref(module)
        self._call = outside_compile(call)

    def __call__(self, module: torch.nn.Module, *values: Any) -> Any:
        return self._call(module, *values) if module is self._module() else None

    def __reduce__(self) -> tuple[Any, ...]:
        # A file of the model must not need this package. `sys.audit` takes any values and returns
        # None, as a hook without effect does.
        return functools.partial, (sys.audit, "trajstore.removed_hook")


def add_forward_hook(module: torch.nn.Module, call: Callable[..., Any]) -> RemovableHandle:
    """Call a function with (module, args, kwargs, output) after each forward pass of a module."""
    return module.register_forward_hook(_ModuleHook(module, call), with_kwargs=True)


def add_forward_pre_hook(
    module: torch.nn.Module, call: Callable[..., Any], *, first: bool = False
) -> RemovableHandle:
    """Call a function with (module, args, kwargs) before each forward pass of a module.

    With `first`, it is called before all hooks so far.
    """
    hook = _ModuleHook(module, call)
    return module.register_forward_pre_hook(hook, with_kwargs=True, prepend=first)
