"""The recorded matrices, which a loop may replace, move to another group or change by itself.

Matrix, group and rate are found again in each step. A tensor counts its changes, so that weights
that were changed outside the step are detected.
"""

from __future__ import annotations

import itertools
import math
import operator
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch.optim import Optimizer

from trajstore.trainers.recording.device_to_host import Value, same_bits
from trajstore.trainers.recording.notes import CannotFollow, class_path
from trajstore.trainers.recording.parameter_rows import ParameterRows
from trajstore.trainers.recording.parameters import (
    Settings,
    declared_settings,
    find_group,
    rate_of,
    settings_of,
)
from trajstore.trainers.recording.planned_run import Recording
from trajstore.trainers.recording.sharding import is_sharded
from trajstore.trainers.recording.torch_internals import (
    name_outside_compile,
    own_parameter,
    version,
)

_NO_SETTINGS = frozenset(("lr", "params", "param_names"))
_UNKNOWN = torch.tensor(math.nan, dtype=torch.float64, device="cpu")
_OUTSIDE = (
    "code outside optimizer.step() changed {name} before this step; a row holds the weights at the "
    "end of optimizer.step(), so it contains both changes"
)
_WRAPPED = "{wrapper} changed {name} beside the update of the optimizer"
_WRITTEN = (
    "code outside optimizer.step() wrote to {name} before this step; whether its values changed "
    "was not read from the device"
)
_STATE = (
    "the optimizer's state of {name} was written or replaced before a step, so it may not be that "
    "of the row before"
)
_AT_END = (
    "another optimizer or other code changed {name} after the last row; no row holds that change"
)
_RATE = (
    "the learning rate changed while optimizer.step() ran, so lr is NaN; call the scheduler after "
    "the step"
)
_OF_GROUPS = (
    "the optimizer changes {keys} of its parameter groups in a step, which no row holds; set them "
    "yourself to continue from a step of the run"
)

_IN_STEP = (
    "{keys} changed while optimizer.step() ran, so hyperparameters has NaN for them; change "
    "settings after the step"
)
_CHANGED = (
    "{keys} of the optimizer's group of the recorded parameter changed between steps; the run "
    "holds the first value, so --replay and what-if compute other values from this step on"
)
_OTHER_CLASS = (
    "{now} steps {name} after a resume, but the run is that of {before}, with which --replay and "
    "what-if compute"
)
_CHANGED_ELSEWHERE = (
    "{keys} of parameter groups without the recorded parameter changed between steps; the run "
    "holds the first value; to continue from a step of the run, set the later one yourself"
)


