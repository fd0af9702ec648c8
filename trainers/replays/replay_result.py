"""The result of a replay: counts per variable, findings, and steps that were not replayed."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from trajstore.errors import TrajstoreError
from trajstore.values.native_types import NativeType, ordinal, widen

Array = npt.NDArray[Any]

LISTED = 20
"""Maximum number of findings that a result lists; it counts all."""

Kind = Literal["mismatch", "skipped", "start", "inconsistent", "invalid"]


class CannotReplay(TrajstoreError):
    """Steps cannot be replayed; the message has the reason."""


@dataclass(kw_only=True)
class Compared:
    """Comparison of the stored values of one variable with the recomputed ones.

    Attributes
    ----------
    steps : int
        Compared steps.
    differing : int
        Values with another bit pattern.
    first : dict, optional
        ``step``, ``token`` and ``hidden`` of the first of them; None for a dimension that the
        variable lacks.
    ulps : int, optional
        Largest distance in values of the native type; None for float64.
    """

    steps: int = 0
    differing: int = 0
    first: dict[str, int | None] | None = None
    ulps: int | None = 0


@dataclass(frozen=True, kw_only=True)
class Finding:
    """An error in a run.

    Attributes
    ----------
    kind : {'mismatch', 'skipped', 'start', 'inconsistent', 'invalid'}
        The row differs from the result of its step; a skipped step changed something; row 0 is not
        the state before training; values of one row contradict each other; a value is impossible.
    variable : str
        Wrong variable, or all variables that disagree; the position is that of the first one.
    step : int
    token, hidden : int, optional
        Vocabulary id and position of the first value; None for a missing dimension.
    values, tokens : int
        Number of wrong values and of their tokens.
    """

    kind: Kind
    variable: str
    step: int
    token: int | None = None
    hidden: int | None = None
    values: int = 1
    tokens: int = 1

    @property
    def sentence(self) -> str:
        """The finding as a sentence."""
        where = f"step {self.step}"
        if self.token is not None:
            where += f", token {self.token}"
        if self.hidden is not None:
            where += f", hidden {self.hidden}"
        several = self.values > 1
        count = f" ({self.values:,} values of {self.tokens:,} tokens)" if several else ""
        text = {
            "mismatch": "does not follow from the previous row",
            "skipped": "changed in a skipped step",
            "start": "differs from the state before training",
            "inconsistent": "contradicts other values of its row",
            "invalid": "has an impossible value",
        }[self.kind]
        return f"{where}: {self.variable}{count} {text}"

    def facts(self) -> dict[str, Any]:
        """Return the fields as JSON values."""
        return asdict(self) | {"sentence": self.sentence}


@dataclass(kw_only=True)
class Unreplayed:
    """Steps that were not replayed for the same reason.

    Attributes
    ----------
    reason : str
    steps, first, last : int
        Number of the steps, the first and the last one.
    """

    reason: str
    steps: int
    first: int
    last: int

    @property
    def sentence(self) -> str:
        """The reason and the steps."""
        if self.steps == 1:
            return f"step {self.first} was not replayed: {self.reason}"
        return f"{self.steps:,} steps from {self.first} to {self.last} were not replayed: " + (
            self.reason
        )


@dataclass(frozen=True, kw_only=True)
class Replay:
    """Result of `trajstore.trainers.replays.replay.replay`.

    Attributes
    ----------
    path : str
    optimizer : str, optional
        Class of the optimizer.
    exact : bool
        True if the run was recorded on this kind of device, so that every bit has to agree.
        Otherwise different values are counted but are no findings.
    recorded_on, replayed_on : str
    steps, replayed, skipped : int
        Steps recorded after the first row; the replayed ones; the replayed ones that a gradient
        scaler had skipped.
    rebuilt : tuple of str
        State of the optimizer that is not recorded, rebuilt from row 0 on.
    variables : dict of str to Compared
    findings : tuple of Finding
        The first `LISTED`.
    total : int
        Number of all findings.
    unreplayed : tuple of Unreplayed
    notes : tuple of str
    """

    path: str
    optimizer: str | None
    exact: bool
    recorded_on: str
    replayed_on: str
    steps: int
    replayed: int
    skipped: int
    rebuilt: tuple[str, ...]
    variables: dict[str, Compared]
    findings: tuple[Finding, ...]
    total: int
    unreplayed: tuple[Unreplayed, ...]
    notes: tuple[str, ...]

    @property
    def clean(self) -> bool:
        """True if no check found an error."""
        return not self.total

    @property
    def differing(self) -> int:
        """Number of different values of all variables together."""
        return sum(compared.differing for compared in self.variables.values())

    def facts(self) -> dict[str, Any]:
        """Return the result as JSON values."""
        values = asdict(self) | {
            "clean": self.clean,
            "differing": self.differing,
            "findings": [finding.facts() for finding in self.findings],
            "total_findings": self.total,
            "unreplayed": [asdict(part) | {"sentence": part.sentence} for part in self.unreplayed],
        }
        del values["total"]
        return values


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
                entry = self._reasons.setdefault(str(error), new)
                entry.steps, entry.last = entry.steps + 1, step

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
