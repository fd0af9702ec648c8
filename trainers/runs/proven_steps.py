"""Proof of recorded steps from the data to the weights.

A step is trained again from the recorded row before it, or from the keyframe before it: batch,
forward and backward pass, clipping and the optimizer. Every variable of its row is compared, bit
for bit.
"""

from __future__ import annotations

import itertools
import math
import os
from collections.abc import Callable, Container, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import xarray as xr

from trajstore.errors import (
    ConfigError,
    InvalidArgument,
    NothingToResume,
    StepNotFound,
    VariableNotRecorded,
)
from trajstore.exchange.selection import Steps, select_part
from trajstore.provenance import RunAttributes
from trajstore.schema import INTEGERS, STEP, VARIABLES, variables_of
from trajstore.store.metadata.zarr_json import unproven_rows
from trajstore.store.reading.open_group import open_group
from trajstore.store.storage.remote_path import RunPath, location
from trajstore.trainers.recording.existing_run import Comparison, RowDifference
from trajstore.trainers.replays.findings import (
    LISTED,
    CannotReplay,
    Findings,
    Unreplayed,
    UnreplayedSteps,
    replay_device,
    replay_devices,
    ulp_distance,
)
from trajstore.trainers.runs.changed_settings import check_text, recorded_config
from trajstore.trainers.runs.record import text_sources
from trajstore.trainers.runs.walk import walk
from trajstore.trainers.states.states import States
from trajstore.trainers.texts import load_corpus
from trajstore.values.native_types import native_type

_SEGMENT = 256
"""Maximum number of rows that are trained without a new start, so that progress does not wait."""


@dataclass(frozen=True, kw_only=True)
class Difference:
    """Values of one row and parameter that differ from the repeated step.

    Attributes
    ----------
    step : int
    variable : str
    parameter : str or None
        Name of the parameter; None for variables that belong to none.
    elements : int
        Number of different values.
    ulps : int or None
        Largest distance in values of the native type; None for float64.
    """

    step: int
    variable: str
    parameter: str | None
    elements: int
    ulps: int | None


@dataclass(frozen=True, kw_only=True)
class Proof(Findings):
    """Result of `prove`.

    Attributes
    ----------
    repeated_on : str
    proven : int
        Of the selected steps, those that agree in every bit.
    variables : tuple of str
        Compared variables.
    differences : tuple of Difference
        The first ones, in the order of the steps.
    differing : int
        Number of steps with a difference.
    unproven : tuple of Unreplayed
        Steps that were not compared.
    """

    repeated_on: str
    proven: int
    variables: tuple[str, ...]
    differences: tuple[Difference, ...]
    differing: int
    unproven: tuple[Unreplayed, ...]

    @property
    def clean(self) -> bool:
        """True without a difference; on another device differences are no errors."""
        return not self.exact or not self.total


