"""Which stored value is to blame when a step does not give what was stored after it.

A value that was altered in row t makes step t disagree, and step t + 1 as well. So the next step is
carried out twice: from what was stored, and from what step t gives. Where only the latter gives the
next row, the value stored at t was altered alone. Where only the former does, what went into step t
is wrong: its gradient, its learning rate, a row before that nothing else vouches for; or the
history was stitched there.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from trajstore.trainers.replay.findings import Suspect, finding_at
from trajstore.trainers.replay.flipped_bits import flipped_scalar, flipped_values, has_recorded_norm
from trajstore.trainers.replay.recorded_steps import StepMismatch
from trajstore.trainers.replay.replay_result import Finding
from trajstore.trainers.replay.step_simulator import Simulator

__all__ = ["Blame"]

Array = npt.NDArray[Any]

_FEW = 16  # elements of one step that are looked at one by one


@dataclass(frozen=True, kw_only=True, eq=False)
class Blame:
    """Finds what accounts for a mismatch.

    Attributes
    ----------
    simulator : Simulator
    tokens : ndarray of int, (token,)
        Vocabulary ids.
    """

    simulator: Simulator
    tokens: Array

    def explain(
        self,
        mismatch: StepMismatch,
        *,
        stored_goes_on: Array,
        computed_goes_on: Array,
        thorough: bool,
    ) -> Iterator[Finding]:
        """Findings that account for a mismatch.

        Parameters
        ----------
        mismatch : StepMismatch
        stored_goes_on, computed_goes_on : ndarray of bool, (token, hidden)
            Where the next row follows only from what was stored, or only from what the step gives.
        thorough : bool
            Look for flipped bits.
        """
        alone = mismatch.wrong & computed_goes_on
        yield from self._altered_alone(mismatch, alone)
        rest = mismatch.wrong & ~computed_goes_on
        if rest.any():
            besides = np.any(alone, axis=0)
            yield from self._wrong_inputs(
                mismatch, rest, stored_goes_on, besides=besides, thorough=thorough
            )

    def _altered_alone(self, mismatch: StepMismatch, wrong: Array) -> Iterator[Finding]:
        """Stored values that the next step does not know of."""
        for name, mask in self._by_variable(wrong).items():
            groups = [mask]
            if np.count_nonzero(mask) <= _FEW:
                groups = [_only(mask, row) for row in np.flatnonzero(mask.any(axis=1))]
            for group in groups:
                yield finding_at(
                    group,
                    self.tokens,
                    kind="altered",
                    variable=name,
                    step=mismatch.recorded.step,
                    ulps=self._ulps(mismatch, name, group),
                )

    def _wrong_inputs(
        self,
        mismatch: StepMismatch,
        wrong: Array,
        stored_goes_on: Array,
        *,
        besides: Array,
        thorough: bool,
    ) -> Iterator[Finding]:
        """What went into the step, for the values that were not altered after it."""
        places = np.argwhere(wrong.any(axis=0))
        scalar = flipped_scalar(mismatch, besides, self.simulator) if thorough else None
        if scalar is not None and len(places) > 1:
            yield _altered_scalar(scalar)
            return
        if not thorough or len(places) > _FEW:
            yield self._divergence(mismatch, wrong)
            return
        goes_on = stored_goes_on[tuple(places.T)]
        found = flipped_values(mismatch, places, goes_on, self.simulator)
        if scalar is not None:
            if not found[0]:
                yield _altered_scalar(scalar)
                return
            found[0].append(scalar)
        merged: dict[tuple[Any, ...], Finding] = {}
        for place, suspects, after in zip(places, found, goes_on, strict=True):
            finding = self._of_element(mismatch, tuple(place), suspects, goes_on=after)
            key = (finding.kind, finding.variable, finding.step, finding.token, finding.others)
            if key in merged:
                first = merged[key]
                ulps = [f.ulps for f in (first, finding) if f.ulps is not None]
                finding = replace(first, values=first.values + 1, ulps=max(ulps, default=None))
            merged[key] = finding
        yield from merged.values()

    def _of_element(
        self,
        mismatch: StepMismatch,
        place: tuple[int, int],
        found: list[Suspect],
        *,
        goes_on: bool,
    ) -> Finding:
        """Finding for one element, of which flipped bits have found some explanations, or none."""
        element = np.zeros(mismatch.wrong.shape[1:], bool)
        element[place] = True
        wrong = mismatch.wrong & element
        names = list(self._by_variable(wrong))
        suspects = found or self._likeliest(mismatch, names, place[0], goes_on=goes_on)
        if not suspects:
            return self._divergence(mismatch, wrong)
        (variable, step), *others = suspects
        here = step == mismatch.recorded.step and variable in names
        return finding_at(
            element,
            self.tokens,
            kind="altered",
            variable=variable,
            step=step,
            ulps=self._ulps(mismatch, variable, element) if here else None,
            others=tuple(map(str, others)),
        )

    def _likeliest(
        self, mismatch: StepMismatch, names: list[str], token: int, *, goes_on: bool
    ) -> list[Suspect]:
        """What more than one altered bit of an element explains; nothing if that is unlikely."""
        step = mismatch.recorded
        if len(names) == 1 and not goes_on:
            return [Suspect(names[0], step.step)]
        has_its_norm = has_recorded_norm(step, np.array([token]), self.simulator)[0]
        trusted = step.grad_token_norm is not None and has_its_norm
        # Where there are moments, a gradient that moves W moves them as well.
        shows = names != ["W"] or not self.simulator.optimizer.state_names
        if not step.skipped and not trusted and shows:
            return [Suspect("grad", step.step)]
        return []

    def _divergence(self, mismatch: StepMismatch, wrong: Array) -> Finding:
        """The values that do not follow from the row before, all in one."""
        masks = self._by_variable(wrong)
        ulps = [self._ulps(mismatch, name, mask) for name, mask in masks.items()]
        skipped = mismatch.recorded.skipped
        rebuilt = not skipped and self.simulator.rebuilt
        finding = finding_at(
            np.any(wrong, axis=0),
            self.tokens,
            kind="skipped" if skipped else "diverged",
            variable=", ".join(masks),
            step=mismatch.recorded.step,
            ulps=None if None in ulps else max(value for value in ulps if value is not None),
            others=("a gradient of this step or of one before",) if rebuilt else (),
        )
        return replace(finding, values=int(np.count_nonzero(wrong)))  # of all variables together

    def _by_variable(self, wrong: Array) -> dict[str, Array]:
        """Masks (token, hidden) of the variables of which some value is wrong."""
        masks = zip(self.simulator.recorded, wrong, strict=True)
        return {name: mask for name, mask in masks if mask.any()}

    def _ulps(self, mismatch: StepMismatch, name: str, chosen: Array) -> int | None:
        return mismatch.ulps(name, chosen, self.simulator.natives[name])


def _only(mask: Array, row: np.intp) -> Array:
    """The mask in one row."""
    chosen = np.zeros_like(mask)
    chosen[row] = mask[row]
    return chosen


def _altered_scalar(suspect: Suspect) -> Finding:
    return Finding(kind="altered", variable=suspect.variable, step=suspect.step, tokens=0)
