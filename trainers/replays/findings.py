"""Intermediate results of a replay, which become a `Replay`."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import numpy.typing as npt

from trajstore.trainers.replays.replay_result import (
    CannotReplay,
    Compared,
    Finding,
    Kind,
    Unreplayed,
)
from trajstore.values.native_types import NativeType, widen
from trajstore.values.ulp_lattice import ordinal

__all__ = ["Comparisons", "UnreplayedSteps", "finding_at", "ulp_distance"]

Array = npt.NDArray[Any]


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
        counted = self.variables.setdefault(name, Compared())
        counted.steps += 1
        wrong = stored != computed
        if number := int(np.count_nonzero(wrong)):
            distance = ulp_distance(stored[wrong], computed[wrong], self._natives[name])
            counted.differing += number
            counted.first = counted.first or self._place(step, wrong)
            counted.ulps = None if distance is None else max(distance, counted.ulps or 0)

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
                new = Unreplayed(reason=str(error), steps=0, first=step, last=step)
                found = self._reasons.setdefault(str(error), new)
                found.steps, found.last = found.steps + 1, step

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