def prove(
    path: RunPath,
    *,
    steps: Steps = None,
    corpus: str | os.PathLike[str] | None = None,
    tokenizer: str | os.PathLike[str] | None = None,
    on_progress: Callable[[int, int], None] | None = None,
) -> Proof:
    """Train recorded steps again, each from the row before it, and compare all variables.

    The batch follows from the configuration. Loss, logits, all gradients, the weights and the
    moments have to agree bit for bit. After a different row the training starts from that row.

    Parameters
    ----------
    path : path-like or str
        A run of `trainers.record`, with ``variables="everything"`` or ``"keyframes"``.
    steps : str, int, slice or iterable of int, optional
        Steps to prove, such as ``"0:1000:10"``; default: all.
    corpus, tokenizer : path-like, optional
        As for `trainers.record`; default: the paths that the run was recorded with.
    on_progress : callable, optional
        Called with the number of finished steps and the number of all selected steps.

    Returns
    -------
    Proof

    Raises
    ------
    RunNotFound, FormatError
        If there is no run, or a chunk is damaged.
    InvalidArgument
        If the training cannot be repeated: it was an own loop or Trainer, or is imported.
    VariableNotRecorded
        If its rows do not hold the whole state.
    CorpusError
        If the text differs from that of the run.

    Examples
    --------
    >>> found = prove("everything.zarr")
    >>> found.clean, found.proven
    (True, 3)
    """
    run = location(path)
    group: Any = open_group(run)
    states = States(run)
    attributes, recorded = states.attributes, np.array(states.steps, np.int64)
    _check_provable(path, states)
    chosen = select_part(xr.Dataset(coords={STEP.name: recorded}), steps=steps)[STEP.name].values
    rows = [row for row in np.flatnonzero(np.isin(recorded, chosen)).tolist() if row]
    devices = replay_devices(attributes, recorded, products=True)
    device = replay_device(attributes, products=True)
    sources = text_sources(None, attributes, corpus=corpus, tokenizer=tokenizer)
    text = load_corpus(recorded_config(run), **sources)
    check_text(run, text)
    missing, unproven = unproven_rows(attributes, recorded), UnreplayedSteps()
    differences: list[Difference] = []
    proven = finished = 0
    while finished < len(rows):
        segment, count = _segment(rows[finished:], states, missing), 1
        first, last = segment[0], int(recorded[segment[-1]])
        with unproven.collect(int(recorded[first])):
            if first in missing:
                raise CannotReplay(missing[first])
            if recorded[first] <= RunAttributes.of(attributes).other_optimizer_until:
                raise CannotReplay(
                    "another optimizer or type trained it, before the run was forked; prove the "
                    "source of the fork"
                )
            compared = Comparison(first_row=first)
            try:
                start = states.before(int(recorded[first - 1]))
                walk(run, text, start, last, compared, sources=sources)
            except (ConfigError, InvalidArgument, NothingToResume, StepNotFound) as error:
                raise CannotReplay(str(error)) from error
            proven += compared.agreed
            difference, count = compared.difference, len(segment)
            if difference is not None and difference.row < first:
                count = 1
                names = ", ".join(difference.variables)
                raise CannotReplay(f"{names} cannot be restored from the row before")
            if difference is not None:
                count = difference.row - first + 1
                differences += _differences(difference, group)
            elif not (count := compared.agreed):
                count = 1
                raise CannotReplay("the repeated training does not reach its row")
        finished += count
        if on_progress is not None:
            on_progress(finished, len(rows))
    return Proof(
        path=str(path),
        exact=all(devices[row].exact for row in rows),
        recorded_on=device.recorded_on,
        repeated_on=device.replayed_on,
        steps=len(rows),
        proven=proven,
        variables=tuple(name for name in group.array_keys() if name in variables_of(attributes)),
        differences=tuple(differences[:LISTED]),
        total=len(differences),
        differing=len({difference.step for difference in differences}),
        unproven=unproven.all(),
        notes=tuple(dict.fromkeys(note for row in rows for note in devices[row].notes)),
    )


def _check_provable(path: RunPath, states: States) -> None:
    """Check that the training of a run can be repeated from its rows."""
    attributes = states.attributes
    computed = attributes.get("imported") or RunAttributes.of(attributes).what_if
    if not attributes.get("config") or computed:
        raise InvalidArgument(
            f"{path} was not recorded by `trajstore record`, so its training cannot be repeated; "
            "train a step in your program: after restore(), or with keyframes in develop()"
        )
    if states.stored is None:
        raise VariableNotRecorded(
            f"the rows of {path} do not hold the whole state of the training; gradients need "
            "variables='everything', without float16 autocast, or variables='keyframes'"
        )


def _segment(rows: list[int], states: States, missing: Container[int]) -> list[int]:
    """Return the first rows, up to a gap or keyframe: those that need no new start."""
    first, ends = rows[0], states.keyframes
    consecutive = itertools.takewhile(
        lambda pair: (
            pair[1] == first + pair[0]
            and pair[1] not in missing
            and (pair[1] == first or states.steps[pair[1] - 1] not in ends)
        ),
        enumerate(rows[:_SEGMENT]),
    )
    return [row for _, row in consecutive] or [first]


def _differences(row: RowDifference, group: Any) -> Iterator[Difference]:
    """Yield the differences of a row, for each variable and parameter."""
    for name in row.variables:
        if name not in row.stored:
            yield Difference(step=row.step, variable=name, parameter=None, elements=1, ulps=None)
            continue
        native = native_type(str(group[name].attrs["native_dtype"]))
        for parameter, part in _parts(name, group):
            stored = np.atleast_1d(row.stored[name])[part]
            computed = np.atleast_1d(row.computed[name])[part]
            wrong = stored != computed
            if wrong.any():
                pair = stored[wrong], computed[wrong]
                yield Difference(
                    step=row.step,
                    variable=name,
                    parameter=parameter,
                    elements=int(np.count_nonzero(wrong)),
                    ulps=None if name in INTEGERS else ulp_distance(*pair, native),
                )


def _parts(variable: str, group: Any) -> Iterator[tuple[str | None, Any]]:
    """Yield the parameters of a variable, each with its place in a row."""
    dims, attributes = VARIABLES[variable].dims[1:], group.attrs
    if dims == ("token", "hidden"):
        yield RunAttributes.of(attributes).parameter, ...
    elif dims == ("element",):
        for entry in attributes.get("parameters", ()):
            if entry["variable"] != "W":
                start = entry["offset"]
                yield entry["name"], slice(start, start + math.prod(entry["shape"]))
    elif dims == ("parameter",):
        for number, name in enumerate(map(str, group["parameter"][...])):
            yield name, slice(number, number + 1)
    else:
        yield None, ...
