"""The rates and settings of a step: those at the beginning of the innermost `step`.

A schedule may set them inside the outer one. Those of a closure's step are taken at its end.
"""

from __future__ import annotations

import itertools
import math
import operator
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch.optim import Optimizer

from trajstore.trainers.recording.device_to_host import Value
from trajstore.trainers.recording.notes import class_path
from trajstore.trainers.recording.parameter_rows import ParameterRows
from trajstore.trainers.recording.parameters import (
    Settings,
    declared_settings,
    rate_of,
    settings_of,
)
from trajstore.trainers.recording.planned_run import Recording

_NO_SETTINGS = frozenset(("lr", "params", "param_names"))
_UNKNOWN = torch.tensor(math.nan, dtype=torch.float64, device="cpu")
_LACKS = "the optimizer's group of {name} has no {keys} that is one number; the row has NaN for it"
_IN_STEP = (
    "{keys} changed while optimizer.step() ran, so a row has NaN for it; change settings after the "
    "step, as by scheduler.step(), and set them yourself to continue from a step of the run"
)
_CHANGED = (
    "{keys} of {whose} changed between steps; the run holds the first value, so --replay and "
    "what-if compute with it; to continue from a step of the run, set the later one yourself"
)
_OTHER_CLASS = (
    "{now} steps {name} after a resume, but the run is that of {before}, with which --replay and "
    "what-if compute"
)


class GroupRates(NamedTuple):
    """Settings and rate of a parameter group at a moment; no settings if none are recorded."""

    settings: Settings | None
    rate: Any


def stepped(
    begin: GroupRates, end: GroupRates, *, has_closure: bool, is_first: bool
) -> tuple[GroupRates, set[str], bool]:
    """Return what a group was stepped with, the settings that changed, and if the rate did.

    Parameters
    ----------
    begin, end : GroupRates
        At the begin and the end of the innermost step.
    has_closure : bool
        True if a closure may have changed them before they were used.
    is_first : bool
        False if the optimizer was stepped before in the recorded step; two have no single rate.
    """
    changed = changed_settings(begin.settings, end.settings)
    source = end if has_closure else begin
    settings = source.settings
    if settings is not None and (not is_first or (changed and not has_closure)):
        settings = settings | dict.fromkeys(changed if is_first else settings, math.nan)
    is_number = isinstance(begin.rate, int | float)
    has_changed = not has_closure and is_number and begin.rate != end.rate
    rate = _UNKNOWN if has_changed or not is_first else source.rate
    return GroupRates(settings, rate), changed, has_changed


def changed_settings(before: Settings | None, now: Settings | None) -> set[str]:
    """Return the names of settings that differ."""
    if before is now or before is None or now is None:
        return set()
    return {name for name, value in now.items() if value != before.get(name, value)}


