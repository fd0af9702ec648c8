"""What a replay reads of a run: its rows as native bits, and what carries out its steps."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from trainers.history import MOMENTS
from trainers.rule import Placement, recorded_rule, tensor_of
from trainers.transition import Simulator
from trajstore.bits import NativeType
from trajstore.source import Series, Source, attribute

__all__ = ["RecordedRows", "recorded_simulator"]

Array = npt.NDArray[Any]

_WINDOW = 512 << 20  # bytes of rows that are held at once


class RecordedRows:
    """Rows of a run, one after the other.

    Parameters
    ----------
    source : Source

    Attributes
    ----------
    steps : ndarray of int64, (step,)
    tokens : ndarray of int, (token,)
        Vocabulary ids.
    natives : dict of str to NativeType
    """

    def __init__(self, source: Source) -> None:
        self.steps = source.steps
        self.tokens = source.coordinates["token"]
        self.natives: dict[str, NativeType] = {n: s.native for n, s in source.series.items()}
        self._series = source.series
        self._scalars = {
            name: series.bits((slice(None),))
            for name, series in source.series.items()
            if series.dims == ("step",)
        }

    def __len__(self) -> int:
        return len(self.steps)

    def __contains__(self, name: str) -> bool:
        return name in self._series

    def scalar(self, name: str, number: int) -> Array:
        """Bits of a scalar of a row."""
        bits: Array = self._scalars[name][number]
        return bits

    def value(self, name: str, number: int) -> float:
        """Value of a scalar of a row."""
        return float(tensor_of(self.scalar(name, number), self.natives[name]))

    def read(self, names: Iterable[str]) -> Iterator[dict[str, Array]]:
        """Bits of variables with a token dimension, row by row.

        Reads a block at a time, or part of one where a block is large.
        """
        series = [self._series[name] for name in names if name in self._series]
        if not series:
            yield from ({} for _ in range(len(self)))
            return
        row = sum(int(np.prod(s.shape[1:])) * s.native.itemsize for s in series)
        most = max(1, _WINDOW // row)
        block = series[0].tile[0]
        start = 0
        while start < len(self):
            stop = min(len(self), start + most, (start // block + 1) * block)
            window = {s.name: s.bits((slice(start, stop),)) for s in series}
            for at in range(stop - start):
                # The row outlives the window, which is gone before the next one is read.
                yield {name: bits[at].copy() for name, bits in window.items()}
            del window
            start = stop


def recorded_simulator(source: Source, device: torch.device) -> Simulator | str:
    """What carries out the steps of a run.

    Parameters
    ----------
    source : Source
    device : torch.device

    Returns
    -------
    Simulator or str
        A text says why nothing can.
    """
    for name, reason in (
        ("W", "the run holds no weights"),
        ("grad", "the gradient was not recorded; the tiers weights+grads and all hold it"),
        ("lr", "the learning rate was not recorded; every tier holds it"),
        ("clip_coef", "what clipping did to the gradient was not recorded; every tier holds it"),
    ):
        if name not in source.series:
            return reason
    weights, gradient = source.series["W"], source.series["grad"]
    if weights.native != gradient.native:
        return (
            f"W is {weights.native.name} and grad {gradient.native.name}, and torch takes a "
            "gradient of its parameter's type only"
        )
    rule = recorded_rule(source.attributes, getattr(torch, weights.native.name), device)
    if isinstance(rule, str):
        return rule
    state = [name for name in MOMENTS if name in rule.names and name in source.series]
    return Simulator(
        rule=rule,
        placement=_placement(source, weights, device),
        natives={name: series.native for name, series in source.series.items()},
        recorded=("W", *state),
    )


def _placement(source: Source, weights: Series, device: torch.device) -> Placement:
    tokens, hidden = weights.shape[1:]
    ids = source.coordinates["token"].astype(np.int64)
    vocabulary = attribute(source.attributes, "recording", "vocabulary")
    if not isinstance(vocabulary, int) or np.array_equal(ids, np.arange(vocabulary)):
        return Placement(shape=(tokens, hidden), ids=None, device=device)
    return Placement(shape=(vocabulary, hidden), ids=ids, device=device)
