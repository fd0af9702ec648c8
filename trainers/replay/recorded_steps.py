"""The recorded steps of a run: what each started from, and what was stored after it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from trajstore.trainers.replay.findings import ulps_apart
from trajstore.trainers.replay.recorded_optimizer import State
from trajstore.trainers.replay.recorded_rows import RecordedRow, RecordedRows
from trajstore.trainers.replay.replay_result import CannotReplay
from trajstore.trainers.replay.step_simulator import Bits, Simulator, StepInputs, StepResult
from trajstore.values.native_types import NativeType

__all__ = ["RecordedStep", "RecordedSteps", "StepMismatch"]

Array = npt.NDArray[Any]


@dataclass(frozen=True, kw_only=True, eq=False)
class RecordedStep:
    """From one row to the next, which is one optimizer step later.

    Attributes
    ----------
    step : int
        Number of the later row.
    inputs : StepInputs
        What the step started from.
    stored : dict of str to ndarray, (token, hidden)
        Bits of W and of the recorded state after it.
    grad_norm : ndarray, (), optional
        Bits of the recorded norm of all gradients, where it is recorded.
    grad_token_norm : ndarray, (token,), optional
        Bits of the recorded length of each token's gradient, where it is recorded.
    unproven : frozenset of str
        Of `inputs.before`, what was not compared with anything.
    clip_coef_trusted : bool
        Whether ``clip_coef`` is what the recorded norm of all gradients gives.
    """

    step: int
    inputs: StepInputs
    stored: Bits
    grad_norm: Array | None
    grad_token_norm: Array | None
    unproven: frozenset[str]
    clip_coef_trusted: bool = False

    @property
    def skipped(self) -> bool:
        """Whether a gradient scaler skipped it."""
        return self.inputs.gradient is None

    def wrong(self, result: StepResult) -> Array:
        """Which stored values are not what a result says, (variable, token, hidden)."""
        return np.stack([self.stored[name] != bits for name, bits in result.bits.items()])


@dataclass(frozen=True, kw_only=True, eq=False)
class StepMismatch:
    """A step that does not give what is stored.

    Attributes
    ----------
    recorded : RecordedStep
    result : StepResult
        What it gives.
    wrong : ndarray of bool, (variable, token, hidden)
        Which stored values disagree.
    """

    recorded: RecordedStep
    result: StepResult
    wrong: Array

    def ulps(self, name: str, chosen: Array, native: NativeType) -> int | None:
        """How far the chosen values of a variable are from what the step gives.

        Parameters
        ----------
        name : str
        chosen : ndarray of bool, (token, hidden)
        native : NativeType
            Of the variable.
        """
        return ulps_apart(
            self.recorded.stored[name][chosen], self.result.bits[name][chosen], native
        )


class RecordedSteps:
    """Makes one recorded step after the other, and says which cannot be replayed.

    Parameters
    ----------
    rows : RecordedRows
    simulator : Simulator
    """

    def __init__(self, rows: RecordedRows, simulator: Simulator) -> None:
        self._rows = rows
        self._simulator = simulator
        # Moments before training are checked; what W begins with is for nobody to say.
        self._unproven = frozenset({"W"} if rows.from_start else simulator.recorded)
        self._carried: State | None = None

    def step_to(self, previous: RecordedRow, row: RecordedRow) -> RecordedStep:
        """The step from one row to the next.

        Raises
        ------
        CannotReplay
            If it is not one step, or something that it starts from is not known.
        """
        self._check(previous, row)
        rows, recorded = self._rows, self._simulator.recorded
        return RecordedStep(
            step=row.step,
            inputs=StepInputs(
                before={name: previous.bits[name] for name in recorded},
                carried=self._carried or {},
                steps_taken=rows.steps_taken(previous.number),
                gradient=None if rows.skipped[row.number] else row.bits["grad"],
                clip_coef=rows.scalar("clip_coef", row.number),
                lr=rows.value("lr", row.number),
            ),
            stored={name: row.bits[name] for name in recorded},
            grad_norm=rows.scalar("grad_norm", row.number) if "grad_norm" in rows else None,
            grad_token_norm=row.bits.get("grad_token_norm"),
            unproven=self._unproven,
        )

    def go_on(self, step: RecordedStep, result: StepResult) -> None:
        """Let the next step start from what this one gave; a skipped one left all as it was."""
        if not step.skipped:
            self._carried = result.carried
            self._unproven = frozenset()

    def break_off(self) -> None:
        """A step was left out: what it would have given is not known."""
        self._carried = None
        self._unproven = frozenset(self._simulator.recorded)

    def _check(self, previous: RecordedRow, row: RecordedRow) -> None:
        rows, simulator = self._rows, self._simulator
        if row.step - previous.step != 1:
            raise CannotReplay("the row before is not of the step before (recorded with every > 1)")
        if rows.skipped[row.number]:
            return
        if np.isnan(rows.value("lr", row.number)):
            raise CannotReplay("the learning rate is NaN, so it is not known")
        if np.isnan(rows.value("clip_coef", row.number)):
            raise CannotReplay(
                "clip_coef is NaN, so what the gradient was multiplied by is not known; tell the "
                "recorder max_grad_norm"
            )
        if rows.steps_taken(previous.number) == 0:
            return
        if simulator.optimizer.counts_steps and not rows.counts_skipped(row.number):
            raise CannotReplay(
                "how many of the steps before were skipped, and so do not count, is not recorded"
            )
        if simulator.rebuilt and self._carried is None:
            raise CannotReplay(
                f"the optimizer's {', '.join(simulator.rebuilt)} is not recorded, and can be "
                "rebuilt only from step 0 on, without a gap"
            )
        state = simulator.recorded[1:]
        if previous.number == 0 and state and not any(previous.bits[name].any() for name in state):
            raise CannotReplay(
                "the state of the optimizer before this step was not seen (the run begins here)"
            )
