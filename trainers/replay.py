"""Proof that every recorded step follows from the one before.

For each step, W and the optimizer's state of the row before and the recorded gradient, clipped as
it was, go into the real optimizer of `torch.optim`; what comes out is compared with the row, bit
for bit.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from trainers.findings import Compared, Finding, Findings, Replay, Unreplayed
from trainers.history import MOMENTS
from trainers.recomputation import MOTION, SUMMARIES, Recomputation
from trainers.recorded import RecordedRows, recorded_simulator
from trainers.recorder import clip_coefficient
from trainers.rule import State, tensor_of, threads
from trainers.surroundings import Surroundings, surroundings
from trainers.suspects import Disagreement, explain, possible_rate, rate_variants
from trainers.transition import Outcome, Simulator, Transition
from trajstore.source import Source, attribute, open_source

__all__ = ["replay"]

Array = npt.NDArray[Any]

_THOROUGH = 8  # disagreeing steps for which flipped bits are looked for


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
    >>> replay("gatsby.zarr").clean  # doctest: +SKIP
    """
    source = open_source(path)
    found = surroundings(source.attributes)
    with threads(found.threads):
        return _Pass(os.fspath(path), source, found).run(on_progress)


class _Pass:
    """One pass over the rows of a run."""

    def __init__(self, path: str, source: Source, found: Surroundings) -> None:
        self._path = path
        self._attributes = source.attributes
        self._found = found
        self._rows = RecordedRows(source)
        self._simulator = recorded_simulator(source, found.device)
        self._from_start = len(self._rows) > 0 and self._rows.steps[0] == 0
        self._findings = Findings()
        self._compared: dict[str, Compared] = {}
        self._recomputation = Recomputation(natives=self._rows.natives, tokens=self._rows.tokens)
        self._unreplayed: dict[str, Unreplayed] = {}
        self._proven: set[int] = set()
        self._replayed = self._skipped = self._disagreements = 0
        # Of the row before: what disagreed, the state that is not recorded, what nothing vouches
        # for, the steps the optimizer had taken, and the values it is of no use to compare.
        self._pending: Disagreement | None = None
        self._carried: State | None = None
        self._unproven: frozenset[str] = frozenset()
        self._taken = int(self._rows.steps[0]) if len(self._rows) else 0
        self._lost: Array | None = None

    def run(self, on_progress: Callable[[int, int], None] | None) -> Replay:
        """Go over all rows."""
        previous: dict[str, Array] = {}
        for number, row in enumerate(self._rows.read(self._wanted())):
            if number == 0:
                self._start(row)
            else:
                self._row(number, previous, row)
            previous = row
            if on_progress is not None:
                on_progress(number + 1, len(self._rows))
        self._settle(None)
        self._recomputation.conclude(self._findings, self._proven)
        notes = self._found.notes
        if self._lost is not None and self._lost.any():
            notes += (
                f"{np.count_nonzero(self._lost)} values were not compared after they had diverged, "
                "because the state rebuilt for them is wrong from there on",
            )
        rebuilt = self._simulator.rebuilt if isinstance(self._simulator, Simulator) else ()
        return Replay(
            path=self._path,
            optimizer=attribute(self._attributes, "optimizer", "class"),
            exact=self._found.exact,
            recorded_on=self._found.recorded_on,
            replayed_on=self._found.replayed_on,
            steps=max(len(self._rows) - 1, 0),
            replayed=self._replayed,
            skipped=self._skipped,
            rebuilt=rebuilt,
            variables=self._compared | self._recomputation.compared,
            findings=self._findings.first(),
            total=self._findings.total,
            unreplayed=tuple(self._unreplayed.values()),
            notes=notes,
        )

    def _wanted(self) -> set[str]:
        """Variables with a token dimension that are read."""
        names = set()
        if isinstance(self._simulator, Simulator):
            names |= {"grad", *self._simulator.recorded}
        if self._found.exact:
            names |= set(SUMMARIES)
            if "grad_token_norm" in self._rows:
                names.add("grad")
            if any(name in self._rows for name in MOTION):
                names.add("W")
        return names

    def _start(self, row: dict[str, Array]) -> None:
        """Check the state before training, where the run has it."""
        names = self._simulator.recorded if isinstance(self._simulator, Simulator) else ()
        self._unproven = frozenset(names)
        if not self._from_start:
            return
        self._unproven &= {"W"}
        for name in ("grad", *MOMENTS):
            if name not in row:
                continue
            bits = row[name]
            if name == "grad":  # every NaN the same, whichever
                values, counts = np.unique(bits, return_counts=True)
                wrong = bits != values[counts.argmax()]
                wrong |= ~tensor_of(bits, self._rows.natives[name]).isnan().numpy()
            else:
                wrong = bits != 0
                row[name] = np.zeros_like(bits)  # what the first step starts from
            if wrong.any():
                token, hidden = np.argwhere(wrong)[0]
                self._findings.add(
                    Finding(
                        kind="start",
                        variable=name,
                        step=0,
                        token=int(self._rows.tokens[token]),
                        hidden=int(hidden),
                        values=int(np.count_nonzero(wrong)),
                        tokens=int(np.count_nonzero(wrong.any(axis=1))),
                    )
                )

    def _row(self, number: int, previous: dict[str, Array], row: dict[str, Array]) -> None:
        step = int(self._rows.steps[number])
        if self._found.exact:
            if "grad_token_norm" in row:
                self._recomputation.gradient(step, row["grad"], row["grad_token_norm"])
            motion = {name: row[name] for name in MOTION if name in row}
            if motion:
                before = int(self._rows.steps[number - 1])
                self._recomputation.motion(step, before, previous["W"], row["W"], motion)
        skipped = self._was_skipped(number)
        reason = self._obstacle(number, previous, skipped)
        if reason:
            self._leave_out(step, reason)
        else:
            assert isinstance(self._simulator, Simulator)
            self._step(number, previous, row, skipped, self._simulator)
        self._taken += (step - int(self._rows.steps[number - 1])) - int(skipped)

    def _was_skipped(self, number: int) -> bool:
        if "skipped" not in self._rows:
            return False
        value = self._rows.value("skipped", number)
        if value not in (0.0, 1.0):
            self._findings.add(
                Finding(
                    kind="altered", variable="skipped", step=int(self._rows.steps[number]), tokens=0
                )
            )
        return value == 1.0

    def _obstacle(self, number: int, previous: dict[str, Array], skipped: bool) -> str | None:
        """Why the step to a row cannot be replayed."""
        simulator, step = self._simulator, int(self._rows.steps[number])
        if not isinstance(simulator, Simulator):
            return simulator
        if step - int(self._rows.steps[number - 1]) != 1:
            return "the row before is not of the step before (recorded with every > 1)"
        if skipped:
            return None
        if np.isnan(self._rows.value("lr", number)):
            return "the learning rate is NaN, so it is not known"
        if np.isnan(self._rows.value("clip_coef", number)):
            return (
                "clip_coef is NaN, so what the gradient was multiplied by is not known; tell the "
                "recorder max_grad_norm"
            )
        if self._fresh():
            return None
        whole = self._from_start and np.array_equal(self._rows.steps[:number], np.arange(number))
        if "skipped" in self._rows and simulator.rule.counts and not whole:
            return "how many of the steps before were skipped, and so do not count, is not recorded"
        if simulator.rebuilt and self._carried is None:
            return (
                f"the optimizer's {', '.join(simulator.rebuilt)} is not recorded, and can be "
                "rebuilt only from step 0 on, without a gap"
            )
        names = simulator.recorded[1:]
        if number == 1 and names and not any(previous[name].any() for name in names):
            return "the state of the optimizer before this step was not seen (the run begins here)"
        return None

    def _fresh(self) -> bool:
        return self._from_start and self._taken == 0

    def _leave_out(self, step: int, reason: str) -> None:
        self._settle(None)
        self._carried = self._lost = None
        if isinstance(self._simulator, Simulator):
            self._unproven = frozenset(self._simulator.recorded)
        before = self._unreplayed.get(
            reason, Unreplayed(reason=reason, steps=0, first=step, last=0)
        )
        self._unreplayed[reason] = replace(before, steps=before.steps + 1, last=step)

    def _step(
        self,
        number: int,
        previous: dict[str, Array],
        row: dict[str, Array],
        skipped: bool,
        simulator: Simulator,
    ) -> None:
        step = int(self._rows.steps[number])
        transition = Transition(
            step=step,
            before={name: previous[name] for name in simulator.recorded},
            stored={name: row[name] for name in simulator.recorded},
            gradient=None if skipped else row["grad"],
            lr=self._rows.value("lr", number),
            clip=self._rows.scalar("clip_coef", number),
            taken=self._taken,
            fresh=self._fresh(),
            carried=self._carried or {},
            unproven=self._unproven,
            clip_trusted=False,
            norms=row.get("grad_token_norm"),
        )
        if not skipped and not possible_rate(transition.lr):
            found = self._rate(transition, simulator)
            if found is None:
                self._leave_out(step, "no optimizer can calculate with its learning rate")
                return
            transition = found
        outcome = simulator.outcome(transition)
        if self._found.exact:
            if not skipped:
                transition, outcome = self._with_clip(number, transition, outcome, simulator)
            transition, outcome = self._with_previous(transition, outcome, simulator)
            case = Disagreement(transition=transition, outcome=outcome)
            if case.wrong.any():
                self._pending = case
        elif skipped and outcome.wrong(transition.stored).any():
            self._pending = Disagreement(transition=transition, outcome=outcome)
            self._settle(None)
        for name, bits in outcome.bits.items():
            before = self._compared.get(name, Compared())
            self._compared[name] = before.including(
                step, self._rows.tokens, row[name], bits, simulator.natives[name]
            )
        self._replayed += 1
        self._skipped += int(skipped)
        self._proven.add(step)
        if not skipped:
            self._carried = outcome.carried
            self._unproven = frozenset()

    def _rate(self, transition: Transition, simulator: Simulator) -> Transition | None:
        """The transition with a possible learning rate, the one that gives what is stored."""
        self._findings.add(Finding(kind="altered", variable="lr", step=transition.step, tokens=0))
        for variant in rate_variants(transition):
            if not simulator.outcome(variant).wrong(transition.stored).any():
                return variant
        return None

    def _with_previous(
        self, transition: Transition, outcome: Outcome, simulator: Simulator
    ) -> tuple[Transition, Outcome]:
        """Settle what is open of the step before, and go on from what it is found to have been."""
        if self._pending is not None:
            case = self._pending
            corrected = replace(transition, before=case.outcome.bits)
            other = simulator.outcome(corrected)
            own, others = (o.wrong(transition.stored).sum(axis=0) for o in (outcome, other))
            concerned = case.wrong.any(axis=0)
            self._settle((own == 0, others == 0))
            better = concerned & (others < own)
            outcome = outcome.where(better, other, simulator.placement)
            transition = replace(
                transition,
                before={
                    name: np.where(better, case.outcome.bits[name], bits)
                    for name, bits in transition.before.items()
                },
            )
            if simulator.rebuilt:
                # What is rebuilt is wrong from here on where the weights themselves were right.
                lost = concerned & ~better & ~((own == 0) & (others == 0))
                self._lost = lost if self._lost is None else self._lost | lost
        if self._lost is not None and self._lost.any():
            stored = transition.stored
            bits = {name: np.where(self._lost, stored[name], b) for name, b in outcome.bits.items()}
            outcome = replace(outcome, bits=bits)
        return transition, outcome

    def _with_clip(
        self, number: int, transition: Transition, outcome: Outcome, simulator: Simulator
    ) -> tuple[Transition, Outcome]:
        """Compare the factor of clipping with the norm that it was made of."""
        most = attribute(self._attributes, "optimizer", "schedule", "max_grad_norm")
        natives = self._rows.natives
        if "grad_norm" not in self._rows or not isinstance(most, int | float):
            return transition, outcome
        native = natives["clip_coef"]
        if natives["grad_norm"] != native:
            return transition, outcome
        expected = clip_coefficient(tensor_of(self._rows.scalar("grad_norm", number), native), most)
        signed = getattr(torch, f"int{8 * native.itemsize}")
        allowed = [
            value.view(signed).numpy().view(native.bits)
            for value in (expected, torch.ones_like(expected))
        ]
        agrees = any(transition.clip == bits for bits in allowed)
        before = self._compared.get("clip_coef", Compared())
        self._compared["clip_coef"] = before.including(
            transition.step,
            self._rows.tokens,
            transition.clip,
            transition.clip if agrees else allowed[0],
            native,
        )
        if agrees:
            return replace(transition, clip_trusted=True), outcome
        wrong = outcome.wrong(transition.stored).any()
        variable, others = "grad_norm", ()
        if wrong:
            variable, others = "clip_coef", ("grad_norm",)
            for bits in allowed:
                variant = replace(transition, clip=bits[()], clip_trusted=True)
                given = simulator.outcome(variant)
                if given.wrong(transition.stored).sum() < outcome.wrong(transition.stored).sum():
                    transition, outcome, others = variant, given, ()
        self._findings.add(
            Finding(
                kind="altered",
                variable=variable,
                step=transition.step,
                tokens=0,
                others=tuple(f"{name} at step {transition.step}" for name in others),
            )
        )
        return transition, outcome

    def _settle(self, follows: tuple[Array, Array] | None) -> None:
        """Name what accounts for the open disagreement, if there is one."""
        case, self._pending = self._pending, None
        if case is None:
            return
        assert isinstance(self._simulator, Simulator)
        self._disagreements += 1
        for finding in explain(
            case,
            follows,
            self._simulator,
            self._rows.tokens,
            thorough=self._disagreements <= _THOROUGH,
        ):
            self._findings.add(finding)
