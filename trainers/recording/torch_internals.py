"""Private names of torch that recording needs, each with its reason.

No other module of the recording uses private names of torch.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
from torch.optim import Optimizer
from torch.optim.optimizer import _global_optimizer_post_hooks
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils.hooks import RemovableHandle

from trajstore.trainers.matrix_products import modes_of_products

Hook = TypeVar("Hook", bound=Callable[..., Any])

ENGINE = "_engine_run_backward"
"""Function of `torch.autograd` that `backward` calls with the same first arguments.

Tools wrap `backward` itself, and loops import it; a wrapper of ours there would be lost.
"""

CLIPPING = "_clip_grads_with_norm_"
"""Function of `torch.nn.utils.clip_grad` that `clip_grad_norm_` calls, which loops import."""


def in_backward() -> bool:
    """Return True inside a backward pass, where checkpointing repeats parts of a forward pass.

    Without a private name only the forward pass itself could be observed.
    """
    return torch._C._current_graph_task_id() != -1


def in_vmap() -> bool:
    """Return True inside `torch.func.vmap`, whose tensors cannot be used outside.

    torch has no public function that tells this.
    """
    stack = torch._C._functorch.get_interpreter_stack() or ()
    return any(level.key() == torch._C._functorch.TransformType.Vmap for level in stack)


def version(tensor: torch.Tensor) -> int:
    """Return how often a tensor was changed in place; it detects clipping without a read.

    Autograd checks its saved tensors by this number, which has no public name. FSDP2 accumulates
    into the part of a sharded gradient that this process holds, which alone counts that.
    """
    if type(tensor) is not torch.Tensor:
        tensor = getattr(tensor, "_local_tensor", tensor)
    return tensor._version


def versions(tensors: Sequence[torch.Tensor | None]) -> list[int]:
    """Return `version` of each tensor, and -1 for None."""
    return [
        -1 if t is None else t._version if type(t) is torch.Tensor else version(t) for t in tensors
    ]


def factor_of(node: torch.autograd.graph.Node) -> float:
    """Return the number by which a node of a graph multiplies; 1 if it is not known on the CPU.

    Only what autograd saves for the backward pass tells it.
    """
    try:
        saved = getattr(node, "_saved_other", None)
    except RuntimeError:  # a backward pass has freed it; the next one fails
        return 1.0
    if not isinstance(saved, torch.Tensor) or saved.numel() != 1 or saved.device.type != "cpu":
        return 1.0
    with _disable_current_modes():  # a dispatch mode gets a number in place of such a tensor
        factor = float(saved.item())
    return 1 / factor if node.name().startswith("Div") and factor else factor


def counts_versions() -> bool:
    """Return False inside a dispatch mode, such as one that counts operations.

    There operations on lists of tensors, as of clipping, do not count their changes. Only a private
    name tells whether a mode is active.
    """
    return torch._C._len_torch_dispatch_stack() == modes_of_products()


def uncompiled(model: torch.nn.Module) -> torch.nn.Module:
    """Return the module that `torch.compile` wraps, or the model itself.

    Neither the wrapper's class nor its attribute has a public name.
    """
    inner: torch.nn.Module = getattr(model, "_orig_mod", model)
    return inner


def name_outside_compile(name: str) -> str:
    """Return the name of a parameter without the prefix of `torch.compile`'s wrapper."""
    return name.replace("_orig_mod.", "")


def own_parameter(module: torch.nn.Module, name: str = "weight") -> torch.nn.Parameter | None:
    """Return a parameter that a module itself holds under a name; None if it holds none.

    A parametrization computes an attribute when it is read, and may change the model with it.
    """
    return module._parameters.get(name)


def outside_compile(hook: Hook, *, recursive: bool = True) -> Hook:
    """Exclude a hook from compilation; in a model's graph it could not copy anything.

    Without `recursive`, what the hook calls is compiled.

    `torch.compiler.disable` imports the compiler, which takes seconds. Without that import nothing
    is compiled, and there is no public function to check.
    """
    if "torch._dynamo" not in sys.modules:
        return hook
    disabled: Hook = torch.compiler.disable(hook, recursive=recursive)
    return disabled


def scale_of(scaler: torch.amp.GradScaler) -> torch.Tensor:
    """Return a copy of the factor of a gradient scaler; `get_scale` would wait for the device."""
    scale: torch.Tensor = scaler._scale.clone()  # type: ignore[union-attr]
    return scale


def order_hooks(optimizer: Optimizer, before: RemovableHandle, after: RemovableHandle) -> None:
    """Make a hook the last one before a step, and another the first one after it.

    torch calls hooks in the order of their registration.
    """
    hooks: Any = optimizer._optimizer_step_pre_hooks
    if next(reversed(hooks)) != before.id:
        hooks.move_to_end(before.id)
    hooks = optimizer._optimizer_step_post_hooks
    if next(iter(hooks)) != after.id:
        hooks.move_to_end(after.id, last=False)


