"""The rows of a run for a replay, in order, as native bits."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from trajstore.store.reading.tiled_reader import TiledRun
from trajstore.trainers.replays.parameter_placement import tensor_of
from trajstore.trainers.replays.replay_result import CannotReplay
from trajstore.values.native_types import NativeType

Array = npt.NDArray[Any]

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
        self._hyperparameters: list[dict[str, float]] = []
        if "hyperparameters" in source.series and "hyperparameter" in source.names:
            names = source.names["hyperparameter"].tolist()
            held = source.series["hyperparameters"].bits((slice(None),)).view(np.float64)
            self._hyperparameters = [dict(zip(names, row, strict=True)) for row in held.tolist()]
        self.skipped = np.zeros(len(self), bool)
        if "skipped" in self:
            self.skipped[1:] = [self.value("skipped", row) == 1 for row in range(1, len(self))]
        self.idle = self.skipped.copy()
        if _COUNT in self:
            counts = [self.value(_COUNT, row) for row in range(len(self))]
            self.idle[1:] |= (np.diff(counts) == 0) & (np.diff(self.steps) == 1)

    def __len__(self) -> int:
        return len(self.steps)

    def __contains__(self, name: str) -> bool:
        return name in self._series

    @property
    def from_start(self) -> bool:
        """True if row 0 is the state before training."""
        return len(self) > 0 and self.steps[0] == 0 and not self.steps_taken(0)

    @property
    def rates(self) -> npt.NDArray[np.float64]:
        """The learning rate of the step before each row, (step,)."""
        return np.array([self.value("lr", number) for number in range(len(self))])

    @property
    def clip_coefs(self) -> list[Array]:
        """Bits of the factor by which clipping multiplied the gradient of each row."""
        return [self.scalar("clip_coef", number) for number in range(len(self))]

    def hyperparameters(self, number: int) -> dict[str, float]:
        """Return the numbers that the step before a row used; empty if rows do not hold them."""
        return self._hyperparameters[number] if self._hyperparameters else {}

    @property
    def largest_hyperparameters(self) -> dict[str, float]:
        """The largest number that any step used; a momentum that is ever used has a state."""
        names = {*itertools.chain(*self._hyperparameters)}
        known = {n: [row[n] for row in self._hyperparameters if row[n] == row[n]] for n in names}
        return {name: max(values) for name, values in known.items() if values}

    def steps_taken(self, number: int) -> int:
        """Return the optimizer's steps before a row; skipped ones do not count."""
        if _COUNT in self and not np.isnan(count := self.value(_COUNT, number)):
            return int(count)
        return int(self.steps[number]) - int(np.count_nonzero(self.skipped[: number + 1]))

    def counts_skipped(self, number: int) -> bool:
        """Return True if the number of skipped steps before a row is known."""
        if "skipped" not in self or _COUNT in self:
            return True
        known = all(not np.isnan(self.value("skipped", row)) for row in range(1, number))
        return known and self.from_start and np.array_equal(self.steps[:number], np.arange(number))

    def scalar(self, name: str, number: int) -> Array:
        """Return the bits of a scalar of a row."""
        bits: Array = self._scalars[name][number]
        return bits

    def value(self, name: str, number: int) -> float:
        """Return the value of a scalar of a row."""
        return float(tensor_of(self.scalar(name, number), self.natives[name]))

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
        if not series:
            yield from (self._row(number, {}) for number in range(first, stop))
            return
        row = sum(int(np.prod(s.shape[1:])) * s.native.itemsize for s in series)
        most = max(1, window // row)
        block = series[0].tile[0]
        while first < stop:
            end = min(stop, first + most, (first // block + 1) * block)
            held = {s.name: s.bits((slice(first, end),)) for s in series}
            for at in range(end - first):
                # A copy, because the window is released before the next rows are read.
                yield self._row(first + at, {n: bits[at].copy() for n, bits in held.items()})
            del held
            first = end

    def _row(self, number: int, bits: dict[str, Array]) -> RecordedRow:
        return RecordedRow(number=number, step=int(self.steps[number]), bits=bits)


def check_inputs(rows: RecordedRows) -> None:
    """Check that the run has the variables that every step needs.

    Raises
    ------
    CannotReplay
        If the run lacks one.
    """
    for name, reason in (
        ("W", "the run has no W; record W"),
        ("grad", "the gradient was not recorded; record weights+grads or matrix"),
        ("lr", "the learning rate was not recorded; every tier has it"),
        ("clip_coef", "the clipping factor was not recorded; every tier has it"),
    ):
        if name not in rows:
            raise CannotReplay(reason)
