"""Checks of rows by themselves, besides what the steps give.

Row 0 is the state before training, ``skipped`` is 0 or 1, a learning rate is one that an optimizer
can calculate with, and the factor of clipping is what the norm of all gradients gives.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from trajstore.trainers.recording.parameter_rows import MOMENTS
from trajstore.trainers.recording.step_hooks import clip_coefficient
from trajstore.trainers.replay.findings import Comparisons, Findings, Suspect, finding_at
from trajstore.trainers.replay.parameter_placement import tensor_of
from trajstore.trainers.replay.recorded_rows import RecordedRow, RecordedRows
from trajstore.trainers.replay.recorded_steps import RecordedStep
from trajstore.trainers.replay.replay_result import CannotReplay, Finding
from trajstore.trainers.replay.step_simulator import Simulator, StepInputs, StepResult
from trajstore.values.native_types import as_bits

__all__ = [
    "ClippingCheck",
    "check_skipped",
    "checked_first_row",
    "flipped_clip_coefs",
    "flipped_rates",
    "with_usable_rate",
]

Array = npt.NDArray[Any]

_LARGEST_RATE = 1e30


def check_skipped(rows: RecordedRows, findings: Findings) -> None:
    """Every row but the first one says 0 or 1."""
    if "skipped" not in rows:
        return
    for number, step in enumerate(rows.steps[1:].tolist(), 1):
        if rows.value("skipped", number) not in (0, 1):
            findings.add(Finding(kind="altered", variable="skipped", step=step, tokens=0))


def checked_first_row(row: RecordedRow, rows: RecordedRows, findings: Findings) -> RecordedRow:
    """The state before training, as the first step starts from it: with moments of 0.

    Findings are added where the row says otherwise, or holds a gradient. A run that begins later
    is not checked.
    """
    if not rows.from_start:
        return row
    bits = dict(row.bits)
    for name in ("grad", *MOMENTS):
        if name not in bits:
            continue
        stored = bits[name]
        if name == "grad":  # every NaN the same, whichever
            values, counts = np.unique(stored, return_counts=True)
            wrong = stored != values[counts.argmax()]
            wrong |= ~tensor_of(stored, rows.natives[name]).isnan().numpy()
        else:
            wrong = stored != 0
            bits[name] = np.zeros_like(stored)
        if wrong.any():
            findings.add(finding_at(wrong, rows.tokens, kind="start", variable=name, step=row.step))
    return replace(row, bits=bits)


def with_usable_rate(step: RecordedStep, simulator: Simulator, findings: Findings) -> RecordedStep:
    """The step, with a learning rate that an optimizer can calculate with.

    If it has another one, one bit of which flipped gives what is stored, this is taken.

    Raises
    ------
    CannotReplay
        If there is none.
    """
    if step.skipped or _is_usable(step.inputs.lr):
        return step
    findings.add(Finding(kind="altered", variable="lr", step=step.step, tokens=0))
    for inputs in flipped_rates(step.inputs):
        if not step.wrong(simulator.simulate(inputs)).any():
            return replace(step, inputs=inputs)
    raise CannotReplay("no optimizer can calculate with its learning rate")


def flipped_rates(inputs: StepInputs) -> Iterator[StepInputs]:
    """The inputs with each bit of the learning rate flipped."""
    lr = np.array(inputs.lr).view(np.uint64)
    for bit in range(64):
        flipped = float((lr ^ np.uint64(1 << bit)).view(np.float64))
        if _is_usable(flipped):
            yield replace(inputs, lr=flipped)


def flipped_clip_coefs(inputs: StepInputs) -> Iterator[StepInputs]:
    """The inputs with each bit of the clipping factor flipped."""
    clip_coef = inputs.clip_coef
    for bit in range(8 * clip_coef.itemsize):
        yield replace(inputs, clip_coef=clip_coef ^ clip_coef.dtype.type(1 << bit))


def _is_usable(lr: float) -> bool:
    """Whether an optimizer can calculate with a learning rate: torch refuses larger ones."""
    return abs(lr) < _LARGEST_RATE


@dataclass(frozen=True, kw_only=True, eq=False)
class ClippingCheck:
    """Compares the factor of clipping with the norm that it was made of.

    Attributes
    ----------
    simulator : Simulator
    max_grad_norm : object
        What the run says that the loop clips gradients to.
    comparisons : Comparisons
    findings : Findings
    """

    simulator: Simulator
    max_grad_norm: object
    comparisons: Comparisons
    findings: Findings

    def check(self, step: RecordedStep, result: StepResult) -> tuple[RecordedStep, StepResult]:
        """Check one step.

        Returns
        -------
        RecordedStep, StepResult
            With the factor that gives more of what is stored, if it is not the recorded one.
        """
        natives = self.simulator.natives
        if step.grad_norm is None or not isinstance(self.max_grad_norm, int | float):
            return step, result
        if natives["grad_norm"] != natives["clip_coef"]:
            return step, result
        allowed = self._allowed(step.grad_norm, self.max_grad_norm)
        stored = step.inputs.clip_coef
        agrees = any(stored == clip_coef for clip_coef in allowed)
        expected = stored if agrees else allowed[0]
        self.comparisons.add("clip_coef", step.step, stored, expected)
        if agrees:
            return replace(step, clip_coef_trusted=True), result
        variable = "grad_norm"
        others: tuple[str, ...] = ()
        wrong = step.wrong(result).sum()
        if wrong:
            variable, others = "clip_coef", (str(Suspect("grad_norm", step.step)),)
            for clip_coef in allowed:
                inputs = replace(step.inputs, clip_coef=clip_coef)
                given = self.simulator.simulate(inputs)
                left = step.wrong(given).sum()
                if left < wrong:
                    step = replace(step, inputs=inputs, clip_coef_trusted=True)
                    result, wrong, others = given, left, ()
        self.findings.add(
            Finding(kind="altered", variable=variable, step=step.step, tokens=0, others=others)
        )
        return step, result

    def _allowed(self, grad_norm: Array, max_grad_norm: float) -> tuple[Array, Array]:
        """Bits of the factor that the norm gives, and of the one that is no clipping."""
        native = self.simulator.natives["clip_coef"]
        expected = clip_coefficient(tensor_of(grad_norm, native), max_grad_norm)
        return (
            as_bits(expected, native, "clip_coef"),
            as_bits(torch.ones_like(expected), native, "clip_coef"),
        )
