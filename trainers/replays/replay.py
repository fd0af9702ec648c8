"""Verification that every recorded step follows from the previous row.

For each step, the real optimizer of `torch.optim` gets W and the state of the previous row and the
recorded gradient, clipped as in the training. Its result is compared with the row, bit for bit.

`RowChecks` checks what needs no step. Row 0 is the state before training, ``skipped`` is 0 or 1,
and the clipping factor follows from the norm of all gradients. Summaries and cells are computed
again from the recorded arrays. They show what steps cannot: a changed gradient whose effect on W
and the state is rounded away.
"""

from __future__ import annotations

import itertools
import math
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from trajstore.provenance import RunAttributes
from trajstore.store.reading.tiled_reader import open_tiled
from trajstore.trainers.process_mode import process_mode
from trajstore.trainers.recording.gradient import clip_coefficient
from trajstore.trainers.replays.findings import (
    LISTED,
    CannotReplay,
    Compared,
    Finding,
    Findings,
    Kind,
    ReplayDevice,
    Unreplayed,
    UnreplayedSteps,
    finding_at,
    replay_device,
    replay_devices,
    ulp_distance,
)
from trajstore.trainers.replays.optimizer_steps import LARGEST_RATE, OptimizerSteps, State
from trajstore.trainers.replays.recorded_rows import (
    DERIVED,
    Placement,
    RecordedRow,
    RecordedRows,
    tensor_of,
)
from trajstore.values.native_types import as_bits, is_nan, widen
from trajstore.values.optimizer_rule import MOMENTS

Array = npt.NDArray[Any]


@dataclass(frozen=True, kw_only=True)
class Replay(Findings):
    """Result of `trajstore.trainers.replays.replay.replay`.

    Attributes
    ----------
    optimizer : str, optional
        Class of the optimizer.
    replayed_on : str
    replayed, skipped : int
        Of the steps recorded after the first row, those that were replayed; those of them that a
        gradient scaler had skipped.
    rebuilt : tuple of str
        State of the optimizer that is not recorded, rebuilt from row 0 on.
    variables : dict of str to Compared
    findings : tuple of Finding
        The first `LISTED`. On another kind of device, different values are counted but are none.
    unreplayed : tuple of Unreplayed
    """

    optimizer: str | None
    replayed_on: str
    replayed: int
    skipped: int
    rebuilt: tuple[str, ...]
    variables: dict[str, Compared]
    findings: tuple[Finding, ...]
    unreplayed: tuple[Unreplayed, ...]

    @property
    def differing(self) -> int:
        """Number of different values of all variables together."""
        return sum(compared.differing for compared in self.variables.values())

    def facts(self) -> dict[str, Any]:
        """Return the result as JSON values."""
        facts = super().facts() | {"differing": self.differing}
        return facts | {"total_findings": facts.pop("total")}


