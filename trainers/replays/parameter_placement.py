"""Recorded bits as a parameter of the trained shape, and back.

The kernels of torch round differently in whole vectors and in the remainder of a tensor or of a
thread's share. So a step needs a parameter of the trained shape, with every recorded token in its
original position.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from trajstore.store.reading.run_info import attribute
from trajstore.store.reading.tiled_reader import TiledRun
from trajstore.values.native_types import NativeType, as_bits

Array = npt.NDArray[Any]


def tensor_of(bits: Array, native: NativeType) -> torch.Tensor:
    """Return a new tensor of a native type with these bits."""
    signed = torch.from_numpy(np.array(bits).view(f"i{native.itemsize}"))
    return signed.view(getattr(torch, native.name))


@dataclass(frozen=True, kw_only=True, eq=False)
class Placement:
    """Positions of the recorded tokens in the trained parameter.

    Attributes
    ----------
    shape : tuple of int
        Shape of the parameter: (vocabulary, hidden).
    ids : ndarray of int, (token,), optional
        Recorded rows; None for all rows.
    device : torch.device
        Device of the computation.
    """

    shape: tuple[int, int]
    ids: Array | None
    device: torch.device

    def parameter(self, bits: Array, native: NativeType) -> torch.Tensor:
        """Return the parameter with the recorded values at their positions, and 0 elsewhere.

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
            whole = torch.zeros(self.shape, dtype=values.dtype, device="cpu")
            whole[torch.from_numpy(self.ids)] = values
            values = whole
        return values.to(self.device)

    def bits(self, parameter: torch.Tensor, native: NativeType) -> Array:
        """Return the bits of the recorded values of a parameter.

        Returns
        -------
        ndarray of ``native.bits``, (token, hidden)
        """
        values = parameter.cpu()
        if self.ids is not None:
            values = values[torch.from_numpy(self.ids)]
        return as_bits(values, native, "parameter")


def recorded_placement(source: TiledRun, device: torch.device) -> Placement:
    """Return the placement of the recorded tokens of a run.

    Parameters
    ----------
    source : TiledRun
        A run with the variable ``W``.
    device : torch.device
    """
    tokens, hidden = source.series["W"].shape[1:]
    ids = source.coordinates["token"].astype(np.int64)
    vocabulary = attribute(source.attributes, "recording", "vocabulary")
    if not isinstance(vocabulary, int) or np.array_equal(ids, np.arange(vocabulary)):
        return Placement(shape=(tokens, hidden), ids=None, device=device)
    return Placement(shape=(vocabulary, hidden), ids=ids, device=device)
