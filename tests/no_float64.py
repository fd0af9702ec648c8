"""A device without float64, on the CPU."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch")
from torch.utils._pytree import tree_map  # noqa: E402


class OnMps(torch.Tensor):
    """A tensor of the CPU that names mps as its device, and refuses float64."""

    device = torch.device("mps")  # type: ignore[assignment]

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        to_host = func is torch.Tensor.cpu or "cpu" in (*args[1:2], kwargs.get("device"))
        into_host = func is torch.Tensor.copy_ and not isinstance(args[0], cls)

        def stays(value: Any) -> Any:
            if not isinstance(value, torch.Tensor):
                return value
            if to_host or into_host:
                return value.as_subclass(torch.Tensor)
            if value.dtype == torch.float64:
                raise TypeError("Cannot convert a MPS Tensor to float64 dtype")
            return value if isinstance(value, cls) else value.as_subclass(cls)

        # In this process the memory of mps is that of the CPU.
        here = {cls.device: torch.device("cpu")}
        args, kwargs = tree_map(
            lambda arg: here.get(arg, arg) if isinstance(arg, torch.device) else arg, (args, kwargs)
        )
        with torch._C.DisableTorchFunctionSubclass():
            found = func(*args, **kwargs)
            if func is torch.Tensor.grad.__get__:  # type: ignore[attr-defined]
                # A gradient is one object however often it is asked for.
                if type(found) is torch.Tensor:
                    args[0].grad = stays(found)
                return args[0].grad
            return tree_map(stays, found)
