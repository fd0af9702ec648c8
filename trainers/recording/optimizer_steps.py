"""The calls of `step` of an optimizer, and of those that wrap it.

A step may call another: that of a wrapped optimizer, or that of a base class. The outermost call is
the step of the loop; the innermost one consumes the gradients. `step` of each object is replaced
while a recording listens, so that the end of the outermost call is seen, also by an exception.
torch's hooks tell where steps inside begin and end. They remain for a `step` that was bound early.
"""

from __future__ import annotations

import functools
import inspect
import types
from collections.abc import Callable, Sequence
from dataclasses import InitVar, dataclass
from typing import Any

from torch.optim import Optimizer

from trajstore.trainers.recording.torch_internals import (
    call_hooks_of,
    has_hooks,
    is_compiled,
    order_hooks,
    outside_compile,
    running_compiler,
)


@dataclass(eq=False)
class OptimizerSteps:
    """Listens to the steps of an optimizer.

    Parameters
    ----------
    chain : sequence
        The optimizer that the loop steps, then each one that it wraps.
    on_call : callable
        Called with this object, args and kwargs when the outermost call begins.
    on_begin, on_end : callable
        Called with this object at the begin and the end of each step of the innermost optimizer.
    on_return : callable
        Called with this object when the outermost call has ended; ``failed`` is True if an
        exception has ended it.

    Attributes
    ----------
    member : Optimizer
        The innermost one.
    wrapper : str or None
        Class of the outermost wrapper.
    is_plain : bool
        True for an optimizer of torch that nothing wraps.
    is_of_torch : bool
        True if its class, or a base class, is one of torch.
    has_reached : bool
        True if the step has called that of an optimizer of torch; of an optimizer without such a
        base class, always False.
    has_begun : bool
        True if the step has called that of the innermost optimizer.
    is_compiled : bool
        True if `torch.compile` compiles the step.
    """

    chain: InitVar[Sequence[Any]]
    on_call: Callable[..., None]
    on_begin: Callable[..., None]
    on_end: Callable[..., None]
    on_return: Callable[..., None]

    def __post_init__(self, chain: Sequence[Any]) -> None:
        self.member: Optimizer = chain[-1]
        self.wrapper = type(chain[0]).__name__ if len(chain) > 1 else None
        kinds = [kind for kind in type(self.member).__mro__ if "step" in vars(kind)]
        kinds = kinds[: kinds.index(Optimizer)] if Optimizer in kinds else kinds
        functions = list(dict.fromkeys(inspect.unwrap(vars(kind)["step"]) for kind in kinds))
        self._levels = len(functions)
        self.is_of_torch = bool(kinds) and functions[-1].__module__.startswith("torch.optim.")
        self.is_plain = len(chain) == 1 and self.is_of_torch and len(functions) == 1
        self._depth = self._level = 0  # of outer calls, and of steps of the innermost optimizer
        self.has_reached = self.has_begun = self.is_compiled = False
        self._compiler = running_compiler()
        surround = outside_compile(self._surround, recursive=False)
        self._steps = [_ReplacedStep(outer, surround) for outer in chain]
        self._hooks: list[Any] = []
        if has_hooks(self.member):
            for kind in kinds:
                if issubclass(kind, Optimizer):
                    call_hooks_of(kind)
            before = functools.partial(self._tell, self._before)
            after = functools.partial(self._tell, self._after)
            self._hooks = [
                self.member.register_step_pre_hook(outside_compile(before, recursive=False)),
                self.member.register_step_post_hook(outside_compile(after, recursive=False)),
            ]

    @property
    def is_running(self) -> bool:
        """True inside a step."""
        return self._depth > 0 or self._level > 0

    def order_hooks(self) -> None:
        """Let all other hooks before a step change the gradients first."""
        if self._hooks:
            order_hooks(self.member, *self._hooks)

    def remove(self) -> None:
        """Remove all hooks."""
        for handle in (*self._steps, *self._hooks):
            handle.remove()
        self._steps, self._hooks = [], []

    def _surround(self, owner: Any, step: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Call a `step`, and tell what happens."""
        is_outermost = self._depth == 0
        if is_outermost:
            self.is_compiled = is_compiled(step)
            self._tell(self._begin, args, kwargs, orders=True)
        by_hand = owner is self.member and not self._hooks
        self._depth += 1
        try:
            if by_hand:
                self._before(owner, args, kwargs)
            result = step(*args, **kwargs)
            if by_hand:
                self._after(owner, args, kwargs)
        except BaseException:
            self._depth -= 1
            if is_outermost:
                self._tell(self._end, failed=True)
            raise
        self._depth -= 1
        if is_outermost:
            self._tell(self._end)
        return result

    def _tell(self, method: Callable[..., None], *values: Any, **options: Any) -> None:
        """Call a method, outside of what compiles the step, if anything does."""
        if self._compiler():
            self.is_compiled = True
            method = outside_compile(method)
        method(*values, **options)

    def _begin(self, args: Any, kwargs: Any, *, orders: bool = False) -> None:
        if orders:  # not from a hook: torch goes through them
            self.order_hooks()
        self._level = 0
        self.has_reached = self.has_begun = False
        self.on_call(self, args, kwargs)

    def _end(self, *, failed: bool = False) -> None:
        self._level = 0
        self.on_return(self, failed=failed)

    def _before(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        if optimizer is not self.member:
            return
        if self._depth == 0 and self._level in (0, self._levels):  # an exception has ended the last
            self._begin(args[1:], kwargs)
        self._level += 1
        self.has_begun = True
        self.has_reached |= self.is_of_torch and self._level >= self._levels
        self.on_begin(self)

    def _after(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        if optimizer is not self.member:
            return
        self.on_end(self)
        self._level -= 1
        if self._depth == 0 and self._level <= 0:
            self._end()


class _ReplacedStep:
    """The step of an object, replaced in the object; a copy of the object has its own step."""

    def __init__(self, owner: Any, surround: Callable[..., Any]) -> None:
        self._owner = owner
        self._surround: Any = surround  # None when removed: a scheduler may keep the replacement
        self._own = vars(owner).get("step")
        self.is_removed = False
        original = owner.step
        is_of_class = self._own is None and hasattr(type(owner), "step")

        @functools.wraps(getattr(original, "__func__", original))
        def step(self_: Any, *args: Any, **kwargs: Any) -> Any:
            run = types.MethodType(type(self_).step, self_) if is_of_class else original
            if self_ is not owner:
                return type(self_).step(self_, *args, **kwargs)
            if self.is_removed:
                return run(*args, **kwargs)
            return self._surround(owner, run, args, kwargs)

        step.replaced = self  # type: ignore[attr-defined]
        # A scheduler needs a method.
        self._replacement = types.MethodType(outside_compile(step, recursive=False), owner)
        owner.step = self._replacement

    def remove(self) -> None:
        """Restore the step, unless somebody has wrapped it again."""
        self.is_removed, self._surround = True, None
        own: Any = self._own
        while (other := _replaced(own)) is not None and other.is_removed:
            own = other._own  # that of a recording which was closed before
        if vars(self._owner).get("step") is self._replacement:
            if own is None:
                del self._owner.step
            else:
                self._owner.step = own


def _replaced(step: Any) -> _ReplacedStep | None:
    function: Any = getattr(step, "__func__", None)
    while function is not None and not hasattr(function, "replaced"):
        function = getattr(function, "__wrapped__", None)
    return getattr(function, "replaced", None)
