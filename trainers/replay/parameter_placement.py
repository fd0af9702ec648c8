"""Recorded bits as the parameter that was trained, and back.

The kernels of torch round differently in whole vectors and in what is left over at the end of a
tensor or of a thread's share. So a step is carried out on a parameter of the shape that was
trained, every recorded token in its own place.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from trajstore.store.reading.run_settings import attribute
from trajstore.store.reading.tiled_reader import TiledRun
from trajstore.values.native_types import NativeType, as_bits

__all__ = ["Placement", "recorded_placement", "tensor_of"]

Array = npt.NDArray[Any]


def tensor_of(bits: Array, native: NativeType) -> torch.Tensor:
    """Tensor of a native type with these bits, a copy."""
    signed = torch.from_numpy(np.array(bits).view(f"i{native.itemsize}"))
    return signed.view(getattr(torch, native.name))


@dataclass(frozen=True, kw_only=True, eq=False)
class Placement:
    """Where the recorded tokens lie in the parameter that was trained.

    Attributes
    ----------
    shape : tuple of int
        Of the parameter: (vocabulary, hidden).
    ids : ndarray of int, (token,), optional
        Rows that were recorded; None if that is all of them.
    device : torch.device
        That the steps are carried out on.
    """

    shape: tuple[int, int]
    ids: Array | None
    device: torch.device

    def parameter(self, bits: Array, native: NativeType) -> torch.Tensor:
        """Parameter with the recorded values in their places, and 0 elsewhere.

        Parameters
        ----------
        bits : ndarray of ``native.bits``, (token, hidden)
        native : NativeType

        Returns
        -------
        tensor of the native type, a copy
        """
        values = tensor_of(bits, native)
        if self.ids is not None:
            whole = torch.zeros(self.shape, dtype=values.dtype)
            whole[torch.from_numpy(self.ids)] = values
            values = whole
        return values.to(self.device)

    def bits(self, parameter: torch.Tensor, native: NativeType) -> Array:
        """Bits of the recorded values of a parameter.

        Returns
        -------
        ndarray of ``native.bits``, (token, hidden)
        """
        values = parameter.cpu()
        if self.ids is not None:
            values = values[torch.from_numpy(self.ids)]
        return as_bits(values, native, "parameter")


def recorded_placement(source: TiledRun, device: torch.device) -> Placement:
    """Placement of the recorded tokens of a run.

    Parameters
    ----------
    source : TiledRun
        With the variable ``W``.
    device : torch.device
    """
    tokens, hidden = source.series["W"].shape[1:]
    ids = source.coordinates["token"].astype(np.int64)
    vocabulary = attribute(source.attributes, "recording", "vocabulary")
    if not isinstance(vocabulary, int) or np.array_equal(ids, np.arange(vocabulary)):
        return Placement(shape=(tokens, hidden), ids=None, device=device)
    return Placement(shape=(vocabulary, hidden), ids=ids, device=device)
