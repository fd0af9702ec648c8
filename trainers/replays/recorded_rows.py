"""Rows of a run as native bits, as parameters of the trained shape, and checked on their own.

The kernels of torch round differently in whole vectors and in the remainder of a tensor or of a
thread's share. So a step needs a parameter of the trained shape, with every recorded token in its
original position (`Placement`).

`RowChecks` checks what needs no step. Row 0 is the state before training, ``skipped`` is 0 or 1,
and the clipping factor follows from the norm of all gradients. Summaries and cells are computed
again from the recorded arrays. They show what steps cannot: a changed gradient whose effect on W
and the state is rounded away.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from trajstore.store.reading.run_attributes import attribute
from trajstore.store.reading.tiled_reader import TiledRun
from trajstore.trainers.recording.device_summaries import token_norm, ulp_l1
from trajstore.trainers.recording.gradient import clip_coefficient
from trajstore.trainers.replays.replay_result import (
    CannotReplay,
    Compared,
    Finding,
    finding_at,
    ulp_distance,
)
from trajstore.values.native_types import NATIVE_TYPES, NativeType, as_bits, convert, is_nan, widen

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
            values = source.series["hyperparameters"].bits((slice(None),)).view(np.float64)
            self._hyperparameters = [dict(zip(names, row, strict=True)) for row in values.tolist()]
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
            blocks = {s.name: s.bits((slice(first, end),)) for s in series}
            for offset in range(end - first):
                # A copy, because the window is released before the next rows are read.
                yield self._row(
                    first + offset, {n: bits[offset].copy() for n, bits in blocks.items()}
                )
            del blocks
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


_OF_GRADIENT = "grad_token_norm"
_OF_MOTION = {"W_step_norm": token_norm, "W_ulp_l1": ulp_l1}


class RowChecks:
    """Checks of the rows of a run, with their results.

    Parameters
    ----------
    rows : RecordedRows

    Attributes
    ----------
    compared : dict of str to Compared
        Counts of different values, for each variable.
    findings : list of Finding
    summaries : set of str
        Variables that `compare_summaries` needs: recorded summaries and their inputs, if those are
        recorded.
    """

    def __init__(self, rows: RecordedRows) -> None:
        self._rows = rows
        self.compared: dict[str, Compared] = {}
        self.findings: list[Finding] = []
        self.summaries = {name for name in _OF_MOTION if name in rows}
        if self.summaries:
            self.summaries.add("W")
        if _OF_GRADIENT in rows and "grad" in rows:
            self.summaries |= {_OF_GRADIENT, "grad"}

    def compare(self, name: str, step: int, stored: Array, computed: Array) -> None:
        """Compare one variable of one step.

        Parameters
        ----------
        name : str
        step : int
        stored, computed : ndarray, (token, hidden), (token,) or ()
            Native bits.
        """
        counted = self.compared.setdefault(name, Compared())
        counted.steps += 1
        wrong = stored != computed
        if number := int(np.count_nonzero(wrong)):
            distance = ulp_distance(stored[wrong], computed[wrong], self._rows.natives[name])
            counted.differing += number
            counted.first = counted.first or self._place(step, wrong)
            counted.ulps = None if distance is None else max(distance, counted.ulps or 0)

    def _place(self, step: int, wrong: Array) -> dict[str, int | None]:
        """Return step, token and hidden of the first different value."""
        place = np.argwhere(wrong)[0].tolist() if wrong.ndim else []
        return {
            "step": step,
            "token": int(self._rows.tokens[place[0]]) if place else None,
            "hidden": place[1] if len(place) > 1 else None,
        }

    def check_skipped(self) -> None:
        """Check that each row but the first is 0 or 1, or NaN like the rate of several steps."""
        rows = self._rows
        if "skipped" not in rows:
            return
        for number, step in enumerate(rows.steps[1:].tolist(), 1):
            skipped, rate = rows.value("skipped", number), rows.value("lr", number)
            if skipped not in (0, 1) and not (np.isnan(skipped) and np.isnan(rate)):
                self.findings.append(
                    Finding(kind="invalid", variable="skipped", step=step, tokens=0)
                )

    def checked_first_row(self, row: RecordedRow, starts: Mapping[str, float]) -> RecordedRow:
        """Return the state before training, in which every element of the optimizer's is a start.

        Another state, or a gradient, gives a finding. A run that starts later is not checked.
        """
        rows = self._rows
        if not rows.from_start:
            return row
        bits = dict(row.bits)
        for name in ("grad", *starts):
            if name not in bits:
                continue
            stored, native = bits[name], rows.natives[name]
            if name == "grad":  # the same NaN everywhere
                values, counts = np.unique(stored, return_counts=True)
                wrong = stored != values[counts.argmax()]
                wrong |= ~tensor_of(stored, native).isnan().numpy()
            else:
                dtype = getattr(torch, native.name)
                start = torch.tensor(starts[name], dtype=dtype, device="cpu")
                bits[name] = np.full_like(stored, as_bits(start, native, name))
                wrong = stored != bits[name]
            if wrong.any():
                self.findings.append(
                    finding_at({name: wrong}, rows.tokens, kind="start", step=row.step)
                )
        return replace(row, bits=bits)

    def check_clipping(self, row: RecordedRow, max_grad_norm: object) -> None:
        """Compare the clipping factor with the norm of the gradients and the recorded limit."""
        rows = self._rows
        if "grad_norm" not in rows or not isinstance(max_grad_norm, int | float):
            return
        native = rows.natives["clip_coef"]
        if rows.natives["grad_norm"] != native:
            return
        expected = clip_coefficient(
            tensor_of(rows.scalar("grad_norm", row.number), native), max_grad_norm
        )
        stored = rows.scalar("clip_coef", row.number)
        # Without clipping, the factor is 1.
        allowed = [
            as_bits(factor, native, "clip_coef") for factor in (expected, torch.ones_like(expected))
        ]
        if not max_grad_norm and stored != allowed[1]:
            return  # the loop did not name its norm, and the recorder found the factor
        agrees = any(stored == factor for factor in allowed)
        self.compare("clip_coef", row.step, stored, stored if agrees else allowed[0])
        if not agrees:
            names = "clip_coef, grad_norm"
            self.findings.append(
                Finding(kind="inconsistent", variable=names, step=row.step, tokens=0)
            )

    def compare_summaries(self, previous: RecordedRow, row: RecordedRow) -> None:
        """Compare those summaries of a row that were read."""
        natives = self._rows.natives
        computed: dict[str, torch.Tensor] = {}
        if _OF_GRADIENT in row.bits:
            computed[_OF_GRADIENT] = token_norm(tensor_of(row.bits["grad"], natives["grad"]))
        for name, norm in _OF_MOTION.items():
            if name in row.bits:
                before, now = (tensor_of(r.bits["W"], natives["W"]) for r in (previous, row))
                computed[name] = norm(now, before)
        self._check_derived(
            row,
            {
                name: as_bits(values, NATIVE_TYPES["float32"], name)
                for name, values in computed.items()
            },
        )

    def check_cells(self, row: RecordedRow) -> None:
        """Compare the cells of a row with W rounded to bfloat16, if both were read."""
        if not {"W", "cells"} <= row.bits.keys():
            return
        native, bfloat16 = self._rows.natives["W"], NATIVE_TYPES["bfloat16"]
        expected, _ = convert(np.asarray(widen(row.bits["W"], native)), native, bfloat16)
        cells = row.bits["cells"]
        nan = is_nan(cells, bfloat16) | is_nan(expected, bfloat16)  # one of them may be lost
        self._check_derived(row, {"cells": np.where(nan, cells, expected)})

    def _check_derived(self, row: RecordedRow, computed: Mapping[str, Array]) -> None:
        """Compare variables of a row with values that were computed from others of it.

        A difference is a finding, unless the step has one: an altered W also changes its summaries.
        """
        wrong = {}
        for name, bits in computed.items():
            self.compare(name, row.step, row.bits[name], bits)
            if (row.bits[name] != bits).any():
                wrong[name] = row.bits[name] != bits
        if wrong and all(finding.step != row.step for finding in self.findings):
            self.findings.append(
                finding_at(wrong, self._rows.tokens, kind="inconsistent", step=row.step)
            )
