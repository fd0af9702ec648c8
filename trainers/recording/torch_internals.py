"""What recording needs of torch that has no public name, each with its reason.

Nothing else in the recording reaches behind torch's interface.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch.autograd import Variable
from torch.optim import Optimizer

__all__ = [
    "call_when_backward_ends",
    "copy_each",
    "differences",
    "found_overflow",
    "multiply_each",
    "name_outside_compile",
    "norms",
    "outside_compile",
    "sign_each",
    "signs",
    "uncompiled",
    "version",
]

Hook = TypeVar("Hook", bound=Callable[..., Any])


def call_when_backward_ends(callback: Callable[[], None]) -> None:
    """Have something called at the end of the backward pass that is running.

    Callbacks are called in the order in which they were queued, and may queue others. Public hooks
    see a gradient arrive, not that the pass is over; DDP itself averages gradients in such a
    callback.
    """
    Variable._execution_engine.queue_callback(callback)


def version(tensor: torch.Tensor) -> int:
    """How often a tensor was changed in place, which tells a clipped gradient without reading it.

    Autograd checks what it has saved by this number, and publishes no name for it.
    """
    return tensor._version


def uncompiled(model: torch.nn.Module) -> torch.nn.Module:
    """Module that `torch.compile` has wrapped; the module itself where it has not.

    Neither the wrapper's class nor what it holds has a public name.
    """
    inner: torch.nn.Module = getattr(model, "_orig_mod", model)
    return inner


def name_outside_compile(name: str) -> str:
    """Name of a parameter without what the wrapper of `torch.compile` adds to it."""
    return name.replace("_orig_mod.", "")


def outside_compile(hook: Hook) -> Hook:
    """The hook, not to be compiled into a model's graph, where it could not copy anything.

    `torch.compiler.disable` imports the compiler, which takes seconds; where that is not imported
    yet, nothing is compiled, and no public function tells.
    """
    if "torch._dynamo" not in sys.modules:
        return hook
    disabled: Hook = torch.compiler.disable(hook)
    return disabled


def found_overflow(optimizer: Optimizer) -> bool:
    """Whether a step that has just ended did nothing, because the scaler found an overflow.

    Fused optimizers are called also then. `GradScaler` tells them by this attribute for the time
    of the step, and nobody else.
    """
    found = getattr(optimizer, "found_inf", None)
    return found is not None and bool(found)


# What optimizers use to treat all tensors of a model in a few calls, a kernel for many of them at
# once on CUDA. The public functions take one tensor each, which costs more than the arithmetic.


def norms(tensors: list[torch.Tensor], order: float = 2) -> list[torch.Tensor]:
    """Norm of each tensor, summed in float32, or float64 where one of them is of that."""
    wide = any(tensor.dtype == torch.float64 for tensor in tensors)
    dtype = torch.float64 if wide else torch.float32
    return list(torch._foreach_norm(tensors, order, dtype)) if tensors else []


def differences(tensors: list[torch.Tensor], others: list[torch.Tensor]) -> list[torch.Tensor]:
    """Each tensor less the other, in their own type."""
    return list(torch._foreach_sub(tensors, others))


def signs(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    """−1, 0 and 1, as each tensor's type."""
    return list(torch._foreach_sign(tensors))


def sign_each(tensors: list[torch.Tensor]) -> None:
    """Put −1, 0 and 1 in the place of the values."""
    torch._foreach_sign_(tensors)


def multiply_each(tensors: list[torch.Tensor], others: list[torch.Tensor]) -> None:
    """Multiply each tensor by the other, in its place."""
    torch._foreach_mul_(tensors, others)


def copy_each(places: list[torch.Tensor], tensors: list[torch.Tensor]) -> None:
    """Copy each tensor into its place."""
    if tensors:
        torch._foreach_copy_(places, tensors)
