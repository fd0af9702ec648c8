"""Hooks of modules, of optimizers' steps, and of functions of torch that have none.

A copy of a model, or a file of it, does not inherit the hooks of its modules. A step may call
another: that of a wrapped optimizer, or that of a base class. The outermost call is the step of the
loop; the innermost one consumes the gradients.
"""

from __future__ import annotations

import functools
import inspect
import sys
import threading
import types
import weakref
from collections.abc import Callable, Sequence
from dataclasses import InitVar, dataclass
from types import FrameType
from typing import Any, NamedTuple

import torch
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from trajstore.trainers.recording.torch_internals import (
    CLIPPING,
    ENGINE,
    call_first,
    call_last,
    has_other_hooks,
    outside_compile,
)

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


@functools.cache
def step_of(optimizer_class: type) -> WatchedCall:
    """Return the watched `step` of a class, which the step of a subclass may call."""
    return WatchedCall(optimizer_class, "step")


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
        for optimizer in reversed(chain):
            hooks = getattr(optimizer, "_optimizer_step_post_hooks", None)
            if hooks is None or not getattr(type(optimizer).step, "hooked", False):
                self._handles.append(_WrappedStep(optimizer, self._on_begin, self._on_end))
            elif not any(hooks is place for place in hooked):
                hooked.append(hooks)
                before_hook = optimizer.register_step_pre_hook(outside_compile(self._on_begin))
                after_hook = optimizer.register_step_post_hook(outside_compile(self._on_end))
                self._handles += [before_hook, after_hook]
                if optimizer is self._member:
                    self._pre_hook = before_hook
                    first = optimizer.register_step_post_hook(outside_compile(self._on_update))
                    call_first(optimizer, first)
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
        if has_other_hooks(optimizer, expected=2) and self.is_running:
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
        def wrapped_step(_: Any, *args: Any, **kwargs: Any) -> Any:
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
