"""Hooks on the steps of an optimizer, also of one that has no place for hooks."""

from __future__ import annotations

import functools
import inspect
import types
from collections.abc import Callable
from types import FrameType
from typing import Any

from torch.optim import Optimizer

_CALLERS = (inspect.getfile(Optimizer), __file__)
"""Files of the functions that call the hooks of a step."""


class OuterStep:
    """Calls the hooks of a step once: a step may call that of its base class, which has hooks, too.

    A step that an exception has ended has no post-hook, but its frame has left the stack.

    Parameters
    ----------
    before, after : callable
        Called with the arguments of the hooks of the outer step.
    inside : callable
        Called with the optimizer before the step of a base class.
    """

    def __init__(
        self,
        before: Callable[..., Any],
        after: Callable[..., Any],
        inside: Callable[..., Any],
    ) -> None:
        self._before, self._after, self._inside = before, after, inside
        self._frame: FrameType | None = None
        self._depth = 0

    @property
    def is_running(self) -> bool:
        """True inside a step."""
        if self._frame is None:
            return False
        frame = inspect.currentframe()
        while frame is not None and frame is not self._frame:
            frame = frame.f_back
        return frame is not None

    def before(self, *values: Any) -> None:
        """Hook before a step."""
        if self.is_running:
            self._depth += 1
            self._inside(*values[:1])
            return
        frame = inspect.currentframe()
        while (frame := frame and frame.f_back) is not None:
            if frame.f_code.co_filename in _CALLERS:
                break
        self._frame, self._depth = frame, 1
        self._before(*values)

    def after(self, *values: Any) -> None:
        """Hook after a step."""
        self._depth -= 1
        if self._depth == 0:
            self._frame = None
            self._after(*values)


def watch_steps(optimizer: Any, before: Callable[..., Any], after: Callable[..., Any]) -> list[Any]:
    """Call functions with (optimizer, args, kwargs) before and after each step.

    Returns
    -------
    list
        Handles with a method `remove`.
    """
    if hasattr(optimizer, "_optimizer_step_post_hooks"):
        return [optimizer.register_step_pre_hook(before), optimizer.register_step_post_hook(after)]
    original = optimizer.step  # it does not call Optimizer.__init__, and has no place for hooks

    @functools.wraps(original)
    def step(self: Any, *args: Any, **kwargs: Any) -> Any:
        before(optimizer, (optimizer, *args), kwargs)
        result = original(*args, **kwargs)
        after(optimizer, (optimizer, *args), kwargs)
        return result

    optimizer.step = types.MethodType(step, optimizer)  # a scheduler needs a method
    return [types.SimpleNamespace(remove=functools.partial(delattr, optimizer, "step"))]
