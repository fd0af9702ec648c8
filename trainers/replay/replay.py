"""Proof that every recorded step follows from the one before.

For each step, W and the optimizer's state of the row before and the recorded gradient, clipped as
it was, go into the real optimizer of `torch.optim`; what comes out is compared with the row, bit
for bit.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, field

from trajstore.store.metadata.fork_provenance import steps_of_another_optimizer
from trajstore.store.reading.tiled_reader import attribute, open_tiled
from trajstore.trainers.replay.cell_checks import CellChecks
from trajstore.trainers.replay.findings import Comparisons, Findings, UnreplayedSteps
from trajstore.trainers.replay.pending_mismatch import OpenMismatch
from trajstore.trainers.replay.recorded_rows import RecordedRow, RecordedRows
from trajstore.trainers.replay.recorded_steps import RecordedSteps
from trajstore.trainers.replay.replay_device import replay_device, torch_threads
from trajstore.trainers.replay.replay_result import CannotReplay, Compared, Replay
from trajstore.trainers.replay.row_checks import (
    ClippingCheck,
    check_skipped,
    checked_first_row,
    with_usable_rate,
)
from trajstore.trainers.replay.step_simulator import Simulator, recorded_simulator
from trajstore.trainers.replay.summary_checks import SummaryChecks

__all__ = ["replay"]


def replay(
    path: str | os.PathLike[str], *, on_progress: Callable[[int, int], None] | None = None
) -> Replay:
    """Carry out every recorded step again, and compare bit for bit.

    Parameters
    ----------
    path : path-like or str
        Of a run.
    on_progress : callable, optional
        Called with the number of rows that are done, and of all rows.

    Returns
    -------
    Replay

    Raises
    ------
    RunNotFound, FormatError
        If there is no run at `path`, or a chunk is broken.

    Examples
    --------
    >>> from trajstore.trainers import preset, record
    >>> config = preset("gatsby").with_values(["training.steps=2", "training.batch_size=4"])
    >>> found = replay(record(config, "run.zarr"))
    >>> found.clean, found.replayed
    (True, 2)
    """
    source = open_tiled(path)
    rows = RecordedRows(source)
    device = replay_device(source.attributes)
    findings, unreplayed = Findings(), UnreplayedSteps()
    summaries = SummaryChecks(rows)
    cells = CellChecks(rows)
    names = (summaries.names if device.exact else set()) | cells.names
    steps: StepReplay | None = None
    with torch_threads(device.threads):
        with unreplayed.collect(*rows.steps[1:].tolist()):
            simulator = recorded_simulator(source, device.device)
            clipped_to = attribute(source.attributes, "optimizer", "schedule", "max_grad_norm")
            steps = StepReplay(
                rows,
                simulator,
                clipped_to,
                findings,
                exact=device.exact,
                others_until=steps_of_another_optimizer(source.attributes),
            )
            names |= {"grad", *simulator.recorded}
        check_skipped(rows, findings)
        previous: RecordedRow | None = None
        for row in rows.read(names):
            cells.compare(row)
            if previous is None:
                previous = checked_first_row(row, rows, findings)
            else:
                summaries.compare(previous, row)
                if steps is not None:
                    with unreplayed.collect(row.step):
                        steps.replay(previous, row)
                previous = row
            if on_progress is not None:
                on_progress(row.number + 1, len(rows))
        proven = ProvenSteps() if steps is None else steps.conclude()
        summaries.conclude(findings, proven.steps)
        cells.conclude(findings)
    return Replay(
        path=os.fspath(path),
        optimizer=attribute(source.attributes, "optimizer", "class"),
        exact=device.exact,
        recorded_on=device.recorded_on,
        replayed_on=device.replayed_on,
        steps=max(len(rows) - 1, 0),
        replayed=len(proven.steps),
        skipped=proven.skipped,
        rebuilt=proven.rebuilt,
        variables=(
            proven.variables | summaries.comparisons.variables | cells.comparisons.variables
        ),
        findings=findings.first(),
        total=findings.total,
        unreplayed=unreplayed.all(),
        notes=device.notes + proven.notes,
    )


@dataclass(frozen=True, kw_only=True)
class ProvenSteps:
    """What came of the steps that were replayed.

    Attributes
    ----------
    steps : frozenset of int
        Which they are.
    skipped : int
        How many of them a gradient scaler had skipped.
    rebuilt : tuple of str
        State of the optimizer that is not recorded.
    variables : dict of str to Compared
    notes : tuple of str
    """

    steps: frozenset[int] = frozenset()
    skipped: int = 0
    rebuilt: tuple[str, ...] = ()
    variables: dict[str, Compared] = field(default_factory=dict)
    notes: tuple[str, ...] = ()


class StepReplay:
    """Replays one recorded step after the other: carries it out, compares, and explains.

    Parameters
    ----------
    rows : RecordedRows
    simulator : Simulator
    max_grad_norm : object
        What the run says that the loop clipped gradients to.
    findings : Findings
        That what is wrong is added to.
    exact : bool
        Whether every bit has to agree. If not, values that differ are counted, and are no findings.
    others_until : int
        Last step that another optimizer than the run's made, before it was forked; 0 for none.
    """

    def __init__(
        self,
        rows: RecordedRows,
        simulator: Simulator,
        max_grad_norm: object,
        findings: Findings,
        *,
        exact: bool,
        others_until: int = 0,
    ) -> None:
        self._rows = rows
        self._others_until = others_until
        self._simulator = simulator
        self._findings = findings
        self._exact = exact
        self._comparisons = Comparisons(rows.tokens, rows.natives)
        self._steps = RecordedSteps(rows, simulator)
        self._clipping = ClippingCheck(
            simulator=simulator,
            max_grad_norm=max_grad_norm,
            comparisons=self._comparisons,
            findings=findings,
        )
        self._mismatch = OpenMismatch(simulator, rows.tokens, findings)
        self._proven: set[int] = set()

    def replay(self, previous: RecordedRow, row: RecordedRow) -> None:
        """Replay the step from one row to the next.

        Raises
        ------
        CannotReplay
            If something that it starts from is not known.
        """
        try:
            if row.step <= self._others_until:
                raise CannotReplay(
                    "it was taken with other settings, before the run was forked; replay the run "
                    "that it was forked from"
                )
            step = self._steps.step_to(previous, row)
            step = with_usable_rate(step, self._simulator, self._findings)
        except CannotReplay:
            self._steps.break_off()
            self._mismatch.break_off()
            raise
        result = self._simulator.simulate(step.inputs)
        if self._exact:
            if not step.skipped:
                step, result = self._clipping.check(step, result)
            step, result = self._mismatch.resolve(step, result)
            self._mismatch.open(step, result)
        elif step.skipped:  # which moves nothing on any device
            self._mismatch.open(step, result)
            self._mismatch.conclude()
        for name, bits in result.bits.items():
            self._comparisons.add(name, step.step, row.bits[name], bits)
        self._steps.go_on(step, result)
        self._proven.add(step.step)

    def conclude(self) -> ProvenSteps:
        """After the last row: explain what is still open."""
        self._mismatch.conclude()
        notes: tuple[str, ...] = ()
        if self._mismatch.diverged:
            notes = (
                f"{self._mismatch.diverged} values were not compared after they had diverged, "
                "because the state rebuilt for them is wrong from there on",
            )
        skipped = self._rows.steps[self._rows.skipped].tolist()
        return ProvenSteps(
            steps=frozenset(self._proven),
            skipped=len(self._proven.intersection(skipped)),
            rebuilt=self._simulator.rebuilt,
            variables=self._comparisons.variables,
            notes=notes,
        )
