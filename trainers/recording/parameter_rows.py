"""The run of one parameter while it grows: from the tensors of a step to a whole row.

Every step the hooks `set` each variable, in whatever order they see them, and then `end_row`. Until
the first row is whole the values lie on the host, because only it shows all types; then the run is
made, and from there each value is copied straight into its place by a `Transfer`.
"""

from __future__ import annotations

import contextlib
import errno
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path

import torch

from trajstore.byte_sizes import format_bytes
from trajstore.errors import RecordingError
from trajstore.schema import OF_EXAMPLES, VARIABLES, room_for_examples
from trajstore.trainers.recording.compared_run import RowTarget
from trajstore.trainers.recording.device_norms import ULP_TYPES, token_norm, ulp_l1
from trajstore.trainers.recording.device_to_host import Transfer, open_transfer
from trajstore.trainers.recording.planned_run import PlannedRun
from trajstore.trainers.recording.resumed_run import ExistingRun
from trajstore.trainers.recording.sharding import has_rows_of, own_rows
from trajstore.trainers.recording.step_examples import EXAMPLE_INDEX, padded

__all__ = ["MOMENTS", "ParameterRows"]

MOMENTS = ("exp_avg", "exp_avg_sq")

Row = dict[str, torch.Tensor]


class ParameterRows:
    """Rows of one parameter, one every `every` optimizer steps.

    Parameters
    ----------
    planned : PlannedRun
        Of the variables that only a tier names, what the first step does not show (moments of SGD,
        logits of a model without an unembedding) is left out.
    existing : ExistingRun, optional
        Run that is to go on, in place of a new one; nothing of it changes before `resume`.

    Attributes
    ----------
    parameter : RecordedParameter
    variables : tuple of str
        What is recorded, by this process where several share the parameter.
    watched : tuple of str
        What is recorded by all of them.
    writer : RunWriter or ComparedRun or None
        None until the run is made.
    rows : int
        Rows handed over for storing.
    last_step : int
        Step of the last of them.
    left_out : tuple of str
        Variables of a tier that the first step did not show; none until the run is made.

    Raises
    ------
    RecordingError
        If a variable cannot be made of the parameter's type.
    NothingToResume
        If the run that is to go on has other weights.
    """

    def __init__(self, planned: PlannedRun, existing: ExistingRun | None = None) -> None:
        self.parameter = planned.parameter
        self.watched = planned.options.variables
        self.variables = _held(planned, self.watched)
        self.writer: RowTarget | None = None
        self.left_out: tuple[str, ...] = ()
        self.rows = 0
        self.last_step = planned.loop.first_step
        W = self._own_W()
        if "W_ulp_l1" in self.variables and W.dtype not in ULP_TYPES:
            raise RecordingError(
                f"W_ulp_l1 of {self.parameter.name}: got {W.dtype}, expected one of "
                f"{', '.join(map(str, ULP_TYPES))}; leave it out of what is recorded"
            )
        self._planned = planned
        self._every = planned.options.every
        self._ids = None if planned.ids is None else torch.from_numpy(planned.ids).to(W.device)
        self._initial_W = self._select(W).to("cpu", copy=True)
        self._initial: Row = {} if planned.model is None else planned.model.initial()
        if existing is None:
            self._initial |= self._initial_moments(planned)
        self._last_W: torch.Tensor | None = None  # of the last row, on the device
        if "W_step_norm" in self.variables or "W_ulp_l1" in self.variables:
            self._last_W = self._select(W).clone()
        self._room: dict[str, int] = {}  # of the dimensions example and position
        if planned.loop.examples is not None:
            self._room["example"] = planned.loop.examples
        self._row: Row = {}  # of the step in progress
        self._held: list[tuple[int, Row]] = []  # rows of the steps before there is a run
        self._transfer: Transfer | None = None
        self._whole_step: int | None = None  # whose row is in the transfer, and not handed over
        self._existing = existing
        if existing is not None:
            existing.check(self._initial_W)
            self.watched = existing.variables
            self.variables = _held(planned, self.watched)

    def _initial_moments(self, planned: PlannedRun) -> Row:
        """Moments of an optimizer that has taken steps already; NaN where it does not show them."""
        state = planned.optimizer.state.get(self.parameter.tensor, {})
        names = [name for name in MOMENTS if state and name in self.variables]
        return {
            name: self.recorded_tokens(state[name]).to("cpu", copy=True)
            if name in state
            else torch.full_like(self._initial_W, float("nan"))
            for name in names
        }

    def resume(self) -> None:
        """Take up the run that is to go on, after its last row; a new one is made later.

        Raises
        ------
        RunLocked
            If another process writes to it.
        """
        existing = self._existing
        if existing is None:
            return
        if self._last_W is not None and "W" in existing.variables:
            self._last_W.copy_(existing.last_weights)
        self.writer = existing.open()
        self._existing = None
        with self._full_disk():
            self._transfer = open_transfer(self.writer, self.parameter.tensor.device)
        arrays = self.writer.layout.arrays
        for name in set(OF_EXAMPLES) & arrays.keys():
            self._room |= dict(zip(VARIABLES[name].dims[1:], arrays[name].row, strict=True))
        self.rows, self.last_step = existing.rows, existing.last_step
        self._initial_W = self._initial_W.new_empty(0)
        self._initial.clear()

    def recorded_tokens(self, tensor: torch.Tensor) -> torch.Tensor:
        """Rows of the recorded tokens, of a tensor whose first dimension is the vocabulary.

        Where it is sharded over processes, of those that this one holds.
        """
        return self._select(own_rows(tensor.detach()))

    def set(self, name: str, value: torch.Tensor) -> None:
        """Copy a variable of the step in progress to where it will be stored.

        Set again in the same step, it takes the place of the value before.

        Parameters
        ----------
        name : str
            Ignored if it is not recorded.
        value : tensor
            Of the whole vocabulary, where the variable has a token dimension, or of the tokens that
            this process holds of it; of as many examples and positions as the first row has room
            for, or fewer.

        Raises
        ------
        RecordingError
            If it has another type or shape than in the first row, or more examples or positions,
            or the disk is full.
        """
        if name not in self.variables:
            return
        value = own_rows(value.detach())
        if name in OF_EXAMPLES:
            value = self._fitted(name, value)
        ids = self._ids if VARIABLES[name].dims[1:2] == ("token",) else None
        if self._transfer is None:
            chosen = value if ids is None else value.index_select(0, ids)
            self._row[name] = chosen.to("cpu", copy=True)
            return
        self._check_kind(name, value, ids)
        self._copy_to_block(name, value, ids)

    def set_cells(self) -> None:
        """Set W rounded to bfloat16."""
        if "cells" in self.variables:
            self.set("cells", self._own_W().to(torch.bfloat16))

    def set_change_norms(self) -> None:
        """Set how far each token's W moved since the last row."""
        if self._last_W is not None:
            now = self.recorded_tokens(self.parameter.tensor)
            self._set_selected("W_step_norm", token_norm(now, self._last_W))
            self._set_selected("W_ulp_l1", ulp_l1(now, self._last_W))

    def set_gradient_norms(self, gradient: torch.Tensor) -> None:
        """Set the length of each token's gradient."""
        if "grad_token_norm" in self.variables:
            self._set_selected("grad_token_norm", token_norm(self.recorded_tokens(gradient)))

    def copy_of(self, name: str) -> torch.Tensor | None:
        """What was set in the step in progress, of the recorded tokens; None if it was not."""
        return self._row.get(name)

    def end_row(self, step: int, *, skipped: bool) -> None:
        """Complete the row of `step`, and store it if it is due.

        Raises
        ------
        RecordingError
            If a variable was not seen, or the disk is full.
        """
        due = step % self._every == 0
        if self._transfer is None:
            self._held.append((step, self._row))
            if not skipped:  # then there may be no moments yet, so no types
                self._create_run()
            self._row = {}
            self._whole_step = None if due else step
            return
        if skipped:
            self._set_missing_moments()
        self._check_whole(step, self._row)
        self._row = {}
        self._whole_step = step
        if due:
            self._hand_over(step)

    def close(self, *, complete: bool) -> None:
        """Commit the last step if it is whole, and close the run."""
        try:
            if self.writer is not None:
                self._close_run(self.writer, complete=complete)
        finally:
            if self._planned.share is not None:
                self._planned.share.close()

    def _close_run(self, writer: RowTarget, *, complete: bool) -> None:
        with self._full_disk():
            try:
                if self._whole_step is not None:
                    self._hand_over(self._whole_step)
                if self._transfer is not None:  # or it could not be opened
                    self._transfer.close()
            finally:
                writer.close("complete" if complete else "interrupted")

    def _set_missing_moments(self) -> None:
        """Set what the optimizer has not made yet, because every step until now was skipped."""
        assert self.writer is not None
        for name in MOMENTS:
            if name in self.variables and name not in self._row:
                dtype = getattr(torch, self.writer.layout.arrays[name].native.name)
                self.set(name, torch.zeros_like(self._own_W(), dtype=dtype))

    def _own_W(self) -> torch.Tensor:
        """The parameter, or the tokens of it that this process holds."""
        return own_rows(self.parameter.tensor.detach())

    def _select(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor if self._ids is None else tensor.index_select(0, self._ids)

    def _set_selected(self, name: str, value: torch.Tensor) -> None:
        if name not in self.variables:
            return
        if self._transfer is None:
            self._row[name] = value.to("cpu", copy=True)
        else:
            self._copy_to_block(name, value, None)

    def _copy_to_block(self, name: str, value: torch.Tensor, ids: torch.Tensor | None) -> None:
        assert self._transfer is not None
        with self._full_disk():
            self._row[name] = self._transfer.put(name, value, ids)
        # The row of the step before, if it was not handed over, is being written over.
        self._whole_step = None

    def _fitted(self, name: str, value: torch.Tensor) -> torch.Tensor:
        """The value with NaN where a row has room for more examples or positions than it has."""
        dims = VARIABLES[name].dims[1:]
        for dim, length in zip(dims, value.shape, strict=True):
            room = length if dim == "hidden" else self._room.setdefault(dim, length)
            if length > room:
                raise RecordingError(
                    f"{name}: this step has {length} {dim}s, and the rows of {self._planned.path} "
                    f"have room for {room}, as the first step had; begin with the largest batch"
                )
        return padded(value, [self._room.get(dim, value.shape[-1]) for dim in dims])

    def _check_kind(self, name: str, value: torch.Tensor, ids: torch.Tensor | None) -> None:
        assert self.writer is not None
        array = self.writer.layout.arrays[name]
        shape = value.shape if ids is None else (len(ids), *value.shape[1:])
        dtype = _native(value)
        if dtype != array.native.name or tuple(shape) != array.row:
            raise RecordingError(
                f"{name} is now {dtype} of shape {tuple(shape)}, and was {array.native.name} of "
                f"shape {array.row} in the first row; a run cannot change that"
            )

    def _check_whole(self, step: int, row: Mapping[str, torch.Tensor]) -> None:
        unseen = [name for name in self.variables if name not in row]
        if unseen:
            raise RecordingError(
                f"step {step} did not show {', '.join(unseen)}, so its row is not whole; "
                f"{_remedy(unseen)}"
            )

    def _create_run(self) -> None:
        """Make the run of what the step in progress has shown, with all rows until now."""
        last_step, last = self._held[-1]
        required = self._planned.options.required
        asked = self.variables
        self.variables = tuple(name for name in asked if name in last or name in required)
        self.left_out = tuple(name for name in asked if name not in self.variables)
        for step, row in self._held:
            for name in MOMENTS:
                if name in last and name not in row:  # skipped before there was any state
                    row[name] = torch.zeros_like(last[name])
            self._check_whole(step, row)
        types = {name: _native(last[name]) for name in self.variables}
        room = room_for_examples({name: tuple(last[name].shape) for name in types})
        self.writer = writer = self._planned.create(types, room)
        rows = [(self.last_step, self._initial_row(last))]
        rows += [
            (step, {name: row[name] for name in self.variables})
            for step, row in self._held
            if step % self._every == 0
        ]
        with self._full_disk():
            for step, row in rows:
                writer.append(step, **row)
            self._transfer = open_transfer(writer, self.parameter.tensor.device)
        self.rows, self.last_step = len(rows), rows[-1][0]
        if last_step % self._every:
            for name in self.variables:
                self._transfer.put(name, last[name])
        else:
            self._remember_W()
        self._held.clear()
        self._initial_W = self._initial_W.new_empty(0)
        self._initial.clear()

    def _initial_row(self, like: Row) -> Row:
        """Row of the state before the first step, with the types of another row."""
        start = {"zero": 0.0, "nan": float("nan")}
        return {
            name: self._initial.get(name, self._initial_W).to("cpu", like[name].dtype)
            if VARIABLES[name].row0 == "initial" or name in self._initial
            else torch.full_like(like[name], start[VARIABLES[name].row0])
            for name in self.variables
        }

    def _hand_over(self, step: int) -> None:
        """Have the row in the transfer stored as that of `step`."""
        assert self._transfer is not None
        with self._full_disk():
            self._transfer.commit(step)
        self.rows += 1
        self.last_step = step
        self._whole_step = None
        self._remember_W()

    def _remember_W(self) -> None:
        if self._last_W is not None:
            self._last_W.copy_(self.recorded_tokens(self.parameter.tensor))

    @contextlib.contextmanager
    def _full_disk(self) -> Iterator[None]:
        """Have an error say what to do where the disk is full."""
        assert self.writer is not None
        try:
            yield
        except Exception as error:
            cause: BaseException | None = error
            while cause is not None and not isinstance(cause, OSError):
                cause = cause.__cause__
            writer = self.writer
            full = cause is not None and cause.errno in (errno.ENOSPC, errno.EDQUOT)
            if not full or not isinstance(writer.path, Path):
                raise
            block = writer.bytes_recorded * writer.layout.block_rows // max(writer.rows, 1)
            free = shutil.disk_usage(writer.path.parent).free
            raise RecordingError(
                f"no space is left for {writer.path}: {format_bytes(free)} are free, and a block "
                f"of {writer.layout.block_rows} rows takes up to {format_bytes(block)}; its first "
                f"{writer.committed_rows} rows are whole; free some space, or record less"
            ) from error


def _held(planned: PlannedRun, variables: tuple[str, ...]) -> tuple[str, ...]:
    """Those of the variables of which this process records anything."""
    return tuple(name for name in variables if has_rows_of(planned.share, name))


def _native(tensor: torch.Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def _remedy(unseen: list[str]) -> str:
    if "loss" in unseen:
        return "the model returns no loss, so tell it in every step with observe(loss=…)"
    if "logits" in unseen:
        return "tell them in every step with observe(logits=…)"
    if "grad" in unseen or "grad_token_norm" in unseen:
        return "the parameter got no gradient"
    if "batch" in unseen:
        return (
            "tell the indices of its examples in every step with observe(batch=…), or give the "
            f"model's inputs a tensor {EXAMPLE_INDEX}, which the model then does not get"
        )
    if "example_loss" in unseen:
        return (
            "the model is no causal language model of transformers that was given labels, so tell "
            "each example's in every step with observe(example_loss=…)"
        )
    return "leave it out of what is recorded"
