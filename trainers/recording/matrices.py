"""The recorded matrices, which a loop may replace, move to another group or change by itself."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from trajstore.trainers.recording.device_to_host import same_bits
from trajstore.trainers.recording.notes import CannotFollow
from trajstore.trainers.recording.parameter_rows import ParameterRows
from trajstore.trainers.recording.parameters import find_group
from trajstore.trainers.recording.planned_run import Recording
from trajstore.trainers.recording.sharding import is_sharded
from trajstore.trainers.recording.torch_internals import (
    name_outside_compile,
    own_parameter,
    version,
)

_OUTSIDE = (
    "code outside optimizer.step() {did} {name} before this step, perhaps a hook after the last; a "
    "row holds the weights at the end of optimizer.step(), so it contains both changes"
)
_BESIDE = "{wrapper} changed {name} beside the update of the optimizer"
_STATE = (
    "the optimizer's state of {name} was written or replaced before a step, so it may not be that "
    "of the row before"
)
_AT_END = (
    "another optimizer or other code changed {name} after the last row; no row holds that change"
)
_REPLACED = "{name} is another tensor from this step on"
_UNTRAINED = (
    "{name} is not in the optimizer in a step, so no step changes it, and its state, lr and "
    "hyperparameters are NaN; pass the new parameter to the optimizer"
)
_COMPUTED = "the model computes {name} from {now} from this step on; the run holds {now}"


class FollowedMatrices:
    """Follows the recorded matrices from step to step.

    Parameters
    ----------
    recording : Recording
    rows : sequence of ParameterRows
        One per matrix; `follow` and `find_groups` replace their parameters.
    """

    def __init__(self, recording: Recording, rows: Sequence[ParameterRows]) -> None:
        self._recording = recording
        self._model, self._optimizer = recording.model, recording.optimizer
        self._rows = tuple(rows)
        self._on_note = recording.notes.mention
        self._has_begun = False
        self._names: dict[ParameterRows, str] = {}  # of matrices with another name in the model
        self._after_update: list[torch.Tensor] = []  # copies of W
        self.begin_step()

    def begin_step(self) -> None:
        """Remember the weights, as those of the last row."""
        self._versions = self._present_versions()

    def release(self) -> None:
        """Release all tensors."""
        self._versions.clear()
        self._rows, self._after_update = (), []

    # The tensors ---------------------------------------------------------------------------------

    def take_initial_again(self) -> None:
        """At the first call, take the initial state again if the loop has loaded another one."""
        is_first, self._has_begun = not self._has_begun, True
        if is_first and self._has_no_rows and self._versions != self._present_versions():
            if self._recording.state is not None:
                self._recording.state.take_initial()
            for rows in self._rows:
                rows.take_initial()
            self._versions = self._present_versions()

    def find_groups(self) -> None:
        """Find the group of each parameter, which the loop may have replaced."""
        for rows in self._rows:
            parameter = rows.parameter
            group = find_group(self._optimizer, parameter.tensor)
            if group is None:
                self._on_note(_UNTRAINED.format(name=parameter.name))
            group = group or {}
            owner = self._optimizer.owner(group)
            if group is not parameter.group or owner is not parameter.optimizer:
                rows.parameter = replace(parameter, group=group, optimizer=owner)

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
                self._on_note(_REPLACED.format(name=parameter.name), unproven=True)
                rows.parameter = replace(parameter, tensor=now)
                replaced = True
        return replaced

    def _present(self, rows: ParameterRows) -> torch.nn.Parameter | None:
        """Return the parameter that has the name now; None if the model has no such parameter."""
        owner, _, name = self._names.get(rows, rows.parameter.name).rpartition(".")
        try:
            return own_parameter(self._model.get_submodule(owner), name)
        except AttributeError:
            return None

    def _find_by_tensor(self, rows: ParameterRows) -> None:
        """Find the new name of a parameter, from which the model computes that of the old name."""
        name, tensor = rows.parameter.name, rows.parameter.tensor
        now = next((n for n, p in self._model.named_parameters() if p is tensor), None)
        if now is None:
            raise CannotFollow(f"the model has no parameter {name} any more; record a new run")
        self._names[rows] = now
        if (now := name_outside_compile(now)) != name:
            self._on_note(_COMPUTED.format(name=name, now=now))

    # Their weights -------------------------------------------------------------------------------

    def check_weights(self) -> None:
        """Note if W or the optimizer's state has changed since the last row."""
        self._after_update = []  # of a step that an exception has ended
        for rows in self._rows:
            parameter, name = rows.parameter.tensor, rows.parameter.name
            is_other = version(parameter) != self._versions.get(parameter)
            if not rows.is_W_unchanged():
                self._on_note(_OUTSIDE.format(name=name, did="changed"), unproven=True)
            elif is_other and parameter.device.type != "cpu":  # a read would wait for it
                self._on_note(_OUTSIDE.format(name=name, did="wrote to"), unproven=True)
            if not rows.is_state_unchanged():
                self._on_note(_STATE.format(name=name), unproven=True)

    def check_inner_begin(self, wrapper: str) -> None:
        """Note weights that a wrapper changes before the update."""
        for rows in self._rows:
            if not rows.is_W_unchanged():
                self._note_beside(wrapper, rows)

    def copy_updated(self) -> None:
        """Copy the weights after the update, before a wrapper or a hook can change them."""
        self._after_update = [rows.own_W().clone() for rows in self._rows]

    def check_returned(self, wrapper: str | None) -> None:
        """Note weights that a wrapper or a hook has changed after the update."""
        for copy, rows in zip(self._after_update, self._rows, strict=False):
            if not same_bits(copy, rows.own_W()):
                self._note_beside(wrapper or "a hook after the step", rows)
        self._after_update = []

    def _note_beside(self, wrapper: str, rows: ParameterRows) -> None:
        sentence = _BESIDE.format(wrapper=wrapper, name=rows.parameter.name)
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
