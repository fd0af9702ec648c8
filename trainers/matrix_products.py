"""Products of 16-bit matrices on the CPU, computed in float32 and rounded once.

Processors without instructions for bfloat16 or float16 multiply such matrices 10 to 50 times slower
than those of float32. A 16-bit product is defined by sums in float32 that are rounded once.
Computing it from float32 copies follows the same rule; only the order of the summation differs.
"""

from __future__ import annotations

import contextlib
import functools
import time
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from typing import Any, Literal

import torch

# There is no public name for a function that sees each operation, also those of a backward pass.
from torch.utils._python_dispatch import TorchDispatchMode

Products = Literal["native", "float32"]

_aten = torch.ops.aten
_PRODUCTS = {
    operation.default
    for operation in (_aten.mm, _aten.addmm, _aten.bmm, _aten.baddbmm, _aten.mv, _aten.addmv,
                      _aten.dot)
}  # fmt: skip
_ATTENTION = {
    # Its second result, the logarithm of sums, is float32 in any case.
    _aten._scaled_dot_product_flash_attention_for_cpu.default: 1,
    _aten._scaled_dot_product_flash_attention_for_cpu_backward.default: 3,
}
"""Number of results in the type of the inputs."""

_NARROW = (torch.bfloat16, torch.float16)
_SLOWER = 2.0  # native products are faster by a third, or slower by 10 and more
_SIZE = 256

_active: ContextVar[int] = ContextVar("float32_products", default=0)


class _Mode(TorchDispatchMode):
    """Replaces products of 16-bit tensors on the CPU below autograd."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func in _PRODUCTS:
            results = 0
        elif func in _ATTENTION:
            results = _ATTENTION[func]
        else:
            if torch.is_inference_mode_enabled():
                # There autograd does not split operations such as linear into products.
                with self:
                    result = func.decompose(*args, **kwargs or {})
                if result is not NotImplemented:
                    return result
            result = func(*args, **kwargs or {})
            if isinstance(args[0] if args else None, list) and func._schema.is_mutable:
                _count_changes(func, args)
            return result
        kind = args[0].dtype
        if kind not in _NARROW or args[0].device.type != "cpu":
            return func(*args, **kwargs or {})
        wide = {name: _widened(value) for name, value in (kwargs or {}).items()}
        result = func(*map(_widened, args), **wide)
        if not results:
            return result.to(kind)
        return tuple(
            part.to(kind) if place < results else part for place, part in enumerate(result)
        )


def _count_changes(func: Any, args: tuple[Any, ...]) -> None:
    """Count a change of each tensor of the lists that an operation changes in place.

    Without a mode autograd does so, but for operations on lists not inside one.
    """
    for value, argument in zip(args, func._schema.arguments, strict=False):
        if argument.alias_info is not None and argument.alias_info.is_write:
            tensors = value if isinstance(value, list) else [value]
            torch.autograd.graph.increment_version(tensors)


def _widened(value: Any) -> Any:
    is_narrow = isinstance(value, torch.Tensor) and value.dtype in _NARROW
    return value.float() if is_narrow else value


@contextlib.contextmanager
def float32_products(enabled: bool = True) -> Iterator[None]:
    """Compute products of bfloat16 and float16 matrices on the CPU in float32, rounded once.

    Inside the ``with`` block, matrix products and attention follow this rule, in forward and
    backward passes and under `torch.autocast`. Tensors on other devices are not affected. A model
    that `torch.compile` has compiled runs uncompiled there.
    Products with ``out=`` and those in place keep torch's own.

    Parameters
    ----------
    enabled : bool
        False changes nothing.

    Examples
    --------
    >>> import torch
    >>> a, b = torch.full((2, 3), 1.5, dtype=torch.bfloat16), torch.ones(3, 2).bfloat16()
    >>> with float32_products():
    ...     product = a @ b
    >>> product.dtype, product[0, 0].item()
    (torch.bfloat16, 4.5)
    """
    if not enabled:
        yield
        return
    token = _active.set(_active.get() + 1)
    try:
        with _Mode():  # type: ignore[no-untyped-call]
            yield
    finally:
        _active.reset(token)


def modes_of_products() -> int:
    """Return the number of `float32_products` blocks around the call, which count all changes."""
    return _active.get()


@functools.cache
def native_is_slow(kind: torch.dtype) -> bool:
    """Return True if float32 multiplies matrices faster than a 16-bit type on this processor.

    The first call times one product of each; they differ by factors of 3 or more.
    """
    a, b = torch.ones(2, _SIZE, _SIZE, dtype=kind, device="cpu")
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # whose own time other programs do not change
    try:
        native = _seconds(lambda: a @ b)
        wide = _seconds(lambda: (a.float() @ b.float()).to(kind))
    finally:
        torch.set_num_threads(threads)
    return native > _SLOWER * wide


def _seconds(call: Callable[[], Any]) -> float:
    call()  # may choose or compile a kernel
    times = []
    for _ in range(3):
        start = time.thread_time()
        call()
        times.append(time.thread_time() - start)
    return min(times)


def choose_products(kinds: set[torch.dtype], device: torch.device) -> tuple[Products, str]:
    """Return how a training should compute its products on this machine, and why.

    Parameters
    ----------
    kinds : set of torch.dtype
        Types of its products.
    device : torch.device
    """
    narrow = sorted((kind for kind in kinds if kind in _NARROW), key=str)
    if device.type != "cpu" or not narrow:
        return "native", "the training multiplies no 16-bit matrices on the CPU"
    name = str(narrow[0]).removeprefix("torch.")
    if any(map(native_is_slow, narrow)):
        return "float32", f"this processor multiplies {name} matrices slower than float32"
    return "native", f"this processor multiplies {name} matrices at full speed"
