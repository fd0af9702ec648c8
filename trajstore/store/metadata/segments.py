"""Segments of a run: the steps trained with one configuration.

An extended or forked run was trained with one configuration first and with another later. The root
attribute ``segments`` lists them. A run without it has one segment, with its ``config``.
``provenance.resumed`` records the number of threads of each resumed part.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from trajstore.errors import FormatError
from trajstore.strict_json import fits

SEGMENTS = "segments"
"""Name of the attribute."""

Entry = dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class Segment:
    """Steps that were trained with one configuration and number of threads.

    Attributes
    ----------
    first, last : int
        The step before the first of them, and the last of them.
    config : dict
        JSON values.
    threads : int or None
        Threads of torch on the CPU; None if the run does not record them.
    """

    first: int
    last: int
    config: dict[str, Any]
    threads: int | None


def listed_segments(attributes: Mapping[str, Any]) -> list[Entry]:
    """Segments of a run, in order.

    Parameters
    ----------
    attributes : mapping
        Attributes of the root.

    Returns
    -------
    list of dict
        Each with ``step``, the last step before the segment, and its ``config``.

    Examples
    --------
    >>> listed_segments({"config": {"training": {"steps": 100}}})
    [{'step': 0, 'config': {'training': {'steps': 100}}}]
    """
    listed = attributes.get(SEGMENTS)
    return list(listed) if listed else [{"step": 0, "config": attributes.get("config") or {}}]


def segments_attribute(
    attributes: Mapping[str, Any], config: Mapping[str, Any], step: int
) -> dict[str, list[Entry]]:
    """The attribute ``segments`` of a run that is trained after `step` with `config`.

    A segment begins where a setting changes that the training depends on. The recorded variables,
    the commit interval and the name of the device are not such settings.

    Parameters
    ----------
    attributes : mapping
        Present attributes of the root.
    config : mapping
        JSON values.
    step : int
        Last step before the new segment.

    Returns
    -------
    dict
        The attribute by its name; empty if the run never had a second segment.

    Examples
    --------
    >>> run = {"config": {"training": {"steps": 100}}}
    >>> segments_attribute(run, {"training": {"steps": 140}}, 100)["segments"][1]
    {'step': 100, 'config': {'training': {'steps': 140}}}
    """
    kept = [entry for entry in listed_segments(attributes) if entry["step"] < step]
    if kept and _training_settings(kept[-1]["config"]) == _training_settings(config):
        segments = [*kept[:-1], {**kept[-1], "config": dict(config)}]
    else:
        segments = [*kept, {"step": step if kept else 0, "config": dict(config)}]
    return {SEGMENTS: segments} if len(segments) > 1 or SEGMENTS in attributes else {}


def trained_segments(attributes: Mapping[str, Any], first: int, last: int) -> list[Segment]:
    """Segments that cover a range of steps.

    Parameters
    ----------
    attributes : mapping
        Attributes of the root of the run.
    first, last : int
        The step before the range, and its last step.

    Raises
    ------
    FormatError
        If ``provenance.resumed`` is not a list of objects with a step.
    """
    listed = listed_segments(attributes)
    begins = {entry["step"] for entry in (*listed, *_resumed(attributes))}
    bounds = sorted({first, last, *(step for step in begins if first < step < last)})
    found: list[Segment] = []
    for begin, end in itertools.pairwise(bounds):
        segment = Segment(
            first=begin,
            last=end,
            config=[entry["config"] for entry in listed if entry["step"] <= begin][-1],
            threads=recorded_threads(attributes, begin),
        )
        if found and replace(found[-1], first=begin, last=end) == segment:
            found[-1] = replace(found[-1], last=end)
        else:
            found.append(segment)
    return found


def recorded_threads(attributes: Mapping[str, Any], step: int) -> int | None:
    """Number of torch threads with which a run was trained after a step; None if unknown.

    Raises
    ------
    FormatError
        See `trained_segments`.
    """
    threads = recorded_facts(attributes, step).get("threads")
    return threads if isinstance(threads, int) else None


def recorded_facts(attributes: Mapping[str, Any], step: int) -> dict[str, Any]:
    """Provenance of the training after a step: versions, machine and number of threads.

    Raises
    ------
    FormatError
        See `trained_segments`.
    """
    provenance = _provenance(attributes)
    changed = [entry for entry in _resumed(attributes) if entry["step"] <= step]
    return {**provenance, **(changed[-1] if changed else {})}


def resumed_after(attributes: Mapping[str, Any]) -> list[int]:
    """Steps after which a run was resumed, in order.

    Raises
    ------
    FormatError
        See `trained_segments`.
    """
    return [entry["step"] for entry in _resumed(attributes)]


def are_segments(value: Any) -> bool:
    """True if the attribute can have this value: from step 0, in increasing order."""
    if not value or not fits(value, [{"step": int, "config": dict}]):
        return False
    steps = [entry["step"] for entry in value if len(entry) == 2]
    rising = all(a < b for a, b in itertools.pairwise(steps))
    return len(steps) == len(value) and steps[0] == 0 and rising


def _training_settings(config: Mapping[str, Any]) -> Entry:
    """Settings that the training depends on."""
    found = {name: fields for name, fields in config.items() if name != "recording"}
    training = found.get("training")
    if isinstance(training, Mapping):
        found["training"] = {name: value for name, value in training.items() if name != "device"}
    return found


def _resumed(attributes: Mapping[str, Any]) -> list[Entry]:
    """Entries of ``provenance.resumed``, without those of steps that were recorded again."""
    kept: list[Entry] = []
    listed = _provenance(attributes).get("resumed", [])
    if not fits(listed, [{"step": int}]):
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