def replay(
    path: str | os.PathLike[str], *, on_progress: Callable[[int, int], None] | None = None
) -> Replay:
    """Repeat every recorded step and compare the results bit for bit.

    A step that does not give the recorded row is one finding: the first different value and the
    number of different values. The next step starts from the recorded row again. So one altered
    value gives a finding in its own step and at most one more in the next step.

    Parameters
    ----------
    path : path-like or str
        Path of a run.
    on_progress : callable, optional
        Called with the number of finished rows and the number of all rows.

    Returns
    -------
    Replay

    Raises
    ------
    RunNotFound, FormatError
        If there is no run at `path`, or a chunk is damaged.

    Examples
    --------
    >>> found = replay("everything.zarr")
    >>> found.clean, found.replayed
    (True, 3)
    """
    source = open_tiled(path)
    rows, attributes = RecordedRows(source), source.attributes
    optimizer = RunAttributes.of(attributes).optimizer
    products = optimizer.name == "Muon"
    device = replay_device(attributes, products=products)
    devices = replay_devices(attributes, rows.steps, products=products)
    unreplayed, checks = UnreplayedSteps(), RowChecks(rows)
    exact = all(item.exact for item in (device, *devices))
    pairs = [(n, of) for n, (of, _) in DERIVED.items() if exact or n == "cells"]
    names = {name for pair in pairs if pair[0] in rows and pair[1] in rows for name in pair}
    steps: StepReplay | None = None
    starts = dict.fromkeys(MOMENTS, 0.0)
    with (
        process_mode(device.threads, device.modes),
        unreplayed.collect(*rows.steps[1:].tolist()),
    ):
        placement = Placement(source, device.device)
        steps = StepReplay(OptimizerSteps(source, rows, placement, forced=True), checks, devices)
        names |= {"grad", *steps.recorded}
        starts = steps.starts
    checks.check_skipped()
    previous: RecordedRow | None = None
    for here, part in itertools.groupby(rows.read(names), lambda row: devices[row.number]):
        with process_mode(here.threads, here.modes):
            for row in part:
                current = row if previous else checks.checked_first_row(row, starts)
                if previous and steps:
                    with unreplayed.collect(row.step):
                        steps.replay(previous, current)
                checks.check_derived(previous, current)
                previous = current
                if on_progress is not None:
                    on_progress(row.number + 1, len(rows))
    replayed = set() if steps is None else steps.replayed
    notes = dict.fromkeys(note for item in (device, *devices) for note in item.notes)
    return Replay(
        path=os.fspath(path),
        optimizer=optimizer.path or None,
        exact=exact,
        recorded_on=device.recorded_on,
        replayed_on=device.replayed_on,
        steps=max(len(rows) - 1, 0),
        replayed=len(replayed),
        skipped=len(replayed.intersection(rows.steps[rows.skipped].tolist())),
        rebuilt=steps.rebuilt if steps and replayed else (),
        variables=checks.compared,
        findings=tuple(sorted(checks.findings, key=lambda item: item.step)[:LISTED]),
        total=len(checks.findings),
        unreplayed=unreplayed.all(),
        notes=(*notes, *(() if steps is None else steps.notes)),
    )


