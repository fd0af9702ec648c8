"""A device without float64, on the CPU."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils._pytree import tree_map

_READS = (torch.equal, torch.Tensor.tolist, torch.Tensor.item, torch.Tensor.__bool__)


class OnMps(torch.Tensor):
    """A tensor of the CPU that names mps as its device, and refuses float64."""

    waits = 0  # of the host for values of the device
    device = torch.device("mps")  # type: ignore[assignment]

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in (torch.Tensor.backward, torch.autograd.backward):
            # Those that watch the engine see these tensors, too.
            roots = args[0] if isinstance(args[0], tuple) else (args[0],)
            ones = tuple(map(torch.ones_like, roots))
            options = {"allow_unreachable": True, "accumulate_grad": True}
            run: Any = torch.autograd._engine_run_backward  # type: ignore[attr-defined]
            return run(roots, ones, False, False, (), **options)
        goal = [one for one in (*args[1:2], kwargs.get("device")) if isinstance(one, str)]
        to_host = func is torch.Tensor.cpu or goal == ["cpu"]
        into_host = func is torch.Tensor.copy_ and not isinstance(args[0], cls)

        if to_host or into_host or func in _READS:
            cls.waits += 1
        elif func is torch._foreach_copy_ and not isinstance(args[0][0], cls):
            cls.waits += sum(isinstance(value, cls) for value in args[1])
            into_host = True

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
            if func == torch.Tensor.grad.__get__:  # type: ignore[attr-defined]
                # A gradient is one object however often it is asked for.
                if type(found) is torch.Tensor:
                    args[0].grad = stays(found)
                return args[0].grad
            return tree_map(stays, found)


def on_mps(model: Any) -> Any:
    """Make the parameters and buffers of a model such tensors; return the model."""
    there: dict[Any, Any] = {
        tensor: torch.nn.Parameter(tensor.detach().as_subclass(OnMps), tensor.requires_grad)
        for tensor in model.parameters()
    }
    there |= {tensor: tensor.as_subclass(OnMps) for tensor in model.buffers()}
    for module in model.modules():
        for tensors in (module._parameters, module._buffers):
            tensors.update({name: there.get(tensor) for name, tensor in tensors.items()})
    return model
