"""What the attributes ``provenance``, ``optimizer`` and ``recording`` of a run say.

Any program can record any JSON there. So nothing is required, and a member of an unexpected type
counts as missing. Digests and copies take the stored JSON itself.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self, TypeVar

from trajstore.strict_json import JsonObject, fits

T = TypeVar("T")

_MEMBERS = ("fork", "what_if", "developed", "corpus", "tokenizer", "sources")
"""Objects in the provenance."""


@dataclass(frozen=True, kw_only=True)
class OptimizerAttributes:
    """The attribute ``optimizer`` of a run, or one of its groups.

    Attributes
    ----------
    stored : dict
        All of it.
    path : str
        Class with its module; empty if it is not recorded.
    hyperparameters, schedule : dict
    groups : list of dict
        Parameter groups of the whole model.
    """

    stored: JsonObject
    path: str
    hyperparameters: JsonObject
    schedule: JsonObject
    groups: list[JsonObject]

    @classmethod
    def of(cls, value: Any) -> Self:
        """View of a stored value."""
        stored = _object(value)
        return cls(
            stored=stored,
            path=_given(stored.get("class"), str) or "",
            hyperparameters=_object(stored.get("hyperparameters")),
            schedule=_object(stored.get("schedule")),
            groups=_objects(stored.get("groups")),
        )

    @property
    def name(self) -> str:
        """Name of the class."""
        return self.path.rpartition(".")[2]

    @property
    def rule(self) -> str:
        """Name of the class of torch whose rule it follows; `RoundedAdam` follows `Adam`."""
        return self.name.removeprefix("Rounded")


@dataclass(frozen=True, kw_only=True)
class RunAttributes:
    """The attributes of a run that say how it was made.

    Attributes
    ----------
    provenance, recording : dict
        The whole attributes.
    optimizer : OptimizerAttributes
    fork, what_if, developed : dict
        The run and the settings that it was made from; empty for other runs.
    corpus, tokenizer, sources : dict
        What it was trained on, and the paths of both.
    resumed : list of dict
        Facts that changed when the run was resumed, each with its ``step``.
    parameter : str or None
        Name of W in the model.
    every : int
        Distance of the recorded steps.
    keyframe_every : int or None
        Distance of the keyframes, if there are any.
    vocabulary : int or None
        Number of tokens in the model.

    Examples
    --------
    >>> run = RunAttributes.of({"recording": {"every": 2}, "provenance": "unknown"})
    >>> run.every, run.fork, run.optimizer.name
    (2, {}, '')
    """

    provenance: JsonObject
    fork: JsonObject
    what_if: JsonObject
    developed: JsonObject
    corpus: JsonObject
    tokenizer: JsonObject
    sources: JsonObject
    resumed: list[JsonObject]
    optimizer: OptimizerAttributes
    recording: JsonObject
    parameter: str | None
    every: int
    keyframe_every: int | None
    vocabulary: int | None

    @classmethod
    def of(cls, attributes: Mapping[str, Any]) -> Self:
        """View of the attributes of a root."""
        provenance = _object(attributes.get("provenance"))
        recording = _object(attributes.get("recording"))
        resumed = _objects(provenance.get("resumed"))
        return cls(
            provenance=provenance,
            **{name: _object(provenance.get(name)) for name in _MEMBERS},
            resumed=[entry for entry in resumed if fits(entry, {"step": int})],
            optimizer=OptimizerAttributes.of(attributes.get("optimizer")),
            recording=recording,
            parameter=_given(recording.get("parameter"), str),
            every=_given(recording.get("every"), int) or 1,
            keyframe_every=_given(recording.get("keyframe_every"), int) or None,
            vocabulary=_given(recording.get("vocabulary"), int),
        )

    @property
    def resumed_after(self) -> list[int]:
        """Steps after which the run was resumed, in order."""
        return sorted({entry["step"] for entry in self.resumed})

    def facts_after(self, step: int) -> JsonObject:
        """Provenance of the training after a step: versions, machine and number of threads."""
        # A later entry is of steps that were recorded again.
        changed = (entry for entry in reversed(self.resumed) if entry["step"] <= step)
        return {**self.provenance, **next(changed, {})}

    def threads_after(self, step: int) -> int | None:
        """Number of torch threads of the training after a step; None if unknown."""
        return _given(self.facts_after(step).get("threads"), int)

    def modes_after(self, step: int) -> JsonObject:
        """Modes of the process of the training after a step; none in a new process."""
        return _object(self.facts_after(step).get("modes"))

    @property
    def other_optimizer_until(self) -> int:
        """Last step of another optimizer, before this run or its sources were forked; else 0."""
        fork, last, common = self.fork, 0, None
        while fits(fork, {"step": int}):
            # Of an earlier fork, the run holds only the steps until here.
            common = fork["step"] if common is None else min(common, fork["step"])
            if fork.get("optimizer") is not None:
                last = max(last, common)
            fork = fork.get("forked_before", {})
        return last


def _given(value: Any, kind: type[T]) -> T | None:
    """The value if it has a type; None in place of others."""
    return value if fits(value, kind) else None


def _object(value: Any) -> JsonObject:
    return dict(value) if isinstance(value, Mapping) else {}


def _objects(value: Any) -> list[JsonObject]:
    return [item for item in _given(value, list) or () if fits(item, dict)]
