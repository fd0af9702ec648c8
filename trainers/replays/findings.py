"""What steps that are computed again tell of a run: differences, and steps that prove nothing.

`Findings` is the result of a replay and of a proof, and `ReplayDevice` says whether every bit has
to agree.
"""

from __future__ import annotations

import platform
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, fields, is_dataclass
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import torch

from trajstore.errors import TrajstoreError
from trajstore.provenance import RunAttributes
from trajstore.trainers.recording.notes import processor_name
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
class Findings:
    """Result of steps that were computed again and compared with a run.

    Attributes
    ----------
    path : str
    exact : bool
        True if the run was recorded on this kind of device, so that every bit has to agree.
    recorded_on : str
        Device of the recording.
    steps : int
        Steps to compare.
    total : int
        Number of all findings, of which a result lists the first `LISTED`.
    notes : tuple of str
        Reasons for different values.
    """

    path: str
    exact: bool
    recorded_on: str
    steps: int
    total: int
    notes: tuple[str, ...]

    @property
    def clean(self) -> bool:
        """True if no check found an error."""
        return not self.total

    def facts(self) -> dict[str, Any]:
        """Return the fields as JSON values."""
        values: dict[str, Any] = _facts(self)
        return values | {"clean": self.clean}


def _facts(value: Any) -> Any:
    """Return a value as JSON values; parts with a sentence have it, too."""
    if is_dataclass(value):
        values = {field.name: _facts(getattr(value, field.name)) for field in fields(value)}
        return values | ({"sentence": value.sentence} if hasattr(value, "sentence") else {})
    if isinstance(value, dict):
        return {name: _facts(part) for name, part in value.items()}
    return [*map(_facts, value)] if isinstance(value, tuple) else value


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


_CAPABILITY = "cpu_capability"


@dataclass(frozen=True, kw_only=True)
class ReplayDevice:
    """Device of a replay, compared with the device of the recording.

    Attributes
    ----------
    device : torch.device
        Device to replay on.
    exact : bool
        True if both devices are of the same kind, so that every bit has to agree. Processors are
        if torch uses the same instructions on both.
    recorded_on, replayed_on : str
    threads : int, optional
        Threads of torch; None if irrelevant or unknown.
    modes : dict
        Modes of the process, see `process_modes`.
    notes : tuple of str
        Other reasons for different values.
    """

    device: torch.device
    exact: bool
    recorded_on: str
    replayed_on: str
    threads: int | None
    modes: dict[str, Any]
    notes: tuple[str, ...]


def replay_device(
    attributes: Mapping[str, Any], step: int = 0, *, products: bool = False
) -> ReplayDevice:
    """Return the device to replay a run on: the kind that recorded it, else the CPU.

    Parameters
    ----------
    attributes : mapping
        Attributes of the root of the run.
    step : int
        Step before the replayed ones; a resumed run may have been recorded on several devices.
    products : bool
        True if products of matrices are computed, too. Their bits depend on the very processor;
        those of other operations only on its vector instructions.
    """
    run = RunAttributes.of(attributes)
    provenance = run.facts_after(step)
    recorded = str(provenance.get("device", "an unknown device"))
    kind, name = recorded.partition(":")[0], provenance.get("device_name")
    usable = {"cuda": torch.cuda.is_available(), "mps": torch.backends.mps.is_available()}
    device = torch.device(kind if usable.get(kind) else "cpu")
    now: dict[str, Any] = {}
    if device.type == "cuda":
        now = {"device_name": torch.cuda.get_device_name()}
    elif device.type == "cpu":
        now = {"processor": platform.machine()}
        now[_CAPABILITY] = torch.backends.cpu.get_cpu_capability()
        if products:
            now["processor_name"] = processor_name()
    recording = {fact: provenance.get(fact, value) for fact, value in now.items()}
    exact = kind == device.type and recording == now
    if device.type == kind == "cpu":
        recorded = f"cpu ({_listed(recording)})"
    recorded_on = f"{recorded} ({name})" if name else recorded
    replayed_on = f"{device.type} ({_listed(now)})" if now else device.type
    version = provenance.get("torch", torch.__version__)
    notes = []
    if not exact:
        notes.append(
            f"recorded on {recorded_on}, replayed on {replayed_on}: different values are counted "
            "but are no errors"
        )
        if device.type == kind == "cpu" and recording | {_CAPABILITY: now[_CAPABILITY]} == now:
            notes.append(
                f"to compare every bit on a processor that has {recording[_CAPABILITY]}, too, set "
                f"ATEN_CPU_CAPABILITY={str(recording[_CAPABILITY]).lower()}"
            )
    if version != torch.__version__:
        notes.append(
            f"recorded with torch {version}, replayed with {torch.__version__}, which may round "
            "differently: different values are counted but are no errors"
        )
    count = run.threads_after(step)
    return ReplayDevice(
        device=device,
        exact=exact and version == torch.__version__,
        recorded_on=recorded_on,
        replayed_on=replayed_on,
        threads=count if count and count > 0 and device.type == "cpu" else None,
        modes=run.modes_after(step),
        notes=tuple(notes),
    )


def replay_devices(
    attributes: Mapping[str, Any], steps: npt.NDArray[Any], *, products: bool = False
) -> list[ReplayDevice]:
    """Return the device to replay each row of a run on, (step,).

    Parameters
    ----------
    attributes : mapping
        Attributes of the root of the run.
    steps : ndarray of int, (step,)
        Steps of its rows.
    products : bool
        See `replay_device`.
    """
    later = RunAttributes.of(attributes).resumed_after
    devices = [replay_device(attributes, step, products=products) for step in (0, *later)]
    return [devices[index] for index in np.searchsorted(later, steps).tolist()]


def _listed(provenance: Mapping[str, Any]) -> str:
    return ", ".join(str(value) for value in provenance.values() if value)
