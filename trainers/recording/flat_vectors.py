"""Tensors of one or several types, joined to one vector."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence

import torch

from trajstore.errors import RecordingError
from trajstore.trainers.recording.torch_internals import copy_each

__all__ = ["FLOATS", "check_joinable", "join", "joint_type", "same_bits"]

FLOATS = (torch.bfloat16, torch.float16, torch.float32, torch.float64)
"""Types that can be recorded."""


def joint_type(types: Sequence[torch.dtype]) -> torch.dtype:
    """Return the smallest type that holds all values of each."""
    return functools.reduce(torch.promote_types, types)


def check_joinable(tensors: Mapping[str, torch.Tensor]) -> None:
    """Raise an error if tensors cannot form one vector.

    Raises
    ------
    RecordingError
        If their devices differ, or a type is not one of floating-point numbers.
    """
    first: tuple[str, torch.Tensor] | None = None
    for name, tensor in tensors.items():
        if tensor.dtype not in FLOATS:
            raise RecordingError(
                f"{name} has the type {tensor.dtype}, expected one of "
                f"{', '.join(map(str, FLOATS))}; record all instead of everything"
            )
        first = first or (name, tensor)
        if tensor.device != first[1].device:
            raise RecordingError(
                f"{first[0]} is on {first[1].device}, but {name} is on {tensor.device}; move all "
                "parameters to one device, or record all instead of everything"
            )


def join(
    place: torch.Tensor,
    like: Sequence[torch.Tensor],
    tensors: Sequence[torch.Tensor | None],
    *,
    missing: float = 0.0,
) -> None:
    """Copy tensors to a vector, one after another, with `missing` in place of None.

    Parameters
    ----------
    place : tensor, (element,)
    like : sequence of tensor
        Tensors of the shapes.
    tensors : sequence of tensor or None
    """
    first = next((tensor for tensor in tensors if tensor is not None), place)
    if place.device.type == "cpu" != first.device.type:  # one copy, for which the host waits once
        place.copy_(
            torch.cat(
                [
                    first.new_full((shaped.numel(),), missing, dtype=place.dtype)
                    if tensor is None
                    else tensor.detach().to(first.device).flatten()
                    for shaped, tensor in zip(like, tensors, strict=True)
                ]
            )
        )
        return
    parts = place.split([tensor.numel() for tensor in like])
    places, values = [], []
    for part, shaped, tensor in zip(parts, like, tensors, strict=True):
        if tensor is None:
            part.fill_(missing)
        else:
            places.append(part.view(shaped.shape))
            values.append(tensor.detach())
    copy_each(places, values)


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Return True if two tensors have one type, shape and bit patterns."""
    if a.dtype != b.dtype or a.shape != b.shape:
        return False
    return torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8))
