"""Rows of a run as native bits, and as parameters of the trained shape.

The kernels of torch round differently in whole vectors and in the remainder of a tensor or of a
thread's share. So a step needs a parameter of the trained shape, with every recorded token in its
original position (`Placement`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from trajstore.provenance import RunAttributes
from trajstore.store.reading.tiled_reader import TiledRun
from trajstore.trainers.recording.device_summaries import token_norm, ulp_l1
from trajstore.trainers.replays.findings import CannotReplay
from trajstore.values.native_types import NativeType, as_bits, widen

Array = npt.NDArray[Any]


def tensor_of(bits: Array, native: NativeType) -> torch.Tensor:
    """Return a new tensor of a native type with these bits."""
    signed = torch.from_numpy(np.array(bits).view(f"i{native.itemsize}"))
    return signed.view(getattr(torch, native.name))


class Placement:
    """Positions of recorded tokens in the trained parameter.

    Parameters
    ----------
    source : TiledRun
    device : torch.device
        Device of the computation.
    chosen : ndarray of int, optional
        Positions of some tokens of the run; default: all.

    Raises
    ------
    CannotReplay
        If the run has no ``W``.
    """

    def __init__(self, source: TiledRun, device: torch.device, chosen: Array | None = None) -> None:
        if "W" not in source.series:
            raise CannotReplay("the run has no W; record W")
        tokens, hidden = source.series["W"].shape[1:]
        ids = source.coordinates["token"].astype(np.int64)
        # Without a recorded size of the vocabulary, the tokens of the run are the vocabulary.
        vocabulary = RunAttributes.of(source.attributes).vocabulary
        if vocabulary is None:
            vocabulary, ids = tokens, np.arange(tokens)
        ids = ids if chosen is None else ids[chosen]
        self.device, self._chosen = device, chosen
        self._shape = (vocabulary, hidden)
        self._ids = None if np.array_equal(ids, np.arange(vocabulary)) else torch.from_numpy(ids)

    @property
    def is_whole(self) -> bool:
        """True if every token of the parameter is known."""
        return self._ids is None

    def of_tokens(self, values: Array) -> Array:
        """Select the chosen tokens from values of all tokens of the run, (token, …)."""
        return values if self._chosen is None else values[self._chosen]

    def parameter(self, bits: Array, native: NativeType) -> torch.Tensor:
        """Return the parameter with the chosen tokens at their positions, and 0 elsewhere.

        Parameters
        ----------
        bits : ndarray of ``native.bits``, (token, hidden)
            Of all tokens of the run.
        native : NativeType

        Returns
        -------
        tensor of the native type, a copy
        """
        values = tensor_of(self.of_tokens(bits), native)
        if self._ids is not None:
            whole = torch.zeros(self._shape, dtype=values.dtype, device="cpu")
            whole[self._ids] = values
            values = whole
        return values.to(self.device)

    def bits(self, parameter: torch.Tensor, native: NativeType) -> Array:
        """Return the bits of the chosen tokens of a parameter.

        Returns
        -------
        ndarray of ``native.bits``, (token, hidden)
        """
        values = parameter.cpu()
        return as_bits(values if self._ids is None else values[self._ids], native, "parameter")


_WINDOW = 512 << 20

_COUNT = "step_count"


@dataclass(frozen=True, kw_only=True, eq=False)
class RecordedRow:
    """The state right after an optimizer step.

    Attributes
    ----------
    number : int
        Position along ``step``.
    step : int
        Step of the optimizer.
    bits : dict of str to ndarray, (token, hidden) or (token,)
        Bits of the requested variables.
    """

    number: int
    step: int
    bits: dict[str, Array]


class RecordedRows:
    """Rows of a run, in order.

    Parameters
    ----------
    source : TiledRun

    Attributes
    ----------
    steps : ndarray of int64, (step,)
    tokens : ndarray of int, (token,)
        Vocabulary ids.
    natives : dict of str to NativeType
    skipped : ndarray of bool, (step,)
        True for rows of a step that a gradient scaler skipped.
    idle : ndarray of bool, (step,)
        True for rows of a step that the optimizer has not counted: it was skipped, or the
        parameter had no gradient.
    taken : ndarray, (step,)
        Steps that the optimizer has taken up to each row; skipped ones do not count.
    """

    def __init__(self, source: TiledRun) -> None:
        self.steps = source.steps
        self.tokens = source.coordinates["token"]
        self.natives: dict[str, NativeType] = {n: s.native for n, s in source.series.items()}
        self._series = source.series
        self._scalars = {
            name: series.bits((slice(None),))
            for name, series in source.series.items()
            if series.dims == ("step",)
        }
        self._hyperparameters: dict[str, list[float]] = {}
        if "hyperparameters" in source.series and "hyperparameter" in source.names:
            names = source.names["hyperparameter"].tolist()
            values = source.series["hyperparameters"].bits((slice(None),)).view(np.float64)
            self._hyperparameters = dict(zip(names, values.T.tolist(), strict=True))
        skipped = self.values("skipped") if "skipped" in self else np.zeros(len(self))
        self.skipped = (skipped == 1) & (np.arange(len(self)) > 0)
        self.idle = self.skipped.copy()
        self.taken = self.steps - np.cumsum(self.skipped)
        unsure = np.zeros(len(self), bool)
        if _COUNT in self:
            counts = self.values(_COUNT)
            self.idle[1:] |= (np.diff(counts) == 0) & (np.diff(self.steps) == 1)
            self.taken = np.where(np.isnan(counts), self.taken, counts).astype(np.int64)
        elif "skipped" in self:
            unsure = (self.steps != np.arange(len(self))) | np.isnan(skipped)
            unsure[:1] = self.steps[:1] != 0
        self._unsure = np.cumsum(unsure)

    def __len__(self) -> int:
        return len(self.steps)

    def __contains__(self, name: str) -> bool:
        return name in self._series

    @property
    def from_start(self) -> bool:
        """True if row 0 is the state before training."""
        return len(self) > 0 and self.steps[0] == self.taken[0] == 0

    def hyperparameters(self, number: int) -> dict[str, float]:
        """Return the numbers that the step before a row used; empty if rows do not hold them."""
        return {name: values[number] for name, values in self._hyperparameters.items()}

    @property
    def largest_hyperparameters(self) -> dict[str, float]:
        """The largest number that any step used; a momentum that is ever used has a state."""
        known = {n: [v for v in values if v == v] for n, values in self._hyperparameters.items()}
        return {name: max(values) for name, values in known.items() if values}

    def counts_skipped(self, number: int) -> bool:
        """Return True if the number of skipped steps before a row is known."""
        return number == 0 or not self._unsure[number - 1]

    def scalars(self, name: str) -> Array:
        """Return the bits of a scalar, (step,)."""
        return self._scalars[name]

    def values(self, name: str) -> npt.NDArray[np.float64]:
        """Return the values of a scalar, (step,)."""
        return np.asarray(widen(self._scalars[name], self.natives[name]), np.float64)

    def read(
        self,
        names: Iterable[str],
        *,
        first: int = 0,
        stop: int | None = None,
        window: int = _WINDOW,
    ) -> Iterator[RecordedRow]:
        """Yield rows in order, with variables that have more dimensions than ``step``.

        Reads one block at a time, or a part of a large block.

        Parameters
        ----------
        names : iterable of str
            Variables that the run lacks are left out.
        first, stop : int
            The first row, and the row after the last one; default: to the end.
        window : int
            Maximum bytes of rows in memory; at least one row is read.
        """
        stop = len(self) if stop is None else stop
        series = [self._series[name] for name in names if name in self._series]
        row = sum(int(np.prod(s.shape[1:])) * s.native.itemsize for s in series)
        most = max(1, window // max(row, 1))
        block = series[0].tile[0] if series else most
        while first < stop:
            end = min(stop, first + most, (first // block + 1) * block)
            blocks = {s.name: s.bits((slice(first, end),)) for s in series}
            for offset in range(end - first):
                # A copy, because the window is released before the next rows are read.
                bits = {name: block_bits[offset].copy() for name, block_bits in blocks.items()}
                number = first + offset
                yield RecordedRow(number=number, step=int(self.steps[number]), bits=bits)
            del blocks
            first = end


DERIVED: dict[str, tuple[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]]] = {
    "grad_token_norm": ("grad", lambda now, _: token_norm(now)),
    "W_step_norm": ("W", token_norm),
    "W_ulp_l1": ("W", ulp_l1),
    "cells": ("W", lambda now, _: now.to(torch.bfloat16)),
}
"""Variables that follow from another one in its row, and in the row before."""
