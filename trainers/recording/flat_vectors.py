"""Tensors of one or several types, joined to one vector."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from trajstore.errors import RecordingError

FLOATS = (torch.bfloat16, torch.float16, torch.float32, torch.float64)
"""Types that can be recorded."""


@functools.cache  # a recording asks for each number of each step
def type_name(kind: torch.dtype | type) -> str:
    """Return the name of a type without its module."""
    return kind.__name__ if isinstance(kind, type) else str(kind).removeprefix("torch.")


@functools.cache
def joint_type(types: frozenset[torch.dtype]) -> torch.dtype:
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
                f"{', '.join(map(str, FLOATS))}; record matrix instead of everything"
            )
        first = first or (name, tensor)
        if tensor.device != first[1].device:
            raise RecordingError(
                f"{first[0]} is on {first[1].device}, but {name} is on {tensor.device}; move all "
                "parameters to one device, or record matrix instead of everything"
            )


@dataclass(frozen=True, kw_only=True, eq=False)
class JoinedVector:
    """Tensors, one after another; each is copied once, to its place in a vector.

    Attributes
    ----------
    like : sequence of tensor
        Tensors of the shapes, for those that are missing.
    tensors : sequence of tensor or None
    dtype : torch.dtype
        Type of the vector.
    missing : float
        Value in place of None.
    factor : float
        Factor of the vector.
    """

    like: Sequence[torch.Tensor]
    tensors: Sequence[torch.Tensor | None]
    dtype: torch.dtype
    missing: float = 0.0
    factor: float = 1.0

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the vector, (element,)."""
        pairs = zip(self.like, self.tensors, strict=True)
        return (sum([(own if one is None else one).numel() for own, one in pairs]),)

    def on_host(self) -> torch.Tensor:
        """Return a new vector on the CPU."""
        vector = torch.empty(self.shape, dtype=self.dtype, device="cpu")
        self.copy_to(vector)
        return vector

    def copy_to(self, place: torch.Tensor) -> None:
        """Copy the tensors to a vector, (element,)."""
        present = [tensor for tensor in self.tensors if tensor is not None]
        devices = {tensor.device for tensor in present}
        first = present[0] if present else place
        device = first.device
        if len(present) < len(self.tensors):
            present = [
                first.new_full((own.numel(),), self.missing, dtype=place.dtype)
                if tensor is None
                else tensor
                for own, tensor in zip(self.like, self.tensors, strict=True)
            ]
        if len(devices) > 1:
            present = [tensor.to(device) for tensor in present]
        flat = [*map(torch.Tensor.flatten, present)]
        if device == place.device:
            torch.cat(flat, out=place)
        else:  # one copy, one wait of the host
            place.copy_(torch.cat(flat))
        if self.factor != 1.0:
            place.mul_(self.factor)


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Return True if two tensors have one type, shape and bit patterns."""
    if a.dtype != b.dtype or a.shape != b.shape:
        return False
    ratio = 8 // a.itemsize
    a, b = a.contiguous().flatten(), b.contiguous().flatten()
    wide = not (len(a) % ratio or a.storage_offset() % ratio or b.storage_offset() % ratio)
    kind = torch.int64 if wide else torch.uint8  # whole words are compared seven times as fast
    return torch.equal(a.view(kind), b.view(kind))


def bit_sums(tensors: Sequence[torch.Tensor]) -> list[tuple[int, int]]:
    """Return the sums of the bit patterns of each tensor, and of their squares, modulo 2⁶⁴."""
    found = []
    for tensor in tensors:
        flat = tensor.detach().contiguous().flatten()
        kind = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[
            min(flat.itemsize, 8)
        ]
        words = flat.view(kind).to(torch.int64)
        found.append((int(words.sum()), int((words * words).sum())))
    return found
