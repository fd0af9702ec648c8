"""The mismatch of the step before, open until the next step tells what is to blame for it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from trajstore.trainers.replay.altered_values import Blame
from trajstore.trainers.replay.findings import Findings
from trajstore.trainers.replay.parameter_placement import Placement
from trajstore.trainers.replay.recorded_steps import RecordedStep, StepMismatch
from trajstore.trainers.replay.step_simulator import Simulator, StepResult

__all__ = ["OpenMismatch"]

Array = npt.NDArray[Any]

_THOROUGH = 8  # mismatches for which flipped bits are looked for


class OpenMismatch:
    """Holds a mismatch until the next step is known, and then has it explained.

    Parameters
    ----------
    simulator : Simulator
    tokens : ndarray of int, (token,)
        Vocabulary ids.
    findings : Findings
        That explanations are added to.
    """

    def __init__(self, simulator: Simulator, tokens: Array, findings: Findings) -> None:
        self._simulator = simulator
        self._findings = findings
        self._blame = Blame(simulator=simulator, tokens=tokens)
        self._mismatch: StepMismatch | None = None
        self._explained = 0
        self._diverged: Array | None = None

    @property
    def diverged(self) -> int:
        """Values that are not compared any more: the state rebuilt for them is wrong."""
        return 0 if self._diverged is None else int(np.count_nonzero(self._diverged))

    def open(self, step: RecordedStep, result: StepResult) -> None:
        """Keep the step if it does not give what is stored."""
        wrong = step.wrong(result)
        if wrong.any():
            self._mismatch = StepMismatch(recorded=step, result=result, wrong=wrong)

    def resolve(self, step: RecordedStep, result: StepResult) -> tuple[RecordedStep, StepResult]:
        """Explain what is open by the step after it, and go on from what that was found to be.

        Parameters
        ----------
        step : RecordedStep
            The next one.
        result : StepResult
            What it gives from what is stored.

        Returns
        -------
        RecordedStep, StepResult
            From what was computed instead, where only this gives what is stored next.
        """
        mismatch = self._mismatch
        if mismatch is not None:
            inputs = replace(step.inputs, before=mismatch.result.bits)
            other = self._simulator.simulate(inputs)
            # Variables that are wrong at each element.
            wrong, wrong_other = (step.wrong(given).sum(axis=0) for given in (result, other))
            follows, follows_other = wrong == 0, wrong_other == 0
            self._explain(mismatch, follows & ~follows_other, follows_other & ~follows)
            concerned = mismatch.wrong.any(axis=0)
            better = concerned & (wrong_other < wrong)
            step = _starting_from(mismatch.result, step, better)
            result = _merged(better, other, result, self._simulator.placement)
            if self._simulator.rebuilt:
                # What is rebuilt is wrong from here on where the weights themselves were right.
                lost = concerned & ~better & ~(follows & follows_other)
                self._diverged = lost if self._diverged is None else self._diverged | lost
        if self._diverged is not None and self._diverged.any():
            kept = {
                name: np.where(self._diverged, step.stored[name], bits)
                for name, bits in result.bits.items()
            }
            result = replace(result, bits=kept)
        return step, result

    def conclude(self) -> None:
        """Explain what is open without a next step."""
        if self._mismatch is not None:
            nowhere = np.zeros(self._mismatch.wrong.shape[1:], bool)
            self._explain(self._mismatch, nowhere, nowhere)

    def break_off(self) -> None:
        """The next step was left out: explain what is open, and compare all values again."""
        self.conclude()
        self._diverged = None

    def _explain(
        self, mismatch: StepMismatch, stored_goes_on: Array, computed_goes_on: Array
    ) -> None:
        self._mismatch = None
        self._explained += 1
        explanation = self._blame.explain(
            mismatch,
            stored_goes_on=stored_goes_on,
            computed_goes_on=computed_goes_on,
            thorough=self._explained <= _THOROUGH,
        )
        for finding in explanation:
            self._findings.add(finding)


def _starting_from(result: StepResult, step: RecordedStep, chosen: Array) -> RecordedStep:
    """The step as from a result at the chosen elements, and from what is stored elsewhere."""
    before = {
        name: np.where(chosen, result.bits[name], bits) for name, bits in step.inputs.before.items()
    }
    return replace(step, inputs=replace(step.inputs, before=before))


def _merged(
    chosen: Array, result: StepResult, elsewhere: StepResult, placement: Placement
) -> StepResult:
    """One result at the chosen elements, and another one elsewhere.

    Parameters
    ----------
    chosen : ndarray of bool, (token, hidden)
    """
    mask = placement.mask(chosen)
    return StepResult(
        bits={name: np.where(chosen, result.bits[name], b) for name, b in elsewhere.bits.items()},
        carried={
            # State that is no value for each element, such as NAdam's mu_product, is the same.
            name: torch.where(mask, result.carried[name], own) if own.shape == mask.shape else own
            for name, own in elsewhere.carried.items()
        },
    )
