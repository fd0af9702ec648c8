"""Verification that every recorded step follows from the previous row.

For each step, the real optimizer of `torch.optim` gets W and the state of the previous row and the
recorded gradient, clipped as in the training. Its result is compared with the row, bit for bit.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from trajstore.store.metadata.zarr_json import unproven_rows
from trajstore.store.reading.run_attributes import attribute, steps_of_another_optimizer
from trajstore.store.reading.tiled_reader import TiledRun, open_tiled
from trajstore.trainers.process_mode import process_mode
from trajstore.trainers.recording.device_to_host import type_name
from trajstore.trainers.replays.recorded_optimizer import (
    ReplayDevice,
    State,
    recorded_optimizer,
    replay_device,
    replay_devices,
)
from trajstore.trainers.replays.recorded_rows import (
    RecordedRow,
    RecordedRows,
    RowChecks,
    check_inputs,
    recorded_placement,
    tensor_of,
)
from trajstore.trainers.replays.replay_result import (
    LISTED,
    CannotReplay,
    Finding,
    Kind,
    Replay,
    UnreplayedSteps,
    finding_at,
)
from trajstore.values.native_types import widen
from trajstore.values.optimizer_rule import MOMENTS

Array = npt.NDArray[Any]

_LARGEST_RATE = 1e30


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
    rows = RecordedRows(source)
    products = str(attribute(source.attributes, "optimizer", "class")).endswith(".Muon")
    device = replay_device(source.attributes, products=products)
    devices = replay_devices(source.attributes, rows.steps, products=products)
    unreplayed = UnreplayedSteps()
    checks = RowChecks(rows)
    findings = checks.findings
    exact = all(item.exact for item in (device, *devices))
    names = set(checks.summaries) if exact else set()
    if "W" in rows and "cells" in rows:
        names |= {"W", "cells"}
    steps: StepReplay | None = None
    with (
        process_mode(device.threads, device.modes),
        unreplayed.collect(*rows.steps[1:].tolist()),
    ):
        steps = StepReplay(source, rows, device.device, devices, checks)
        names |= {"grad", *steps.recorded}
    checks.check_skipped()
    previous: RecordedRow | None = None
    for here, part in itertools.groupby(rows.read(names), lambda row: devices[row.number]):
        with process_mode(here.threads, here.modes):
            for row in part:
                if previous is None:
                    starts = dict.fromkeys(MOMENTS, 0.0) if steps is None else steps.starts
                    counts = steps is None or steps.counts_steps
                    previous = checks.checked_first_row(row, starts if counts else {})
                else:
                    if steps is not None:
                        with unreplayed.collect(row.step):
                            steps.replay(previous, row)
                    checks.compare_summaries(previous, row)
                    previous = row
                checks.check_cells(row)
                if on_progress is not None:
                    on_progress(row.number + 1, len(rows))
    replayed = frozenset() if steps is None else frozenset(steps.replayed)
    return Replay(
        path=os.fspath(path),
        optimizer=attribute(source.attributes, "optimizer", "class"),
        exact=exact,
        recorded_on=device.recorded_on,
        replayed_on=device.replayed_on,
        steps=max(len(rows) - 1, 0),
        replayed=len(replayed),
        skipped=len(replayed.intersection(rows.steps[rows.skipped].tolist())),
        rebuilt=() if steps is None else steps.rebuilt,
        variables=checks.compared,
        findings=tuple(sorted(findings, key=lambda item: item.step)[:LISTED]),
        total=len(findings),
        unreplayed=unreplayed.all(),
        notes=(
            *dict.fromkeys(note for item in (device, *devices) for note in item.notes),
            *(() if steps is None else steps.notes),
        ),
    )


class StepReplay:
    """Repeats recorded steps in order, and compares each result with the next row.

    Every step starts from the recorded row before it, even if that row is wrong. State that is not
    recorded is carried from step to step. After a value differs, its carried state is wrong, so
    that value is no longer compared.

    Parameters
    ----------
    source : TiledRun
    rows : RecordedRows
    device : torch.device
        Device of the computation.
    devices : sequence of ReplayDevice, (step,)
        Of each row. If it is not exact, different values are counted but are no findings.
    checks : RowChecks
        Counts the compared values, and collects the errors.

    Attributes
    ----------
    recorded : tuple of str
        W, and the recorded state of the optimizer.
    rebuilt : tuple of str
        State of the optimizer that is not recorded, so it is carried from step to step.
    replayed : list of int
        Steps that were repeated.
    starts : dict of str to float
        State of an element before the first step.
    counts_steps : bool
        True if the update depends on the number of steps.

    Raises
    ------
    CannotReplay
        If the run lacks a variable that every step needs, or its optimizer cannot be built.
    """

    def __init__(
        self,
        source: TiledRun,
        rows: RecordedRows,
        device: torch.device,
        devices: Sequence[ReplayDevice],
        checks: RowChecks,
    ) -> None:
        check_inputs(rows)
        attributes, natives = source.attributes, rows.natives
        if natives["W"] != natives["grad"]:
            raise CannotReplay(
                f"W is {natives['W'].name} but grad is {natives['grad'].name}; torch needs a "
                "gradient of the parameter's type"
            )
        weights = getattr(torch, natives["W"].name)
        self._optimizer = optimizer = recorded_optimizer(
            attributes, weights, device, rows.largest_hyperparameters
        )
        self._placement = recorded_placement(source, device)
        optimizer.check_whole(self._placement)
        self.starts, self.counts_steps = optimizer.starts, optimizer.counts_steps
        state = [name for name in optimizer.state_names if name in natives]
        for name in state:
            made = type_name(optimizer.example[name].dtype)
            if natives[name].name != made:
                raise CannotReplay(
                    f"{name} is {natives[name].name}, but the recorded optimizer keeps it in "
                    f"{made}, so another optimizer trained the run"
                )
        stochastic = optimizer.hyperparameters.get("rounding") == "stochastic"
        if stochastic and not isinstance(attribute(attributes, "recording", "vocabulary"), int):
            raise CannotReplay(
                "stochastic rounding depends on the position in the parameter, but the number of "
                "tokens of the parameter is not recorded (root attribute recording, vocabulary)"
            )
        self.recorded = ("W", *state)
        self.rebuilt = tuple(name for name in optimizer.state_names if name not in state)
        if optimizer.steps_some_rows and self.rebuilt:
            raise CannotReplay(
                f"{', '.join(self.rebuilt)} is not recorded, and cannot be rebuilt: a step changes "
                "only some rows, which the gradient does not tell; record matrix"
            )
        self.replayed: list[int] = []
        self._rows = rows
        self._max_grad_norm = attribute(attributes, "optimizer", "schedule", "max_grad_norm")
        self._other_optimizer_until = steps_of_another_optimizer(attributes)
        self._every = attribute(attributes, "recording", "every")
        self._unproven = unproven_rows(attributes, rows.steps)
        self._checks = checks
        self._devices = devices
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
            If an input of the step is not known.
        """
        try:
            self._check(previous, row)
        except CannotReplay:
            # The result of the step is not known, so neither is any rebuilt state.
            self._carried = self._dropped = None
            raise
        skipped = bool(self._rows.idle[row.number])
        lacks_gradient = not skipped and self._lacks_gradient(row)
        if skipped or lacks_gradient:
            computed = {name: previous.bits[name] for name in self.recorded}
        else:
            computed = self._step(previous, row)
        is_known = not np.isnan(self._rows.value("clip_coef", row.number))
        is_equal = all((row.bits[name] == bits).all() for name, bits in computed.items())
        if not (skipped or is_known or is_equal):
            self._carried = self._dropped = None
            raise CannotReplay(
                "it changed the matrix, but has no recorded gradient"
                if lacks_gradient
                else "clip_coef is NaN, and the step does not follow from the recorded gradient "
                "without a factor"
            )
        exact = self._devices[row.number].exact
        if exact and not skipped and is_known:
            self._checks.check_clipping(row, self._max_grad_norm)
        if self._dropped is not None:
            dropped = self._dropped
            computed = {n: np.where(dropped, row.bits[n], bits) for n, bits in computed.items()}
        for name, bits in computed.items():
            self._checks.compare(name, row.step, row.bits[name], bits)
        if exact or skipped:  # a skipped step changes nothing on any device
            self._find(row, computed, skipped=skipped)
        self.replayed.append(row.step)

    def _step(self, previous: RecordedRow, row: RecordedRow) -> dict[str, Array]:
        """Return the bits of W and the recorded state after the step from one row to the next."""
        rows, place, natives = self._rows, self._placement, self._rows.natives
        before = {
            name: place.parameter(previous.bits[name], natives[name]) for name in self.recorded
        }
        state = before | (self._carried or {})
        self._optimizer.begin(before["W"], state, self._steps_taken(previous))
        factor = tensor_of(rows.scalar("clip_coef", row.number), natives["clip_coef"])
        gradient = place.parameter(row.bits["grad"], natives["grad"])
        numbers = rows.hyperparameters(row.number)
        self._optimizer.step(gradient, factor, rows.value("lr", row.number), numbers)
        self._carried = self._optimizer.kept(self.rebuilt)
        computed = {
            name: place.bits(self._optimizer.value(name), natives[name]) for name in self.recorded
        }
        if self._optimizer.steps_some_rows:
            # A row without a gradient was not in the batch, if it has not changed.
            as_before = [(row.bits[name] == previous.bits[name]).all(1) for name in self.recorded]
            idle = np.all(as_before, axis=0) & ~np.any(widen(row.bits["grad"], natives["grad"]), 1)
            for name, bits in computed.items():
                bits[idle] = previous.bits[name][idle]
        return computed

    def _lacks_gradient(self, row: RecordedRow) -> bool:
        """Return True if the parameter had no gradient, so that torch leaves it out of a step."""
        if not np.isnan(self._rows.value("clip_coef", row.number)):
            return False
        return bool(tensor_of(row.bits["grad"], self._rows.natives["grad"]).isnan().all())

    def _steps_taken(self, row: RecordedRow) -> int:
        """Return the optimizer's steps before a row, at least 1 if it keeps a state there."""
        count = self._rows.steps_taken(row.number)
        if count or self._optimizer.counts_steps:
            return count
        return int(any(row.bits[name].any() for name in self.recorded[1:]))

    def _find(self, row: RecordedRow, computed: dict[str, Array], *, skipped: bool) -> None:
        """Add a finding if the row differs from the result of the step."""
        wrong = {name: row.bits[name] != bits for name, bits in computed.items()}
        wrong = {name: mask for name, mask in wrong.items() if mask.any()}
        if not wrong:
            return
        kind: Kind = "skipped" if skipped else "mismatch"
        self._checks.findings.append(finding_at(wrong, self._rows.tokens, kind=kind, step=row.step))
        if self.rebuilt:
            concerned: Array = np.any(list(wrong.values()), axis=0)
            self._dropped = concerned if self._dropped is None else self._dropped | concerned
            self._most_dropped = max(self._most_dropped, int(np.count_nonzero(self._dropped)))

    def _check(self, previous: RecordedRow, row: RecordedRow) -> None:
        rows = self._rows
        if row.step <= self._other_optimizer_until:
            raise CannotReplay(
                "another optimizer took it, before the run was forked; replay the source of the "
                "fork"
            )
        if row.step - previous.step != 1 and self._every in (1, None):
            raise CannotReplay(missing_steps(previous.step, row.step))
        if row.step - previous.step != 1:
            raise CannotReplay("the row of the step before is missing (recorded with every > 1)")
        device = self._devices[row.number]
        if device.device != self._placement.device:
            raise CannotReplay(
                f"it was recorded on {device.recorded_on}, but earlier steps on another device"
            )
        if row.number in self._unproven:
            raise CannotReplay(self._unproven[row.number])
        if rows.idle[row.number]:
            return
        if self._optimizer.counts_steps and "step_count" in rows:
            before, after = (rows.steps_taken(neighbor.number) for neighbor in (previous, row))
            if after != before + 1:
                reason = "it took several" if after > before else "its state was replaced"
                raise CannotReplay(
                    f"the optimizer counts {after} steps after and {before} before: {reason}"
                )
        rate = rows.value("lr", row.number)
        if np.isnan(rate):
            raise CannotReplay("the learning rate is NaN, so it is unknown")
        if unknown := self._optimizer.unknown(rows.hyperparameters(row.number)):
            raise CannotReplay(f"{', '.join(unknown)} of hyperparameters is NaN, so it is unknown")
        if abs(rate) >= _LARGEST_RATE:  # torch refuses some of these
            self._checks.findings.append(
                Finding(kind="invalid", variable="lr", step=row.step, tokens=0)
            )
            raise CannotReplay("its learning rate is too large for any optimizer")
        if self._steps_taken(previous) == 0:
            return
        if self._optimizer.counts_steps and not rows.counts_skipped(row.number):
            raise CannotReplay(
                "the number of skipped steps before it, which do not count, is not recorded"
            )
        if self.rebuilt and self._carried is None:
            raise CannotReplay(
                f"the optimizer's {', '.join(self.rebuilt)} is not recorded, and can be "
                "rebuilt only from step 0 on, without a step that was not replayed"
            )
        state = self.recorded[1:]
        if previous.number == 0 and state and not any(previous.bits[name].any() for name in state):
            raise CannotReplay(
                "the optimizer's state before this step is not recorded (the run starts here)"
            )


def missing_steps(before: int, after: int) -> str:
    """Return a sentence about the steps between two rows."""
    if after - before == 2:
        return f"step {before + 1} is missing"
    return f"steps {before + 1} to {after - 1} are missing"