def has_hooks(optimizer: Any) -> bool:
    """Return True if the step of an object calls the hooks that it holds."""
    return hasattr(optimizer, "_optimizer_step_pre_hooks") and getattr(
        type(optimizer).step, "hooked", False
    )


def call_hooks_of(base: type[Optimizer]) -> None:
    """Let the step of a class call hooks, as torch does when it makes an object of the class.

    The step of a subclass may call it, which may never have had an object of its own.
    """
    own: Any = vars(base)["step"]
    if not getattr(own, "hooked", False):
        own = Optimizer.profile_hook_step(own)
        own.hooked = True
        setattr(base, "step", own)  # noqa: B010  (mypy knows it as overloaded)


def has_other_hooks(optimizer: Any) -> bool:
    """Return True if another hook than ours runs after a step."""
    own = getattr(optimizer, "_optimizer_step_post_hooks", ())
    return len(own) > 1 or bool(_global_optimizer_post_hooks)


def divides_in_step(optimizer: Optimizer) -> bool:
    """Return True if a fused step divides the gradients by the factor of a gradient scaler."""
    return getattr(optimizer, "grad_scale", None) is not None


def scale_in_step(optimizer: Optimizer) -> float | None:
    """Return the factor by which a fused step divides the gradients; None without it.

    `GradScaler.step` passes it with this attribute, and does not unscale the gradients itself.
    """
    scale = getattr(optimizer, "grad_scale", None)
    return None if scale is None else float(scale)


def running_compiler() -> Callable[[], Any]:
    """Return a function that tells what compiles the functions that its caller calls, if any.

    Only a private name tells it, and without the compiler nothing is compiled.
    """
    if "torch._dynamo" not in sys.modules:
        return lambda: None
    from torch._C._dynamo.eval_frame import get_eval_frame_callback

    return get_eval_frame_callback


def is_compiled(function: Any) -> bool:
    """Return True for a result of `torch.compile`, and not of `torch.compiler.disable`."""
    is_wrapped = hasattr(function, "_torchdynamo_orig_callable")
    return is_wrapped and not getattr(function, "_torchdynamo_disable", False)


def found_overflow(optimizer: Optimizer) -> bool:
    """Return True if the last step had no effect because the scaler found an overflow.

    Fused optimizers are also called then. `GradScaler` marks such a step only with this attribute.
    """
    overflow = getattr(optimizer, "found_inf", None)
    return overflow is not None and bool(overflow)


# Optimizers use these functions to process many tensors in one call, on CUDA in one kernel. The
# public functions take one tensor each, which costs more than the arithmetic.


def norms(tensors: list[torch.Tensor], order: float = 2) -> list[torch.Tensor]:
    """Return the norm of each tensor, summed in float32, or float64 if one of them has it."""
    wide = any(tensor.dtype == torch.float64 for tensor in tensors)
    dtype = torch.float64 if wide else torch.float32
    return list(torch._foreach_norm(tensors, order, dtype)) if tensors else []


def plain_total_norm(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return the norm of tensors together, as `torch.nn.utils.get_total_norm` does, bit for bit.

    That function sorts the tensors by device and type, which takes longer than the norm.
    """
    if len({(tensor.dtype, tensor.device) for tensor in tensors}) > 1:
        return torch.nn.utils.get_total_norm(tensors)
    norms = torch._foreach_norm([*tensors], 2.0)
    total: torch.Tensor = torch.linalg.vector_norm(torch.stack(norms))
    return total


def differences(tensors: list[torch.Tensor], others: list[torch.Tensor]) -> list[torch.Tensor]:
    """Subtract the other from each tensor, in its own type."""
    return list(torch._foreach_sub(tensors, others))


def signs(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    """Return −1, 0 or 1 for each element, in each tensor's type."""
    return list(torch._foreach_sign(tensors))


def sign_each(tensors: list[torch.Tensor]) -> None:
    """Replace the values by −1, 0 and 1."""
    torch._foreach_sign_(tensors)


def multiply_each(tensors: list[torch.Tensor], others: list[torch.Tensor]) -> None:
    """Multiply each tensor by the other in place."""
    torch._foreach_mul_(tensors, others)


def copy_each(places: list[torch.Tensor], tensors: list[torch.Tensor]) -> None:
    """Copy each tensor to its place; on a device, those of one type in one kernel."""
    if places and places[0].device.type == "cpu":
        torch._foreach_copy_(places, tensors)
        return
    all_pairs = list(zip(places, tensors, strict=True))
    for kind in {(tensor.dtype, place.dtype) for place, tensor in all_pairs}:
        pairs = [p for p in all_pairs if (p[1].dtype, p[0].dtype) == kind]
        torch._foreach_copy_([place for place, _ in pairs], [tensor for _, tensor in pairs])
