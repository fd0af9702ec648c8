"""Intermediate results of a replay, which become a `Replay`."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt

from trajstore.trainers.replay.replay_result import (
    LISTED,
    CannotReplay,
    Compared,
    Finding,
    Kind,
    Unreplayed,
)
from trajstore.values.native_types import NativeType, widen
from trajstore.values.ulp_lattice import ordinal

__all__ = ["Comparisons", "Findings", "UnreplayedSteps", "finding_at", "ulp_distance"]

Array = npt.NDArray[Any]


class Findings:
    """All findings, one or two per step."""

    def __init__(self) -> None:
        self._all: list[Finding] = []
        self._steps: set[int] = set()

    @property
    def total(self) -> int:
        """Number of all findings."""
        return len(self._all)

    def add(self, finding: Finding) -> None:
        """Add a finding."""
        self._all.append(finding)
        self._steps.add(finding.step)

    def has_step(self, step: int) -> bool:
        """Return True if a step has a finding."""
        return step in self._steps

    def first(self) -> tuple[Finding, ...]:
        """Return the first `LISTED` findings, in the order of the steps."""
        return tuple(sorted(self._all, key=lambda finding: finding.step)[:LISTED])


class Comparisons:
    """Counts of different values, for each variable.

    Parameters
    ----------
    tokens : ndarray of int, (token,)
        Vocabulary ids.
    natives : dict of str to NativeType

    Attributes
    ----------
    variables : dict of str to Compared
    """

    def __init__(self, tokens: Array, natives: dict[str, NativeType]) -> None:
        self.variables: dict[str, Compared] = {}
        self._tokens = tokens
        self._natives = natives

    def add(self, name: str, step: int, stored: Array, computed: Array) -> None:
        """Compare one variable of one step.

        Parameters
        ----------
        name : str
        step : int
        stored, computed : ndarray, (token, hidden), (token,) or ()
            Native bits.
        """
        before = self.variables.get(name, Compared())
        counted = replace(before, steps=before.steps + 1)
        wrong = stored != computed
        number = int(np.count_nonzero(wrong))
        if number:
            distance = ulp_distance(stored[wrong], computed[wrong], self._natives[name])
            counted = replace(
                counted,
                differing=before.differing + number,
                first=before.first or self._place(step, wrong),
                ulps=None
                if distance is None or before.ulps is None
                else max(distance, before.ulps),
            )
        self.variables[name] = counted

    def _place(self, step: int, wrong: Array) -> dict[str, int | None]:
        """Return step, token and hidden of the first different value."""
        place = np.argwhere(wrong)[0].tolist() if wrong.ndim else []
        return {
            "step": step,
            "token": int(self._tokens[place[0]]) if place else None,
            "hidden": place[1] if len(place) > 1 else None,
        }


class UnreplayedSteps:
    """Steps that could not be replayed, by reason."""

    def __init__(self) -> None:
        self._reasons: dict[str, Unreplayed] = {}

    @contextmanager
    def collect(self, *steps: int) -> Iterator[None]:
        """Record these steps, and continue, if the block raises `CannotReplay`."""
        try:
            yield
        except CannotReplay as error:
            for step in steps:
                self._add(str(error), step)

    def _add(self, reason: str, step: int) -> None:
        before = self._reasons.get(reason, Unreplayed(reason=reason, steps=0, first=step, last=0))
        self._reasons[reason] = replace(before, steps=before.steps + 1, last=step)

    def all(self) -> tuple[Unreplayed, ...]:
        """Return one entry per reason, in the order of occurrence."""
        return tuple(self._reasons.values())


def finding_at(wrong: dict[str, Array], tokens: Array, *, kind: Kind, step: int) -> Finding:
    """Return a finding about values of one row: the first position and the number.

    Parameters
    ----------
    wrong : dict of str to ndarray of bool, (token, hidden) or (token,)
        Mask of the wrong values of each variable; each mask has some, and all have one shape.
    tokens : ndarray of int, (token,)
        Vocabulary ids.
    """
    masks = list(wrong.values())
    token, *hidden = np.argwhere(masks[0])[0].tolist()
    concerned = np.any(masks, axis=0).reshape(len(tokens), -1)
    return Finding(
        kind=kind,
        variable=", ".join(wrong),
        step=step,
        token=int(tokens[token]),
        hidden=hidden[0] if hidden else None,
        values=sum(int(np.count_nonzero(mask)) for mask in masks),
        tokens=int(np.count_nonzero(concerned.any(axis=1))),
    )


def ulp_distance(stored: Array, computed: Array, native: NativeType) -> int | None:
    """Return the largest distance in values of the native type; None for float64."""
    if native.name == "float64":
        return None
    ordinals = (ordinal(widen(bits, native), native.name) for bits in (stored, computed))
    left, right = (values.astype(np.int64) for values in ordinals)
    return int(np.abs(left - right).max(initial=0))
