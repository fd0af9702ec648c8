"""Hooks on the steps of an optimizer, also of one that has no place for hooks."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from torch.optim import Optimizer

__all__ = ["watch_steps"]


class _WrappedStep:
    """Calls hooks around the `step` of an optimizer that has no place for hooks."""

    def __init__(self, optimizer: Any, before: Callable[..., Any], after: Callable[..., Any]):
        self._optimizer = optimizer
        original = optimizer.step

        @functools.wraps(original)
        def step(*args: Any, **kwargs: Any) -> Any:
            before(optimizer, (optimizer, *args), kwargs)
            result = original(*args, **kwargs)
            after(optimizer, (optimizer, *args), kwargs)
            return result

        optimizer.step = step

    def remove(self) -> None:
        """Give the optimizer its own method again."""
        del self._optimizer.step


def watch_steps(
    optimizer: Optimizer, before: Callable[..., Any], after: Callable[..., Any]
) -> list[Any]:
    """Call functions with (optimizer, args, kwargs) before and after each step.

    Returns
    -------
    list
        Handles with a method `remove`.
    """
    if not hasattr(optimizer, "_optimizer_step_post_hooks"):  # it does not call Optimizer.__init__
        return [_WrappedStep(optimizer, before, after)]
    return [optimizer.register_step_pre_hook(before), optimizer.register_step_post_hook(after)]
