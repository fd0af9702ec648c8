"""The stretches of a run: from which step on each of its configurations holds.

A run that was extended, or forked, was trained with one configuration first and with another later.
The root attribute ``stretches`` lists them; a run without it has one stretch, with its ``config``.
Where a run was resumed with another number of threads, ``provenance.resumed`` says so.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from trajstore.errors import FormatError

__all__ = [
    "STRETCHES",
    "Stretch",
    "are_stretches",
    "listed_stretches",
    "recorded_threads",
    "stretches_attribute",
    "trained_stretches",
]

STRETCHES = "stretches"
"""Name of the attribute."""

Entry = dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class Stretch:
    """Steps that were trained in one way.

    Attributes
    ----------
    first, last : int
        Step before them, and the last of them.
    config : dict
        JSON values.
    threads : int or None
        Of torch, on the CPU; None where the run does not say.
    """

    first: int
    last: int
    config: dict[str, Any]
    threads: int | None


def listed_stretches(attributes: Mapping[str, Any]) -> list[Entry]:
    """Stretches of a run, in order.

    Parameters
    ----------
    attributes : mapping
        Of its root.

    Returns
    -------
    list of dict
        Each with ``step``, the last step before it, and its ``config``.

    Examples
    --------
    >>> listed_stretches({"config": {"training": {"steps": 100}}})
    [{'step': 0, 'config': {'training': {'steps': 100}}}]
    """
    listed = attributes.get(STRETCHES)
    return list(listed) if listed else [{"step": 0, "config": attributes.get("config") or {}}]


def stretches_attribute(
    attributes: Mapping[str, Any], config: Mapping[str, Any], step: int
) -> dict[str, list[Entry]]:
    """The attribute of a run that is trained after a step with a configuration, by its name.

    A stretch begins where something changes that the training depends on. What is recorded, how
    often rows are committed, and the name of the device are no such thing.

    Parameters
    ----------
    attributes : mapping
        Of the root of the run until now.
    config : mapping
        JSON values.
    step : int
        Last step before.

    Returns
    -------
    dict
        Empty for a run that never had a second stretch.

    Examples
    --------
    >>> run = {"config": {"training": {"steps": 100}}}
    >>> stretches_attribute(run, {"training": {"steps": 140}}, 100)["stretches"][1]
    {'step': 100, 'config': {'training': {'steps': 140}}}
    """
    kept = [entry for entry in listed_stretches(attributes) if entry["step"] < step]
    if kept and _trains_alike(kept[-1]["config"], config):
        stretches = [*kept[:-1], {**kept[-1], "config": dict(config)}]
    else:
        stretches = [*kept, {"step": step if kept else 0, "config": dict(config)}]
    return {STRETCHES: stretches} if len(stretches) > 1 or STRETCHES in attributes else {}


def trained_stretches(attributes: Mapping[str, Any], first: int, last: int) -> list[Stretch]:
    """How the steps of a run were trained.

    Parameters
    ----------
    attributes : mapping
        Of the root of the run.
    first, last : int
        Step before the first of them, and the last.

    Raises
    ------
    FormatError
        If ``provenance.resumed`` is no list of objects with a step.
    """
    listed = listed_stretches(attributes)
    begins = {entry["step"] for entry in (*listed, *_resumed(attributes))}
    bounds = sorted({first, last, *(step for step in begins if first < step < last)})
    found: list[Stretch] = []
    for begin, end in itertools.pairwise(bounds):
        stretch = Stretch(
            first=begin,
            last=end,
            config=[entry["config"] for entry in listed if entry["step"] <= begin][-1],
            threads=recorded_threads(attributes, begin),
        )
        if found and replace(found[-1], first=begin, last=end) == stretch:
            found[-1] = replace(found[-1], last=end)
        else:
            found.append(stretch)
    return found


def recorded_threads(attributes: Mapping[str, Any], step: int) -> int | None:
    """Number of torch's threads that a run was trained with after a step; None if not known.

    Raises
    ------
    FormatError
        As for `trained_stretches`.
    """
    provenance = _provenance(attributes)
    threads = provenance.get("threads")
    for entry in _resumed(attributes):
        if entry["step"] <= step:
            threads = entry.get("threads", provenance.get("threads"))
    return threads if isinstance(threads, int) else None


def are_stretches(value: Any) -> bool:
    """Whether the attribute can have this value: from step 0 on, in increasing order."""
    if not isinstance(value, list) or not value:
        return False
    for entry in value:
        if not isinstance(entry, dict) or entry.keys() != {"step", "config"}:
            return False
        if type(entry["step"]) is not int or not isinstance(entry["config"], dict):
            return False
    steps = [entry["step"] for entry in value]
    return steps[0] == 0 and all(a < b for a, b in itertools.pairwise(steps))


def _trains_alike(one: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    return _of_training(one) == _of_training(other)


def _of_training(config: Mapping[str, Any]) -> Entry:
    """What of a configuration the training depends on."""
    found = {name: fields for name, fields in config.items() if name != "recording"}
    training = found.get("training")
    if isinstance(training, Mapping):
        found["training"] = {name: value for name, value in training.items() if name != "device"}
    return found


def _resumed(attributes: Mapping[str, Any]) -> list[Entry]:
    """Entries of ``provenance.resumed`` that still hold: a later one replaces those after it."""
    kept: list[Entry] = []
    listed = _provenance(attributes).get("resumed", [])
    if not isinstance(listed, list) or not all(
        isinstance(entry, dict) and type(entry.get("step")) is int for entry in listed
    ):
        raise FormatError(
            f"zarr.json: attributes.provenance.resumed is {listed!r}, expected a list of objects, "
            "each with a step"
        )
    for entry in listed:
        kept = [one for one in kept if one["step"] < entry["step"]] + [entry]
    return kept


def _provenance(attributes: Mapping[str, Any]) -> Mapping[str, Any]:
    found = attributes.get("provenance")
    return found if isinstance(found, Mapping) else {}
