"""The recorded matrices, which a loop may replace, move to another group or change by itself.

Matrix, group and rate are found again in each step. A tensor counts its changes, so that weights
that were changed outside the step are detected.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch.optim import Optimizer

from trajstore.trainers.recording.parameter_rows import ParameterRows
from trajstore.trainers.recording.parameters import find_group, rate_of
from trajstore.trainers.recording.planned_run import Recording
from trajstore.trainers.recording.run_notes import CannotFollow
from trajstore.trainers.recording.torch_internals import version

_PLAIN = (int, float, tuple, list)

_OUTSIDE = (
    "{name} was changed outside optimizer.step() after the step before; a row holds the weights at "
    "the end of optimizer.step()"
)
_STATE = "the optimizer's state of {name} before a step is not that of the row before"
_AT_END = (
    "{name} is not that of the last row at the end of the recording; another optimizer or other "
    "code has changed it since"
)
_RATE = (
    "the learning rate changed while optimizer.step() ran, so lr is NaN; call the scheduler after "
    "the step"
)
_OF_GROUPS = (
    "the optimizer changes {keys} of its parameter groups in a step, which no row holds; set them "
    "yourself to continue from a step of the run"
)

_CHANGED = (
    "{keys} of the optimizer's parameter groups changed between steps; the run holds the first "
    "value, so --replay and what-if compute other values from this step on"
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
        self._before: list[dict[str, Any]] = []  # groups before the step of an optimizer
        self._own: set[str] = set()  # settings that a step itself changes
        self._first: dict[Optimizer, list[dict[str, Any]]] = {}  # groups before the first step
        self._rates: dict[int, torch.Tensor | None] = {}  # that the groups were stepped with
        self.begin_step()

    def begin_step(self) -> None:
        """Remember the weights, as those of the last row."""
        self._rates.clear()
        self._versions = self._present_versions()

    def release(self) -> None:
        """Release all tensors."""
        self._versions.clear()
        self._rows = ()

    def find_again(self) -> None:
        """Find the matrices and their groups before a step; check the weights.

        Raises
        ------
        CannotFollow
            If a matrix has another shape or type.
        """
        for rows in self._rows:
            self._find_again(rows)
        if self._has_no_rows and self._versions != self._present_versions():
            self._take_again()
        self.check_weights()

    def begin_turn(self, optimizer: Optimizer) -> None:
        """Look at the groups before the step of an optimizer."""
        self._before = [dict(group) for group in optimizer.param_groups]
        first = self._first.setdefault(optimizer, self._before)
        if changed := sorted(_changed(first, self._before) - self._own):
            self._on_note(_CHANGED.format(keys=", ".join(changed)), unproven=True)

    def _find_again(self, rows: ParameterRows) -> None:
        """Find the parameter and its group, which the loop may have replaced."""
        parameter = rows.parameter
        try:
            found = operator.attrgetter(parameter.name)(self._model)
        except AttributeError:  # the name of a compiled submodule has another prefix
            found = parameter.tensor
        if found is not parameter.tensor:
            before, now = parameter.tensor, found
            if now.shape != before.shape or now.dtype != before.dtype:
                raise CannotFollow(
                    f"{parameter.name} is now {now.dtype} of shape {tuple(now.shape)}, but was "
                    f"{before.dtype} of shape {tuple(before.shape)}; record a new run for it"
                )
            self._on_note(f"{parameter.name} is another tensor from this step on")
        group = find_group(self._optimizer, found)
        if group is None:
            self._on_note(f"{parameter.name} is not in the optimizer in a step; lr is NaN")
        group = group or {}
        owner = self._optimizer.owner(group)
        rows.parameter = replace(parameter, tensor=found, group=group, optimizer=owner)

    def end_turn(self, optimizer: Optimizer, *, may_change: bool) -> None:
        """Take the rates of a step; they `may_change` in a closure, before they are used."""
        own = _changed(self._before, optimizer.param_groups)
        self._own |= own
        if own and self._recording.state is not None:
            self._on_note(_OF_GROUPS.format(keys=", ".join(sorted(own))))
        pairs = zip(self._before, optimizer.param_groups, strict=False)
        known = may_change or not any(_differ(old, group, "lr") for old, group in pairs)
        if not known:
            self._on_note(_RATE)
        known = known and optimizer not in self._optimizer.turns  # two steps have no single rate
        unknown = torch.tensor(float("nan"), dtype=torch.float64)
        for group in optimizer.param_groups:
            self._rates[id(group)] = rate_of(group) if known else unknown

    def set_rates(self) -> None:
        """Set the rates of the step; for a group that was not stepped, its present one."""
        rates = [self._rate(group) for group in self._optimizer.param_groups]
        for rows in self._rows:
            rate = self._rate(rows.parameter.group)
            if rate is None:
                self._on_note(
                    f"the optimizer's group of {rows.parameter.name} has no rate lr that is one "
                    "number; lr is NaN"
                )
                rate = torch.tensor(float("nan"), dtype=torch.float64)
            rows.set("lr", rate)
            if self._recording.state is not None:
                rows.set("params_lr", self._recording.state.rates(rates))

    def _rate(self, group: dict[str, Any]) -> torch.Tensor | None:
        return self._rates[id(group)] if id(group) in self._rates else rate_of(group)

    def check_weights(self, *, quick: bool = False) -> None:
        """Note if W has changed since the last row; `quick` looks at versions only at first."""
        for rows in self._rows:
            parameter = rows.parameter.tensor
            if quick and version(parameter) == self._versions.get(parameter):
                continue
            if not rows.is_W_unchanged():
                self._on_note(_OUTSIDE.format(name=rows.parameter.name), unproven=True)
            if not quick and not rows.is_state_unchanged():
                self._on_note(_STATE.format(name=rows.parameter.name), unproven=True)

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

    def _take_again(self) -> None:
        """Take the state before the first step again: the loop has loaded another one."""
        if self._recording.state is not None:
            self._recording.state.take_initial()
        for rows in self._rows:
            rows.take_initial()


def _changed(before: Sequence[dict[str, Any]], now: Sequence[dict[str, Any]]) -> set[str]:
    """Return the settings that differ, except rates and the parameters."""
    pairs = list(zip(before, now, strict=False))
    return {
        key
        for old, group in pairs
        for key in group.keys() - {"params", "lr", "initial_lr"}
        if _differ(old, group, key)
    }


def _differ(before: dict[str, Any], group: dict[str, Any], key: str) -> bool:
    old, new = before.get(key), group.get(key)
    return isinstance(old, _PLAIN) and isinstance(new, _PLAIN) and old != new
