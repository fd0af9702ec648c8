"""Calls of an optimizer's step that change no parameter, which are no steps.

An optimizer that somebody wrote may only collect gradients in a call. It counts its changes of
parameters, unless it writes to `Tensor.data`; then the values of a few parameters tell.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import torch
from torch.optim import Optimizer

from trajstore.trainers.recording.device_to_host import bit_sums
from trajstore.trainers.recording.hooks import StepCalls
from trajstore.trainers.recording.parameter_rows import ParameterRows
from trajstore.trainers.recording.parameters import JoinedOptimizer
from trajstore.trainers.recording.torch_internals import counts_versions, versions

_WITNESSES = 1 << 16  # elements that are read to see a step


class EmptySteps:
    """Compares the parameters of an optimizer before and after a call of its step.

    Parameters
    ----------
    optimizer : JoinedOptimizer
        With several members, each call is a step.
    rows : sequence of ParameterRows
    """

    def __init__(self, optimizer: JoinedOptimizer, rows: Sequence[ParameterRows]) -> None:
        self._optimizer = optimizer
        self._rows = tuple(rows)
        self._has_gradients = True
        self._versions: list[int] = []
        self._witnesses: dict[Optimizer, list[torch.Tensor]] = {}  # parameters that a step changes
        self._before: list[torch.Tensor] = []  # parameters whose sums were taken
        self._sums: list[tuple[int, int]] = []
        self._states: list[dict[str, tuple[int, int]]] = []  # what it kept of the matrices

    def begin(self, optimizer: Optimizer, calls: StepCalls) -> None:
        """Look at the parameters before a call."""
        self._has_gradients = any(
            parameter.grad is not None
            for group in optimizer.param_groups
            for parameter in group["params"]
        )
        if self._may_be_empty(calls):
            trained = self._optimizer.parameters(optimizer)
            self._versions = versions(trained)
            # A step that writes to `Tensor.data` counts nothing. At first all are read.
            self._before = self._witnesses.get(optimizer, trained)
            self._sums = bit_sums(self._before)
            self._states = [rows.marks_of_state() for rows in self._rows]

    def is_empty(self, optimizer: Optimizer, calls: StepCalls, *, has_closure: bool) -> bool:
        """Return True if the call since `begin` has changed no parameter."""
        if len(self._optimizer.members) > 1:
            return False
        counts = counts_versions() and self._may_be_empty(calls)
        if has_counted := counts and self._versions != versions(
            self._optimizer.parameters(optimizer)
        ):
            self._witnesses[optimizer] = []
        if calls.has_reached:
            return not (self._has_gradients or has_closure)
        if has_counted or not counts:
            return False
        before, self._before = self._before, []
        sums = zip(before, self._sums, bit_sums(before), strict=True)
        changed = {parameter for parameter, old, new in sums if old != new}
        if before:
            self._choose_witnesses(optimizer, changed)
        return not changed and self._states == [rows.marks_of_state() for rows in self._rows]

    def _may_be_empty(self, calls: StepCalls) -> bool:
        return not calls.is_plain and len(self._optimizer.members) == 1

    def _choose_witnesses(self, optimizer: Optimizer, changed: set[torch.Tensor]) -> None:
        """Read only the recorded and some small parameters in the next step; all after none."""
        self._witnesses.pop(optimizer, None)
        if changed:
            recorded = {rows.parameter.tensor for rows in self._rows}
            small = sorted(changed - recorded, key=torch.Tensor.numel)
            sizes = itertools.accumulate(one.numel() for one in small)
            few = [one for one, size in zip(small, sizes, strict=True) if size <= _WITNESSES]
            own = recorded.intersection(self._optimizer.parameters(optimizer))
            self._witnesses[optimizer] = [*own, *(few or small[:1])]
