"""Proof that every recorded step follows from the one before.

For each step, W and the optimizer's state of the row before and the recorded gradient, clipped as
it was, go into the real optimizer of `torch.optim`; what comes out is compared with the row, bit
for bit.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from trainers.findings import Compared, Finding, Findings, Replay, Unreplayed
from trainers.history import MOMENTS
from trainers.recomputation import MOTION, SUMMARIES, Recomputation
from trainers.recorder import clip_coefficient
from trainers.rule import OptimizerRule, Placement, recorded_rule, tensor_of, threads
from trainers.suspects import Disagreement, explain
from trainers.surroundings import Surroundings, surroundings
from trainers.transition import Outcome, Simulator, Transition
from trajstore.source import Series, Source, attribute, open_source

__all__ = ["replay"]

Array = npt.NDArray[Any]

_WINDOW = 512 << 20  # bytes of rows that are held at once
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
    >>> replay("gatsby.zarr").clean                       # doctest: +SKIP
    True
    """
    source = open_source(path)
    found = surroundings(source.attributes)
    with threads(found.threads):
        return _Pass(os.fspath(path), source, found).run(on_progress)


class _Pass:
    """One pass over the rows of a run."""

    def __init__(self, path: str, source: Source, found: Surroundings) -> None:
        self._path = path
        self._source = source
        self._found = found
        self._series = source.series
        self._steps = source.steps
        self._tokens = source.coordinates["token"]
        self._from_start = len(self._steps) > 0 and self._steps[0] == 0
        self._simulator = self._build()
        self._scalars = {
            name: self._series[name].bits((slice(None),))
            for name in ("lr", "clip_coef", "grad_norm", "skipped")
            if name in self._series
        }
        self._findings = Findings()
        self._compared: dict[str, Compared] = {}
        self._unreplayed: dict[str, Unreplayed] = {}
        self._proven: set[int] = set()
        self._replayed = self._skipped = self._disagreements = 0
        self._pending: Disagreement | None = None
        self._carried: Outcome | None = None
        self._unproven: frozenset[str] = frozenset()
        self._taken = int(self._steps[0]) if len(self._steps) else 0
        self._lost: Array | None = None
        self._recomputation = Recomputation(
            natives={name: series.native for name, series in self._series.items()},
            tokens=self._tokens,
        )

    # What the run offers -----------------------------------------------------------------------

    def _build(self) -> Simulator | str:
        """What carries out the steps, or why nothing can."""
        for name, remedy in (
            ("W", "the run holds no weights"),
            ("grad", "the gradient was not recorded; the tiers weights+grads and all hold it"),
            ("lr", "the learning rate was not recorded; every tier holds it"),
            ("clip_coef", "what the gradient was clipped by was not recorded; every tier holds it"),
        ):
            if name not in self._series:
                return remedy
        weights, gradient = self._series["W"], self._series["grad"]
        if weights.native != gradient.native:
            return (
                f"W is {weights.native.name} and grad {gradient.native.name}, and torch takes a "
                "gradient of its parameter's type only"
            )
        device = self._found.device
        rule = recorded_rule(
            self._source.attributes, getattr(torch, weights.native.name), device
        )
        if isinstance(rule, str):
            return rule
        recorded = ("W", *[name for name in MOMENTS if name in rule.names and name in self._series])
        return Simulator(
            rule=rule,
            placement=self._placement(weights, device),
            natives={name: series.native for name, series in self._series.items()},
            recorded=recorded,
        )

    def _placement(self, weights: Series, device: torch.device) -> Placement:
        tokens, hidden = weights.shape[1:]
        ids = self._tokens.astype(np.int64)
        vocabulary = attribute(self._source.attributes, "recording", "vocabulary")
        whole = not isinstance(vocabulary, int) or np.array_equal(ids, np.arange(vocabulary))
        return Placement(
            shape=(tokens if whole else vocabulary, hidden),
            ids=None if whole else ids,
            device=device,
        )

    def _wanted(self) -> tuple[str, ...]:
        """Variables with a token dimension that are read."""
        names = {name for name in SUMMARIES if name in self._series} if self._found.exact else set()
        if "grad_token_norm" in names:
            names.add("grad")
        if names & set(MOTION):
            names.add("W")
        names.update(name for name in ("grad", *MOMENTS) if name in self._series)
        if isinstance(self._simulator, Simulator):
            names.update(self._simulator.recorded)
        return tuple(name for name in self._series if name in names)

    def _rows(self) -> Iterator[dict[str, Array]]:
        """Bits of one row after the other."""
        series = [self._series[name] for name in self._wanted()]
        total = len(self._steps)
        if not series:
            yield from ({} for _ in range(total))
            return
        row = sum(int(np.prod(s.shape[1:])) * s.native.itemsize for s in series)
        most = max(1, _WINDOW // row)
        start = 0
        while start < total:
            block = series[0].tile[0]
            stop = min(total, start + most, (start // block + 1) * block)
            window = {s.name: s.bits((slice(start, stop),)) for s in series}
            for at in range(stop - start):
                # The row outlives the window, which is gone before the next one is read.
                yield {name: bits[at].copy() for name, bits in window.items()}
            del window
            start = stop

    # The pass ----------------------------------------------------------------------------------

    def run(self, on_progress: Callable[[int, int], None] | None) -> Replay:
        """Go over all rows."""
        previous: dict[str, Array] = {}
        for number, row in enumerate(self._rows()):
            if number == 0:
                self._start(row)
            else:
                self._row(number, previous, row)
            previous = row
            if on_progress is not None:
                on_progress(number + 1, len(self._steps))
        self._settle(None)
        self._recomputation.conclude(self._findings, self._proven)
        simulator = self._simulator
        exists = isinstance(simulator, Simulator)
        return Replay(
            path=self._path,
            optimizer=attribute(self._source.attributes, "optimizer", "class"),
            exact=self._found.exact,
            recorded_on=self._found.recorded_on,
            replayed_on=self._found.replayed_on,
            steps=max(len(self._steps) - 1, 0),
            replayed=self._replayed,
            skipped=self._skipped,
            rebuilt=simulator.rebuilt if exists else (),
            variables=self._compared | self._recomputation.compared,
            findings=self._findings.first(),
            total=self._findings.total,
            unreplayed=tuple(self._unreplayed.values()),
            notes=self._found.notes,
        )

    def _start(self, row: dict[str, Array]) -> None:
        """The state before training."""
        names = self._simulator.recorded if isinstance(self._simulator, Simulator) else ()
        self._unproven = frozenset(names)
        if not self._from_start:
            return
        self._unproven &= {"W"}
        for name in (*MOMENTS, "grad"):
            if name not in row:
                continue
            bits = row[name]
            values, counts = np.unique(bits, return_counts=True)
            usual = values[counts.argmax()]
            expected = usual if name == "grad" and self._is_nan(name, usual) else 0
            if name == "grad" and not expected:
                expected = None
            wrong = np.ones(bits.shape, bool) if expected is None else bits != expected
            for token in np.flatnonzero(wrong.any(axis=1))[:1]:
                self._findings.add(
                    Finding(
                        kind="start",
                        variable=name,
                        step=0,
                        token=int(self._tokens[token]),
                        hidden=int(np.flatnonzero(wrong[token])[0]),
                        values=int(np.count_nonzero(wrong)),
                        tokens=int(np.count_nonzero(wrong.any(axis=1))),
                    )
                )

    def _is_nan(self, name: str, bits: Any) -> bool:
        return bool(tensor_of(np.array(bits), self._series[name].native).isnan())

    def _row(self, number: int, previous: dict[str, Array], row: dict[str, Array]) -> None:
        step = int(self._steps[number])
        trusted = None
        if self._found.exact:
            if "grad_token_norm" in row:
                trusted = self._recomputation.gradient(step, row["grad"], row["grad_token_norm"])
            motion = {name: row[name] for name in MOTION if name in row}
            if motion:
                before = int(self._steps[number - 1])
                self._recomputation.motion(step, before, previous["W"], row["W"], motion)
        skipped = self._was_skipped(number)
        reason = self._obstacle(number, previous, skipped)
        if reason:
            self._leave_out(step, reason)
        else:
            assert isinstance(self._simulator, Simulator)
            self._step(number, previous, row, skipped, trusted, self._simulator)
        self._taken += (step - int(self._steps[number - 1])) - int(skipped)

    def _was_skipped(self, number: int) -> bool:
        if "skipped" not in self._scalars:
            return False
        value = self._value("skipped", number)
        if value not in (0.0, 1.0):
            self._findings.add(
                Finding(
                    kind="altered", variable="skipped", step=int(self._steps[number]), tokens=0
                )
            )
        return value == 1.0

    def _obstacle(self, number: int, previous: dict[str, Array], skipped: bool) -> str | None:
        """Why the step to a row cannot be replayed."""
        simulator, step = self._simulator, int(self._steps[number])
        if not isinstance(simulator, Simulator):
            return simulator
        if step - int(self._steps[number - 1]) != 1:
            return "the row before is not of the step before (recorded with every > 1)"
        if skipped:
            return None
        if np.isnan(self._value("lr", number)):
            return "the learning rate is NaN, so it is not known"
        if np.isnan(self._value("clip_coef", number)):
            return (
                "clip_coef is NaN, so what the gradient was multiplied by is not known; tell the "
                "recorder max_grad_norm"
            )
        if self._fresh():
            return None
        whole = self._from_start and np.array_equal(self._steps[:number], np.arange(number))
        if "skipped" in self._scalars and simulator.rule.counts and not whole:
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
        before = self._unreplayed.get(reason, Unreplayed(reason=reason, steps=0, first=step, last=0))
        self._unreplayed[reason] = replace(before, steps=before.steps + 1, last=step)

    def _step(
        self,
        number: int,
        previous: dict[str, Array],
        row: dict[str, Array],
        skipped: bool,
        trusted: Array | None,
        simulator: Simulator,
    ) -> None:
        step = int(self._steps[number])
        transition = Transition(
            step=step,
            before={name: previous[name] for name in simulator.recorded},
            stored={name: row[name] for name in simulator.recorded},
            gradient=None if skipped else row["grad"],
            lr=self._value("lr", number),
            clip=self._scalars["clip_coef"][number],
            taken=self._taken,
            fresh=self._fresh(),
            carried=self._carried.carried if self._carried else {},
            unproven=self._unproven,
            clip_trusted=False,
            trusted=trusted,
        )
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
                step, self._tokens, row[name], bits, simulator.natives[name]
            )
        self._carried = outcome
        self._replayed += 1
        self._skipped += int(skipped)
        self._proven.add(step)
        if not skipped:
            self._unproven = frozenset()

    def _with_previous(
        self, transition: Transition, outcome: Outcome, simulator: Simulator
    ) -> tuple[Transition, Outcome]:
        """Settle what is open of the step before, and go on from what it is found to have been."""
        if self._pending is not None:
            case, self._pending = self._pending, self._pending
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
            if simulator.rebuilt and simulator.rule.names:
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
        norms = self._scalars.get("grad_norm")
        most = attribute(self._source.attributes, "optimizer", "schedule", "max_grad_norm")
        if norms is None or not isinstance(most, int | float):
            return transition, outcome
        norm = self._series["grad_norm"].native
        native = self._series["clip_coef"].native
        if norm != native:
            return transition, outcome
        expected = clip_coefficient(tensor_of(norms[number], norm), most)
        signed = getattr(torch, f"int{8 * native.itemsize}")
        allowed = [
            value.view(signed).numpy().view(native.bits)
            for value in (expected, torch.ones_like(expected))
        ]
        agrees = any(transition.clip == bits for bits in allowed)
        before = self._compared.get("clip_coef", Compared())
        self._compared["clip_coef"] = before.including(
            transition.step,
            self._tokens,
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
            self._tokens,
            thorough=self._disagreements <= _THOROUGH,
        ):
            self._findings.add(finding)

    def _value(self, name: str, number: int) -> float:
        return float(tensor_of(self._scalars[name][number], self._series[name].native))
