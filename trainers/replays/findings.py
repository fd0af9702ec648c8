"""Intermediate results of a replay, which become a `Replay`."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import numpy.typing as npt

from trajstore.trainers.replays.replay_result import CannotReplay, Finding, Kind, Unreplayed
from trajstore.values.native_types import NativeType, ordinal, widen

Array = npt.NDArray[Any]


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