class FollowedMatrices:
    """Follows the recorded matrices from step to step.

    Parameters
    ----------
    recording : Recording
    rows : sequence of ParameterRows
        One per matrix; `find_again` replaces their parameters.
    """

    def __init__(self, recording: Recording, rows: Sequence[ParameterRows]) -> None:
        self._recording = recording
        self._model, self._optimizer = recording.model, recording.optimizer
        self._rows = tuple(rows)
        self._on_note = recording.notes.mention
        self._has_begun = False
        # Settings and rates of groups before the step of an optimizer, and before its first one.
        self._before: list[tuple[Settings | None, Any]] = []
        self._own: set[str] = set()  # settings that a step itself changes
        self._first: dict[Optimizer, list[tuple[Settings | None, Any]]] = {}
        self._names: dict[ParameterRows, str] = {}  # of matrices with another name in the model
        self._inside: dict[torch.Tensor, torch.Tensor] = {}  # weights after an inner step
        self._rates: dict[int, torch.Tensor | None] = {}  # that the groups were stepped with
        self._stepped: dict[int, Settings] = {}  # the same for all settings
        self._seen: dict[int, tuple[list[Any], Settings]] = {}  # each group, its settings
        # Settings, numbers and lacking names of the last row.
        self._vectors: dict[ParameterRows, tuple[Settings, torch.Tensor, list[str]]] = {}
        self.begin_step()

    def begin_step(self) -> None:
        """Remember the weights, as those of the last row."""
        self._rates.clear()
        self._stepped.clear()
        self._versions = self._present_versions()

    def release(self) -> None:
        """Release all tensors."""
        self._versions.clear()
        self._vectors.clear()
        self._seen.clear()
        self._rows = ()

    def find_again(self) -> bool:
        """Find the matrices and their groups before a step; check the weights.

        Returns
        -------
        bool
            True if a matrix is another tensor now.

        Raises
        ------
        CannotFollow
            If a matrix has another shape or type, or is no parameter any more.
        """
        replaced = self.follow()
        for rows in self._rows:
            self._find_group(rows)
        self.check_weights()
        return replaced

    def take_initial_again(self) -> None:
        """At the first call, take the initial state again if the loop has loaded another one."""
        is_first, self._has_begun = not self._has_begun, True
        if is_first and self._has_no_rows and self._versions != self._present_versions():
            if self._recording.state is not None:
                self._recording.state.take_initial()
            for rows in self._rows:
                rows.take_initial()
            self._versions = self._present_versions()

    def begin_turn(self, optimizer: Optimizer) -> None:
        """Look at the groups before the step of an optimizer: all for the state of the model."""
        whole = self._recording.state is not None
        rows_of_group = {id(rows.parameter.group): rows for rows in self._rows}
        self._before = [
            (self._settings(g) if whole or id(g) in rows_of_group else None, g.get("lr"))
            for g in optimizer.param_groups
        ]
        if optimizer not in self._first:
            self._first[optimizer] = [
                (self._recorded_settings(rows_of_group.get(id(group))) or before, rate)
                for group, (before, rate) in zip(optimizer.param_groups, self._before, strict=True)
            ]
        for rows in self._rows:
            recorded = rows.recorded_optimizer.get("class")
            if recorded is None or rows.parameter.optimizer is not optimizer:
                continue
            if (now := class_path(type(optimizer))) != recorded:
                names = {"name": rows.parameter.name, "now": now, "before": recorded}
                self._on_note(_OTHER_CLASS.format(**names), unproven=True)
        pairs = zip(self._first[optimizer], self._before, optimizer.param_groups, strict=False)
        for (old, _), (new, _), group in pairs:
            if not (changed := _changed(old, new)):
                continue
            of_matrix = rows_of_group.get(id(group))
            changed -= {*self._own, *(of_matrix.hyperparameters if of_matrix else ())}
            if changed and (changed := changed & declared_settings(optimizer, group).keys()):
                note = _CHANGED if of_matrix else _CHANGED_ELSEWHERE
                sentence = note.format(keys=", ".join(sorted(changed)))
                self._on_note(sentence, unproven=of_matrix is not None)

    def _recorded_settings(self, rows: ParameterRows | None) -> Settings:
        """Return the settings of a resumed run but the rate; flags without a value are off."""
        recorded = {} if rows is None else rows.recorded_optimizer.get("hyperparameters", {})
        settings = {k: value is not None and value for k, value in recorded.items() if k != "lr"}
        return settings_of(settings)

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

    def _find_group(self, rows: ParameterRows) -> None:
        """Find the group of a parameter, which the loop may have replaced."""
        parameter = rows.parameter
        group = find_group(self._optimizer, parameter.tensor)
        if group is None:
            self._on_note(
                f"{parameter.name} is not in the optimizer in a step; lr and hyperparameters are "
                "NaN"
            )
        group = group or {}
        owner = self._optimizer.owner(group)
        if group is not parameter.group or owner is not parameter.optimizer:
            rows.parameter = replace(parameter, group=group, optimizer=owner)

    def _present(self, rows: ParameterRows) -> torch.nn.Parameter | None:
        """Return the parameter that has the name now; None if the model has no such parameter."""
        owner, _, name = self._names.get(rows, rows.parameter.name).rpartition(".")
        try:
            return own_parameter(self._model.get_submodule(owner), name)
        except AttributeError:
            return None

    def follow(self) -> bool:
        """Find the matrices again; return True if one is another tensor now.

        Raises
        ------
        CannotFollow
            If a matrix has another shape or type, or is no parameter any more.
        """
        replaced = False
        for rows in self._rows:
            parameter, now = rows.parameter, self._present(rows)
            if now is None:  # another name, as in a compiled submodule or a parametrization
                self._find_by_tensor(rows)
            elif is_sharded(parameter.tensor) and not is_sharded(now):
                continue  # FSDP2 holds the whole values in its place during a pass
            elif now is not parameter.tensor:
                before = parameter.tensor
                if now.shape != before.shape or now.dtype != before.dtype:
                    raise CannotFollow(
                        f"{parameter.name} is now {now.dtype} of shape {tuple(now.shape)}, but was "
                        f"{before.dtype} of shape {tuple(before.shape)}; record a new run"
                    )
                sentence = f"{parameter.name} is another tensor from this step on"
                self._on_note(sentence, unproven=True)
                rows.parameter = replace(parameter, tensor=now)
                replaced = True
        return replaced

    def _find_by_tensor(self, rows: ParameterRows) -> None:
        """Find the new name of a parameter, from which the model computes that of the old name."""
        name, tensor = rows.parameter.name, rows.parameter.tensor
        now = next((n for n, p in self._model.named_parameters() if p is tensor), None)
        if now is None:
            raise CannotFollow(f"the model has no parameter {name} any more; record a new run")
        self._names[rows] = now
        if (now := name_outside_compile(now)) != name:
            self._on_note(
                f"the model computes {name} from {now} from this step on; the run holds {now}"
            )

    def end_turn(self, optimizer: Optimizer, *, may_change: bool) -> None:
        """Take the settings of a step; they `may_change` in a closure, before they are used."""
        again = optimizer in self._optimizer.turns  # two steps have no single rate
        for (before, rate), group in zip(self._before, optimizer.param_groups, strict=False):
            if before is None:
                continue
            now = self._settings(group)
            changed = _changed(before, now)
            unknown = {*now} if again else set() if may_change else changed
            self._stepped[id(group)] = now | dict.fromkeys(unknown, math.nan) if unknown else now
            known = may_change or not isinstance(rate, int | float) or rate == group.get("lr")
            self._rates[id(group)] = rate_of(group) if known and not again else _UNKNOWN
            if not known:
                self._on_note(_RATE)
            if changed:
                self._note_changes(group, changed)

    def _note_changes(self, group: dict[str, Any], changed: set[str]) -> None:
        """Note settings that changed in a step."""
        self._own |= changed
        if self._recording.state is None:
            names = (rows.hyperparameters for rows in self._rows if rows.parameter.group is group)
            changed &= {*itertools.chain(*names)}
        if changed:
            note = _IN_STEP if self._recording.state is None else _OF_GROUPS
            self._on_note(note.format(keys=", ".join(sorted(changed))))

    def rates(self, rows: ParameterRows) -> dict[str, Value]:
        """Return the settings of the step; for a group that was not stepped, the present ones."""
        rate = self._rate(rows.parameter.group)
        if rate is None:
            self._on_note(
                f"the optimizer's group of {rows.parameter.name} has no rate lr that is one "
                "number; lr is NaN"
            )
            rate = _UNKNOWN
        values: dict[str, Value] = {"lr": rate}
        if rows.hyperparameters:
            values["hyperparameters"] = self._hyperparameters(rows)
        if self._recording.state is not None:
            rates = [self._rate(group) for group in self._optimizer.param_groups]
            values["params_lr"] = self._recording.state.rates(rates)
        return values

    def _rate(self, group: dict[str, Any]) -> torch.Tensor | None:
        return self._rates[id(group)] if id(group) in self._rates else rate_of(group)

    def _hyperparameters(self, rows: ParameterRows) -> torch.Tensor:
        """Return the numbers of the step; the vector of the row before if nothing changed."""
        group, owner = rows.parameter.group, rows.parameter.optimizer
        settings = self._stepped.get(id(group))
        if settings is None:
            settings = {} if owner is None else self._settings(group)
        last, vector, missing = self._vectors.get(rows, ({}, None, []))
        if vector is None or settings is not last:
            missing = [name for name in rows.hyperparameters if name not in settings]
            values = [settings.get(name, math.nan) for name in rows.hyperparameters]
            vector = torch.tensor(values, dtype=torch.float64, device="cpu")
            self._vectors[rows] = settings, vector, missing
        if missing and settings:
            self._on_note(
                f"the optimizer's group of {rows.parameter.name} has no {', '.join(missing)}; "
                "hyperparameters has NaN for them"
            )
        return vector

    def check_weights(self, *, quick: bool = False) -> None:
        """Note if W has changed since the last row; `quick` looks at versions only at first."""
        for rows in self._rows:
            parameter = rows.parameter.tensor
            counted = version(parameter) != self._versions.get(parameter)
            if quick and not counted:
                continue
            if not rows.is_W_unchanged():
                self._on_note(_OUTSIDE.format(name=rows.parameter.name), unproven=not quick)
            elif counted and not quick and parameter.device.type != "cpu":
                self._on_note(_WRITTEN.format(name=rows.parameter.name), unproven=True)
            if not quick and not rows.is_state_unchanged():
                self._on_note(_STATE.format(name=rows.parameter.name), unproven=True)

    def end_inner_step(self) -> None:
        """Copy the weights that the step of a wrapped optimizer has left."""
        for rows in self._rows:
            self._inside[rows.parameter.tensor] = rows.own_W().clone()

    def check_inner_step(self, wrapper: str | None, *, begins: bool) -> None:
        """Note weights that a wrapper or a hook changes before or after the update."""
        for rows in self._rows:
            inside = self._inside.pop(rows.parameter.tensor, None)
            if begins:
                same = rows.is_W_unchanged()
            else:  # without a copy, nothing else has run
                same = inside is None or same_bits(inside, rows.own_W())
            if not same:
                sentence = _WRAPPED.format(wrapper=wrapper, name=rows.parameter.name)
                self._on_note(sentence, unproven=True)

    def check_last(self) -> None:
        """Note if W is not that of the last row."""
        for rows in self._rows:
            if not rows.is_W_unchanged(waits=True):
                self._on_note(_AT_END.format(name=rows.parameter.name))

    @property
    def _has_no_rows(self) -> bool:
        return bool(self._rows) and self._rows[0].writer is None

    def _present_versions(self) -> dict[torch.Tensor, int]:
        """Return the versions of the recorded parameters, before the first row of all."""
        recorded = [rows.parameter.tensor for rows in self._rows]
        watched = self._model.parameters() if self._has_no_rows else recorded
        return {parameter: version(parameter) for parameter in watched}


def _changes_in_place(value: Any) -> bool:
    if isinstance(value, tuple):
        return any(map(_changes_in_place, value))
    return isinstance(value, torch.Tensor | list)


def _changed(before: Settings | None, now: Settings | None) -> set[str]:
    """Return the names of settings that differ."""
    if before is now or before is None or now is None:
        return set()
    return {name for name, value in now.items() if value != before.get(name, value)}