class StepReplay:
    """Repeats recorded steps in order, and compares each result with the next row.

    Every step starts from the recorded row before it, even if that row is wrong. State that is not
    recorded is carried from step to step. After a value differs, its carried state is wrong, so
    that value is no longer compared.

    Parameters
    ----------
    steps : OptimizerSteps
        With `forced`.
    checks : RowChecks
        Counts the compared values, and collects the errors.
    devices : sequence of ReplayDevice, (step,)
        Of each row. If it is not exact, different values are counted but are no findings.

    Attributes
    ----------
    recorded, rebuilt : tuple of str
        See `OptimizerSteps`.
    replayed : set of int
        Steps that were repeated.
    starts : dict of str to float
        State of an element before the first step, if it is known from the number of steps.
    """

    def __init__(
        self, steps: OptimizerSteps, checks: RowChecks, devices: Sequence[ReplayDevice]
    ) -> None:
        self.recorded, self.rebuilt = steps.recorded, steps.rebuilt
        self.replayed: set[int] = set()
        self.starts = steps.optimizer.starts if steps.optimizer.counts_steps else {}
        self._steps, self._checks, self._devices = steps, checks, devices
        schedule = RunAttributes.of(steps.attributes).optimizer.schedule
        self._max_grad_norm = schedule.get("max_grad_norm")
        self._carried: State | None = None
        self._dropped: Array | None = None  # (token, hidden)
        self._most_dropped = 0

    @property
    def notes(self) -> tuple[str, ...]:
        """Notes about the comparison."""
        if not self._most_dropped:
            return ()
        return (
            f"{self._most_dropped} values were not compared after their first difference, because "
            "the state rebuilt for them is wrong after it",
        )

    def replay(self, previous: RecordedRow, row: RecordedRow) -> None:
        """Replay the step from one row to the next.

        Raises
        ------
        CannotReplay
            If the step cannot be computed.
        """
        try:
            computed = self._computed(previous, row)
        except CannotReplay:
            # The result of the step is not known, so neither is any rebuilt state.
            self._carried = self._dropped = None
            raise
        exact = self._devices[row.number].exact
        skipped = bool(self._steps.rows.idle[row.number])
        if exact and not skipped:
            self._checks.check_clipping(row, self._max_grad_norm)
        if (dropped := self._dropped) is not None:
            computed = {n: np.where(dropped, row.bits[n], bits) for n, bits in computed.items()}
        wrong = self._checks.compare(row.step, row.bits, computed)
        self.replayed.add(row.step)
        if wrong and (exact or skipped):  # a skipped step changes nothing on any device
            self._checks.find("skipped" if skipped else "mismatch", row.step, wrong)
            if self.rebuilt:
                concerned: Array = np.any([*wrong.values()], axis=0)
                self._dropped = concerned if dropped is None else dropped | concerned
                self._most_dropped = max(self._most_dropped, int(np.count_nonzero(self._dropped)))

    def _computed(self, previous: RecordedRow, row: RecordedRow) -> dict[str, Array]:
        """Return the bits of W and the recorded state after the step from one row to the next."""
        steps, number, natives = self._steps, row.number, self._steps.rows.natives
        steps.check(number)
        self._check_recording(number)
        before = {name: previous.bits[name] for name in self.recorded}
        if steps.rows.idle[number]:
            return before
        if abs(steps.inputs.lr[number]) >= LARGEST_RATE:
            self._checks.find_scalar("invalid", "lr", row.step)
            raise CannotReplay("its learning rate is too large for any optimizer")
        # torch leaves a parameter without a gradient out of a step.
        unclipped = steps.lacks_factor(number)
        absent = unclipped and bool(is_nan(row.bits["grad"], natives["grad"]).all())
        computed = before
        if not absent:
            steps.begin(previous, self._carried)
            steps.take(row)
            self._carried = steps.optimizer.kept(self.rebuilt)
            computed = {
                name: steps.placement.bits(steps.optimizer.value(name), natives[name])
                for name in self.recorded
            }
        if steps.optimizer.steps_some_rows:
            # A row without a gradient was not in the batch, if it has not changed.
            as_before = [(row.bits[name] == bits).all(1) for name, bits in before.items()]
            idle = np.all(as_before, axis=0) & ~np.any(widen(row.bits["grad"], natives["grad"]), 1)
            for name, bits in computed.items():
                bits[idle] = before[name][idle]
        if unclipped and any((row.bits[name] != bits).any() for name, bits in computed.items()):
            raise CannotReplay(
                "it changed the matrix, but has no recorded gradient"
                if absent
                else "clip_coef is NaN, and the step does not follow from the recorded gradient "
                "without a factor"
            )
        return computed

    def _check_recording(self, number: int) -> None:
        """Check that one step of the optimizer, on one device, lies between two rows."""
        rows, device = self._steps.rows, self._devices[number]
        if device.device != self._steps.placement.device:
            raise CannotReplay(
                f"it was recorded on {device.recorded_on}, but earlier steps on another device"
            )
        if self._steps.optimizer.counts_steps and "step_count" in rows and not rows.idle[number]:
            before, after = rows.taken[number - 1], rows.taken[number]
            if after != before + 1:
                reason = "it took several" if after > before else "its state was replaced"
                raise CannotReplay(
                    f"the optimizer counts {after} steps after and {before} before: {reason}"
                )


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
    """

    def __init__(self, rows: RecordedRows) -> None:
        self._rows = rows
        self.compared: dict[str, Compared] = {}
        self.findings: list[Finding] = []

    def compare(
        self, step: int, stored: Mapping[str, Array], computed: Mapping[str, Array]
    ) -> dict[str, Array]:
        """Compare variables of one step, in native bits; return a mask for each that differs."""
        found = {}
        for name, bits in computed.items():
            counted = self.compared.setdefault(name, Compared())
            counted.steps += 1
            wrong = np.asarray(stored[name] != bits)
            if not wrong.any():
                continue
            found[name] = wrong
            native = self._rows.natives[name]
            distance = ulp_distance(stored[name][wrong], bits[wrong], native)
            place = np.argwhere(wrong)[0].tolist()
            counted.differing += int(np.count_nonzero(wrong))
            counted.ulps = None if distance is None else max(distance, counted.ulps or 0)
            counted.first = counted.first or {
                "step": step,
                "token": int(self._rows.tokens[place[0]]) if place else None,
                "hidden": place[1] if len(place) > 1 else None,
            }
        return found

    def find(self, kind: Kind, step: int, wrong: dict[str, Array]) -> None:
        """Add a finding about the values of a step that a mask marks."""
        self.findings.append(finding_at(wrong, self._rows.tokens, kind=kind, step=step))

    def find_scalar(self, kind: Kind, names: str, step: int) -> None:
        """Add a finding about a value that belongs to no token."""
        self.findings.append(Finding(kind=kind, variable=names, step=step, tokens=0))

    def check_skipped(self) -> None:
        """Check that each row but the first is 0 or 1, or NaN like the rate of several steps."""
        rate, skipped = (
            self._rows.values(name) if name in self._rows else np.zeros(len(self._rows))
            for name in ("lr", "skipped")
        )
        wrong = ~np.isin(skipped, (0, 1)) & ~(np.isnan(skipped) & np.isnan(rate))
        for step in self._rows.steps[1:][wrong[1:]].tolist():
            self.find_scalar("invalid", "skipped", step)

    def checked_first_row(self, row: RecordedRow, starts: Mapping[str, float]) -> RecordedRow:
        """Return the state before training, in which every element of the optimizer's is a start.

        Another state, or a gradient, gives a finding. A run that starts later is not checked.
        """
        rows = self._rows
        if not rows.from_start:
            return row
        bits = dict(row.bits)
        for name in [name for name in ("grad", *starts) if name in bits]:
            stored, native = bits[name], rows.natives[name]
            start = torch.tensor(starts.get(name, math.nan), dtype=getattr(torch, native.name))
            first = as_bits(start, native, name)
            if name == "grad":  # the same NaN everywhere
                values, counts = np.unique(stored, return_counts=True)
                usual = values[counts.argmax()]
                first = usual if is_nan(usual, native) else first
            bits[name] = np.full_like(stored, first)
            if (wrong := stored != bits[name]).any():
                self.find("start", row.step, {name: wrong})
        return replace(row, bits=bits)

    def check_clipping(self, row: RecordedRow, max_grad_norm: object) -> None:
        """Compare the clipping factor with the norm of the gradients and the recorded limit."""
        rows, native = self._rows, self._rows.natives["clip_coef"]
        if rows.natives.get("grad_norm") != native or not isinstance(max_grad_norm, int | float):
            return
        stored, norm = (rows.scalars(name)[row.number] for name in ("clip_coef", "grad_norm"))
        factor = clip_coefficient(tensor_of(norm, native), max_grad_norm)
        expected, one = as_bits(torch.stack([factor, torch.ones_like(factor)]), native, "clip_coef")
        if is_nan(stored, native) or (not max_grad_norm and stored != one):
            return  # the loop did not name its norm, and the recorder may have found the factor
        agrees = stored in (expected, one)  # 1 without clipping
        if self.compare(
            row.step, {"clip_coef": stored}, {"clip_coef": stored if agrees else expected}
        ):
            self.find_scalar("inconsistent", "clip_coef, grad_norm", row.step)

    def check_derived(self, previous: RecordedRow | None, row: RecordedRow) -> None:
        """Compare variables of a row that were read with what they are derived from.

        A difference is a finding, unless the step has one: an altered W also changes its summaries.
        """
        computed = {}
        for name, (source, derive) in DERIVED.items():
            # Row 0 has no motion, and no gradient.
            if {name, source} <= row.bits.keys() and (previous or name == "cells"):
                native, of = self._rows.natives[name], self._rows.natives[source]
                now, before = (tensor_of(r.bits[source], of) for r in (row, previous or row))
                bits = as_bits(derive(now, before), native, name)
                nan = is_nan(bits, native) & is_nan(row.bits[name], native)
                computed[name] = np.where(nan, row.bits[name], bits)
        wrong = self.compare(row.step, row.bits, computed)
        if wrong and all(finding.step != row.step for finding in self.findings):
            self.find("inconsistent", row.step, wrong)