class StepRates:
    """The rates and settings that the groups of the optimizers have in a step.

    Parameters
    ----------
    recording : Recording
    rows : sequence of ParameterRows
    """

    def __init__(self, recording: Recording, rows: Sequence[ParameterRows]) -> None:
        self._recording, self._rows = recording, tuple(rows)
        self._optimizer, self._on_note = recording.optimizer, recording.notes.mention
        self._own: set[str] = set()  # settings that a step itself changes
        self._first: dict[Optimizer, list[GroupRates]] = {}  # before the first step of each
        self._seen: dict[int, tuple[list[Any], Settings]] = {}  # each group, its settings
        self._stepped: dict[int, GroupRates] = {}  # what the groups were stepped with
        # Settings, numbers and lacking names of the last row.
        self._vectors: dict[ParameterRows, tuple[Settings, torch.Tensor, list[str]]] = {}

    def begin_step(self) -> None:
        """Forget the rates of the step before."""
        self._stepped.clear()

    def present(self, optimizer: Optimizer, *, waits: bool = True) -> list[GroupRates]:
        """Return rates and settings of the groups; settings of all for the state of the model.

        Without `waits`, a rate that is a tensor is left out.
        """
        whole = self._recording.state is not None
        recorded = {id(rows.parameter.group) for rows in self._rows}
        rates = []
        for group in optimizer.param_groups:
            rate = group.get("lr")
            if isinstance(rate, torch.Tensor):
                rate = rate_of(group) if waits else None
            settings = self._settings(group) if whole or id(group) in recorded else None
            rates.append(GroupRates(settings, rate))
        return rates

    def _settings(self, group: dict[str, Any]) -> Settings:
        """Return the settings of a group but its rate; the same object while none is replaced."""
        values = [value for key, value in group.items() if key not in _NO_SETTINGS]
        last_values, settings = self._seen.get(id(group), ([], {}))
        if len(last_values) != len(values) or not all(map(operator.is_, last_values, values)):
            chosen = {key: value for key, value in group.items() if key not in _NO_SETTINGS}
            settings = settings_of(chosen)
            if not any(map(_changes_in_place, values)):
                self._seen[id(group)] = values, settings
        return settings

    def check_begin(self, optimizer: Optimizer, before: Sequence[GroupRates]) -> None:
        """Note what has changed since the first step."""
        rows_of_group = {id(rows.parameter.group): rows for rows in self._rows}
        if optimizer not in self._first:
            self._first[optimizer] = [
                GroupRates(self._recorded(rows_of_group.get(id(group))) or now.settings, now.rate)
                for group, now in zip(optimizer.param_groups, before, strict=True)
            ]
        for rows in self._rows:
            recorded = rows.recorded_optimizer.path
            if not recorded or rows.parameter.optimizer is not optimizer:
                continue
            if (now := class_path(type(optimizer))) != recorded:
                names = {"name": rows.parameter.name, "now": now, "before": recorded}
                self._on_note(_OTHER_CLASS.format(**names), unproven=True)
        pairs = zip(self._first[optimizer], before, optimizer.param_groups, strict=False)
        for old, new, group in pairs:
            if not (changed := changed_settings(old.settings, new.settings)):
                continue
            of_matrix = rows_of_group.get(id(group))
            changed -= {*self._own, *(of_matrix.hyperparameters if of_matrix else ())}
            if changed and (changed := changed & declared_settings(optimizer, group).keys()):
                whose = f"the group of {of_matrix.parameter.name}" if of_matrix else "other groups"
                sentence = _CHANGED.format(keys=", ".join(sorted(changed)), whose=whose)
                self._on_note(sentence, unproven=of_matrix is not None)

    def _recorded(self, rows: ParameterRows | None) -> Settings:
        """Return the settings of a resumed run but the rate; flags without a value are off."""
        recorded = {} if rows is None else rows.recorded_optimizer.hyperparameters
        settings = {k: value is not None and value for k, value in recorded.items() if k != "lr"}
        return settings_of(settings)

    def end_turn(
        self,
        optimizer: Optimizer,
        begin: Sequence[GroupRates],
        end: Sequence[GroupRates],
        *,
        has_closure: bool,
    ) -> None:
        """Take what the groups of an optimizer were stepped with."""
        is_first = optimizer not in self._optimizer.turns
        for before, after, group in zip(begin, end, optimizer.param_groups, strict=False):
            self._stepped[id(group)], changed, has_changed = stepped(
                before, after, has_closure=has_closure, is_first=is_first
            )
            self._own |= changed
            if self._recording.state is None:
                of_group = [rows for rows in self._rows if rows.parameter.group is group]
                changed &= {*itertools.chain(*(rows.hyperparameters for rows in of_group))}
            if (changed and not has_closure) or has_changed:
                keys = ", ".join(["lr"] * has_changed + sorted(changed))
                self._on_note(_IN_STEP.format(keys=keys))

    def values(self, rows: ParameterRows) -> dict[str, Value]:
        """Return the settings of the step; for a group that was not stepped, the present ones."""
        rate = self._rate(rows.parameter.group)
        if rate is None:
            self._on_note(_LACKS.format(name=rows.parameter.name, keys="rate lr"))
        values: dict[str, Value] = {"lr": _UNKNOWN if rate is None else rate}
        if rows.hyperparameters:
            values["hyperparameters"] = self._hyperparameters(rows)
        if self._recording.state is not None:
            rates = [self._rate(group) for group in self._optimizer.param_groups]
            values["params_lr"] = self._recording.state.rates(rates)
        return values

    def _rate(self, group: dict[str, Any]) -> torch.Tensor | None:
        of_step = self._stepped.get(id(group))
        return rate_of(group) if of_step is None else rate_of({"lr": of_step.rate})

    def _hyperparameters(self, rows: ParameterRows) -> torch.Tensor:
        """Return the numbers of the step; the vector of the row before if nothing changed."""
        group, owner = rows.parameter.group, rows.parameter.optimizer
        of_step = self._stepped.get(id(group))
        settings = None if of_step is None else of_step.settings
        if settings is None:
            settings = {} if owner is None else self._settings(group)
        last, vector, missing = self._vectors.get(rows, ({}, None, []))
        if vector is None or settings is not last:
            missing = [name for name in rows.hyperparameters if name not in settings]
            values = [settings.get(name, math.nan) for name in rows.hyperparameters]
            vector = torch.tensor(values, dtype=torch.float64, device="cpu")
            self._vectors[rows] = settings, vector, missing
        if missing and settings:
            keys = ", ".join(missing)
            self._on_note(_LACKS.format(name=rows.parameter.name, keys=keys))
        return vector


def _changes_in_place(value: Any) -> bool:
    if isinstance(value, tuple):
        return any(map(_changes_in_place, value))
    return isinstance(value, torch.Tensor | list)
