"""Hooks on the steps of an optimizer, also of one that wraps another or has no place for hooks.

A step may call another: that of a wrapped optimizer, or that of a base class. The outermost call is
the step of the loop. The innermost one consumes the gradients.
"""

from __future__ import annotations

import functools
import inspect
import types
from collections.abc import Callable, Sequence
from dataclasses import InitVar, dataclass
from types import FrameType
from typing import Any

from torch.optim import Optimizer

from trajstore.trainers.recording.torch_internals import (
    call_first,
    call_last,
    has_other_hooks,
    outside_compile,
)
from trajstore.trainers.recording.watched_calls import step_of

_CALLERS = (inspect.getfile(Optimizer), __file__)
_STEPS = ("wrapper", "wrapped_step")
"""Files and names of the functions that call the hooks of a step."""


@dataclass(eq=False)
class StepCalls:
    """Calls hooks before, inside and after the steps of an optimizer.

    A step that an exception has ended has no post-hook, but its frame has left the stack.

    Parameters
    ----------
    chain : sequence
        The optimizer that the loop steps, then each one that it wraps.
    before, after : callable
        Called with the innermost optimizer, args and kwargs of the outermost step.
    inside : callable
        Called with the innermost optimizer when a step inside a step begins. With ``ended=True``
        also after an update, if a wrapper or another hook may change the weights then.

    Attributes
    ----------
    is_plain : bool
        True for an optimizer of torch that nothing wraps.
    has_reached : bool
        True if the last step has called that of an optimizer of torch.
    wrapper : str or None
        Class of the outermost wrapper.
    """

    chain: InitVar[Sequence[Any]]
    before: Callable[..., Any]
    after: Callable[..., Any]
    inside: Callable[..., Any]

    def __post_init__(self, chain: Sequence[Any]) -> None:
        self._member = chain[-1]
        self.inside = outside_compile(self.inside)  # a compiled step would trace it
        self._frame: FrameType | None = None
        self._depth = 0
        self.has_reached = False
        self._handles: list[Any] = []
        self._pre_hook: Any = None
        self.is_plain = len(chain) == 1 and _is_of_torch(type(self._member))
        self.wrapper = type(chain[0]).__name__ if len(chain) > 1 else None
        hooked: list[Any] = []  # places of hooks, which a wrapper may share
        for one in reversed(chain):
            hooks = getattr(one, "_optimizer_step_post_hooks", None)
            if hooks is None or not getattr(type(one).step, "hooked", False):
                self._handles.append(_WrappedStep(one, self._on_begin, self._on_end))
            elif not any(hooks is place for place in hooked):
                hooked.append(hooks)
                before_hook = one.register_step_pre_hook(outside_compile(self._on_begin))
                after_hook = one.register_step_post_hook(outside_compile(self._on_end))
                self._handles += [before_hook, after_hook]
                if one is self._member:
                    self._pre_hook = before_hook
                    first = one.register_step_post_hook(outside_compile(self._on_update))
                    call_first(one, first)
                    self._handles.append(first)
        if not _is_of_torch(type(self._member)):
            for base in type(self._member).__mro__[1:]:
                if "step" in vars(base) and base is not Optimizer:
                    listener = functools.partial(self._on_base_step, base)
                    self._handles.append(step_of(base).listen(listener))

    @property
    def is_running(self) -> bool:
        """True inside a step."""
        if self._frame is None:
            return False
        frame = inspect.currentframe()
        while frame is not None and frame is not self._frame:
            frame = frame.f_back
        return frame is not None

    def call_last(self) -> None:
        """Let all other hooks before a step change the gradients first."""
        if self._pre_hook is not None:
            call_last(self._member, self._pre_hook)

    def remove(self) -> None:
        """Remove all hooks."""
        for handle in self._handles:
            handle.remove()
        self._handles, self._pre_hook = [], None

    def _on_begin(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        if self.is_running:
            self._depth += 1
            self.has_reached |= _is_of_torch(type(self._member))
            self.inside(self._member)
            return
        self._frame, self._depth, self.has_reached = _running_step(), 1, self.is_plain
        self.before(self._member, args, kwargs)

    def _on_update(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        """Look at the weights before another hook after the step can change them."""
        if has_other_hooks(optimizer, own=2) and self.is_running:
            self.inside(self._member, ended=True)

    def _on_end(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        self._depth -= 1
        # An exception that a wrapper has caught has ended an inner step without a call of this.
        if self._depth > 0 and self._frame is not None and _running_step() is self._frame:
            self._depth = 0
        if self._depth == 0:
            self._frame = None
            self.after(self._member, args, kwargs)
        elif self._depth > 0 and self.wrapper is not None:
            self.inside(self._member, ended=True)

    def _on_base_step(
        self, base: type, run: Callable[..., Any], optimizer: Any, *args: Any, **kwargs: Any
    ) -> Any:
        if optimizer is self._member and self.is_running:
            self.has_reached |= _is_of_torch(base)
            self.inside(self._member)
        return run(optimizer, *args, **kwargs)


class _WrappedStep:
    """The step of an object that has no place for hooks, replaced in the object."""

    def __init__(self, owner: Any, before: Callable[..., Any], after: Callable[..., Any]) -> None:
        self._owner, self._before, self._after = owner, before, after
        self._before_that = vars(owner).get("step")
        self._is_removed = False
        original = owner.step

        @functools.wraps(original)
        def wrapped_step(own: Any, *args: Any, **kwargs: Any) -> Any:
            if self._is_removed:
                return original(*args, **kwargs)
            before(owner, (owner, *args), kwargs)
            result = original(*args, **kwargs)
            after(owner, (owner, *args), kwargs)
            return result

        self._step = types.MethodType(wrapped_step, owner)  # a scheduler needs a method
        owner.step = self._step

    def remove(self) -> None:
        """Restore the step, unless somebody has wrapped it again."""
        self._is_removed = True
        if vars(self._owner).get("step") is self._step:
            del self._owner.step
            if self._before_that is not None:
                self._owner.step = self._before_that


def _running_step() -> FrameType | None:
    """Return the frame of the innermost step, which has called a hook."""
    frame = inspect.currentframe()
    while (frame := frame and frame.f_back) is not None:
        if frame.f_code.co_filename in _CALLERS and frame.f_code.co_name in _STEPS:
            break
    return frame


def _is_of_torch(optimizer_class: type) -> bool:
    return optimizer_class.__module__.startswith("torch.optim.")
