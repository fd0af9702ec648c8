"""What a replay says: counts for each variable, what is wrong, and what could not be replayed."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, Literal

from trajstore.errors import TrajstoreError

__all__ = ["LISTED", "CannotReplay", "Compared", "Finding", "Kind", "Replay", "Unreplayed"]

LISTED = 20
"""Findings that a result lists; it counts all."""

Kind = Literal["mismatch", "skipped", "start", "inconsistent", "invalid"]


class CannotReplay(TrajstoreError):
    """Steps cannot be replayed; the message says why."""


@dataclass(frozen=True, kw_only=True)
class Compared:
    """How the stored values of one variable compare with the recomputed ones.

    Attributes
    ----------
    steps : int
        That were compared.
    differing : int
        Values with another bit pattern.
    first : dict, optional
        ``step``, ``token`` and ``hidden`` of the first of them; None where it has no such
        dimension.
    ulps : int, optional
        Largest distance, counted in values of the native type; None for float64.
    """

    steps: int = 0
    differing: int = 0
    first: dict[str, int | None] | None = None
    ulps: int | None = 0


@dataclass(frozen=True, kw_only=True)
class Finding:
    """Something that is wrong with a run.

    Attributes
    ----------
    kind : {'mismatch', 'skipped', 'start', 'inconsistent', 'invalid'}
        The row is not what its step gives; a skipped step moved something; row 0 is not the state
        before training; values of one row contradict each other; no run can hold such a value.
    variable : str
        That is wrong, or the names of all that disagree; the place is that of the first one.
    step : int
    token, hidden : int, optional
        Vocabulary id and position of the first value; None where it has none.
    values, tokens : int
        How many disagree.
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
        """The finding in words."""
        where = f"step {self.step}"
        if self.token is not None:
            where += f", token {self.token}"
        if self.hidden is not None:
            where += f", hidden {self.hidden}"
        several = self.values > 1
        count = f" ({self.values:,} values of {self.tokens:,} tokens)" if several else ""
        text = {
            "mismatch": "does not follow from the row before",
            "skipped": "moved in a step that was skipped",
            "start": "is not what it is before training",
            "inconsistent": "contradicts other values of its row",
            "invalid": "has a value that no run can hold",
        }[self.kind]
        return f"{where}: {self.variable}{count} {text}"

    def facts(self) -> dict[str, Any]:
        """JSON values."""
        return asdict(self) | {"sentence": self.sentence}


@dataclass(frozen=True, kw_only=True)
class Unreplayed:
    """Steps that were not replayed for one reason.

    Attributes
    ----------
    reason : str
    steps, first, last : int
        How many there are, and between which.
    """

    reason: str
    steps: int
    first: int
    last: int

    @property
    def sentence(self) -> str:
        """The reason, with the steps concerned."""
        if self.steps == 1:
            return f"step {self.first} was not replayed: {self.reason}"
        return f"{self.steps:,} steps from {self.first} to {self.last} were not replayed: " + (
            self.reason
        )


@dataclass(frozen=True, kw_only=True)
class Replay:
    """Result of `trajstore.trainers.replay.replay.replay`.

    Attributes
    ----------
    path : str
    optimizer : str, optional
        Class that carried out the steps.
    exact : bool
        Whether this is the kind of device that the run was recorded on, so that every bit has to
        agree. If not, values that differ are counted, and are no findings.
    recorded_on, replayed_on : str
    steps, replayed, skipped : int
        Recorded after the first row; of these, those that were replayed, and those replayed that
        a gradient scaler had skipped.
    rebuilt : tuple of str
        State of the optimizer that is not recorded and was rebuilt from row 0 on.
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
        """Whether nothing is wrong with what could be checked."""
        return not self.total

    @property
    def differing(self) -> int:
        """Values that differ, of all variables together."""
        return sum(compared.differing for compared in self.variables.values())

    def facts(self) -> dict[str, Any]:
        """JSON values."""
        found = asdict(self) | {
            "clean": self.clean,
            "differing": self.differing,
            "findings": [finding.facts() for finding in self.findings],
            "total_findings": self.total,
            "unreplayed": [asdict(part) | {"sentence": part.sentence} for part in self.unreplayed],
        }
        del found["total"]
        return found
