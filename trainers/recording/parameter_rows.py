"""The growing run of one parameter, from the tensors of a step to a complete row.

In every step the hooks call `set` for each variable, in any order, and then `end_row`. The values
stay in host memory until the first row is complete, because only it has all types. Then the run is
created. From there on a `Transfer` copies each value directly to its place.
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
from trajstore.schema import OF_EXAMPLES, VARIABLES, row_lengths
from trajstore.trainers.recording.compared_run import RowTarget
from trajstore.trainers.recording.device_norms import ULP_TYPES, token_norm, ulp_l1
from trajstore.trainers.recording.device_to_host import DirectTransfer, Transfer, open_transfer
from trajstore.trainers.recording.hidden_states import OF_HIDDEN_STATES
from trajstore.trainers.recording.model_state import OPTIMIZER_STATE
from trajstore.trainers.recording.planned_run import PlannedRun
from trajstore.trainers.recording.resumed_run import ExistingRun
from trajstore.trainers.recording.sharding import has_rows_of, own_rows
from trajstore.trainers.recording.step_examples import EXAMPLE_INDEX, padded
from trajstore.values.optimizer_rule import MOMENTS

__all__ = ["ParameterRows"]


Row = dict[str, torch.Tensor]


class ParameterRows:
    """Rows of one parameter, one every `every` optimizer steps.

    Parameters
    ----------
    planned : PlannedRun
        Some variables of a tier may be missing in the first step (moments of SGD, logits of a model
        without an unembedding); they are left out.
    existing : ExistingRun, optional
        Run to resume, in place of a new one; it does not change before `resume`.

    Attributes
    ----------
    parameter : RecordedParameter
    variables : tuple of str
        Variables that this process records.
    watched : tuple of str
        Variables that all processes record together.
    writer : RunWriter or ComparedRun or None
        None until the run is created.
    rows : int
        Rows passed to the writer.
    last_step : int
        Step of the last row.
    left_out : tuple of str
        Variables of a tier that the first step lacks; empty until the run is created.

    Raises
    ------
    RecordingError
        If a variable cannot be computed in the parameter's type.
    NothingToResume
        If the run to resume has other weights.
    """

    def __init__(self, planned: PlannedRun, existing: ExistingRun | None = None) -> None:
        self.parameter = planned.parameter
        self.watched = planned.options.variables
        self.variables = _own_variables(planned, self.watched)
        self.writer: RowTarget | None = None
        self.left_out: tuple[str, ...] = ()
        self.rows = 0
        self.last_step = planned.loop.first_step
        W = self._own_W()
        if "W_ulp_l1" in self.variables and W.dtype not in ULP_TYPES:
            raise RecordingError(
                f"W_ulp_l1 of {self.parameter.name}: got {W.dtype}, expected one of "
                f"{', '.join(map(str, ULP_TYPES))}; leave W_ulp_l1 out of record"
            )
        self._planned = planned
        self._every = planned.options.every
        self._ids = None if planned.ids is None else torch.from_numpy(planned.ids).to(W.device)
        self._initial_W = self._select(W).to("cpu", copy=True)
        self._initial: Row = {} if planned.model is None else planned.model.initial()
        if existing is None:
            self._initial |= self._initial_moments(planned)
        self._last_W: torch.Tensor | None = None  # W in the last row, on the device
        if "W_step_norm" in self.variables or "W_ulp_l1" in self.variables:
            self._last_W = self._select(W).clone()
        self._room: dict[str, int] = {}  # lengths of the dimensions example and position
        if planned.loop.examples is not None:
            self._room["example"] = planned.loop.examples
        self._row: Row = {}  # row of the current step
        self._early_rows: list[tuple[int, Row]] = []  # rows before the run is created
        self._transfer: Transfer | None = None
        self._whole_step: int | None = None  # step of the complete row that is only in the transfer
        self._existing = existing
        if existing is not None:
            existing.check(self._initial_W)
            self.watched = existing.variables
            self.variables = _own_variables(planned, self.watched)

    def _initial_moments(self, planned: PlannedRun) -> Row:
        """Return the moments of an optimizer that has taken steps; NaN for a missing moment."""
        state = planned.optimizer.state.get(self.parameter.tensor, {})
        names = [name for name in MOMENTS if state and name in self.variables]
        return {
            name: self.recorded_tokens(state[name]).to("cpu", copy=True)
            if name in state
            else torch.full_like(self._initial_W, float("nan"))
            for name in names
        }

    def resume(self) -> None:
        """Open the run to resume after its last row; a new run is created later.

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
        with self._disk_errors():
            self._transfer = open_transfer(self.writer, self.parameter.tensor.device)
        arrays = self.writer.layout.arrays
        for name in set(OF_EXAMPLES) & arrays.keys():
            self._room |= dict(zip(VARIABLES[name].dims[1:], arrays[name].row, strict=True))
        self.rows, self.last_step = existing.rows, existing.last_step
        self._initial_W = self._initial_W.new_empty(0)
        self._initial.clear()

    def recorded_tokens(self, tensor: torch.Tensor) -> torch.Tensor:
        """Select the recorded tokens of a tensor whose first dimension is the vocabulary.

        If the tensor is sharded over processes, the result has the tokens of this process.
        """
        return self._select(own_rows(tensor.detach()))

    def set(self, name: str, value: torch.Tensor) -> None:
        """Copy a variable of the current step to the place where it is stored.

        A second value in the same step replaces the first.

        Parameters
        ----------
        name : str
            Ignored if the variable is not recorded.
        value : tensor
            A variable with a token dimension has the whole vocabulary, or the tokens of this
            process. The number of examples and positions is at most that of the first row.

        Raises
        ------
        RecordingError
            If the type or shape differs from the first row, if there are more examples or
            positions, or if the disk is full.
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

    def place(self, name: str, length: int, dtype: torch.dtype) -> torch.Tensor:
        """Return the memory of a vector of the current step, which the caller fills at once.

        Raises
        ------
        RecordingError
            If the type or length differs from the first row, or if the disk is full.
        """
        if self._transfer is None:
            self._row[name] = torch.empty(length, dtype=dtype)
            return self._row[name]
        self._check_array(name, dtype, (length,))
        with self._disk_errors():
            self._row[name] = self._transfer.place(name)
        self._whole_step = None  # as in `_copy_to_block`
        return self._row[name]

    def set_cells(self) -> None:
        """Set W rounded to bfloat16."""
        if "cells" in self.variables:
            self.set("cells", self._own_W().to(torch.bfloat16))

    def set_change_norms(self) -> None:
        """Set the change of each token's W since the last row."""
        if self._last_W is not None:
            now = self.recorded_tokens(self.parameter.tensor)
            self._set_selected("W_step_norm", token_norm(now, self._last_W))
            self._set_selected("W_ulp_l1", ulp_l1(now, self._last_W))

    def set_gradient_norms(self, gradient: torch.Tensor) -> None:
        """Set the norm of each token's gradient."""
        if "grad_token_norm" in self.variables:
            self._set_selected("grad_token_norm", token_norm(self.recorded_tokens(gradient)))

    def copy_of(self, name: str) -> torch.Tensor | None:
        """Return the value of the current step for the recorded tokens; None if it was not set."""
        return self._row.get(name)

    def end_row(self, step: int, *, skipped: bool) -> None:
        """Complete the row of `step`, and store it if `every` selects it.

        Raises
        ------
        RecordingError
            If a variable is missing, or the disk is full.
        """
        due = step % self._every == 0
        if self._transfer is None:
            self._early_rows.append((step, self._row))
            if not skipped:  # a skipped step may have no moments, so no types
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
            self._store_row(step)

    def close(self, *, complete: bool) -> None:
        """Commit the last step if it is complete, and close the run."""
        try:
            if self.writer is not None:
                self._close_run(self.writer, complete=complete)
        finally:
            if self._planned.share is not None:
                self._planned.share.close()

    def _close_run(self, writer: RowTarget, *, complete: bool) -> None:
        with self._disk_errors():
            try:
                try:
                    if self._whole_step is not None:
                        self._store_row(self._whole_step)
                finally:
                    if self._transfer is not None:  # None if it could not be opened
                        self._transfer.close()
            finally:
                writer.close("complete" if complete else "interrupted")

    def _set_missing_moments(self) -> None:
        """Set moments that do not exist yet, because every step so far was skipped."""
        assert self.writer is not None
        for name in MOMENTS:
            if name in self.variables and name not in self._row:
                dtype = getattr(torch, self.writer.layout.arrays[name].native.name)
                self.set(name, torch.zeros_like(self._own_W(), dtype=dtype))

    def _own_W(self) -> torch.Tensor:
        """Return the parameter, or this process's tokens of it."""
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
        with self._disk_errors():
            self._row[name] = self._transfer.put(name, value, ids)
        # This overwrites the row of the previous step, if it was not stored.
        self._whole_step = None

    def _fitted(self, name: str, value: torch.Tensor) -> torch.Tensor:
        """Return a value padded with NaN to the row's number of examples and positions."""
        dims = VARIABLES[name].dims[1:]
        for dim, length in zip(dims, value.shape, strict=True):
            room = length if dim == "hidden" else self._room.setdefault(dim, length)
            if length > room:
                raise RecordingError(
                    f"{name}: this step has {length} {dim}s, but the rows of {self._planned.path} "
                    f"have room for {room}, as in the first step; start with the largest batch"
                )
        return padded(value, [self._room.get(dim, value.shape[-1]) for dim in dims])

    def _check_kind(self, name: str, value: torch.Tensor, ids: torch.Tensor | None) -> None:
        shape = value.shape if ids is None else (len(ids), *value.shape[1:])
        self._check_array(name, value.dtype, tuple(shape))

    def _check_array(self, name: str, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
        assert self.writer is not None
        array = self.writer.layout.arrays[name]
        if _name(dtype) != array.native.name or shape != array.row:
            raise RecordingError(
                f"{name} is now {_name(dtype)} of shape {shape}, but was {array.native.name} of "
                f"shape {array.row} in the first row; record a new run for the new shape or type"
            )

    def _check_whole(self, step: int, row: Mapping[str, torch.Tensor]) -> None:
        unseen = [name for name in self.variables if name not in row]
        if unseen:
            raise RecordingError(
                f"step {step} has no {', '.join(unseen)}, so its row is incomplete; "
                f"{_remedy(unseen)}"
            )

    def _create_run(self) -> None:
        """Create the run with the variables of the current step, and write all rows so far."""
        last_step, last = self._early_rows[-1]
        required = self._planned.options.required
        requested = self.variables
        self.variables = tuple(name for name in requested if name in last or name in required)
        self.left_out = tuple(name for name in requested if name not in self.variables)
        for step, row in self._early_rows:
            for name in (*MOMENTS, *OPTIMIZER_STATE):
                if name in last and name not in row:  # skipped before the optimizer had a state
                    row[name] = torch.zeros_like(last[name])
            self._check_whole(step, row)
        types = {name: _native(last[name]) for name in self.variables}
        room = row_lengths({name: tuple(last[name].shape) for name in types})
        if self._planned.state is not None:
            self._initial |= self._planned.state.initial()
        self.writer = writer = self._planned.create(types, room)
        rows = [(self.last_step, self._initial_row(last))]
        rows += [(step, row) for step, row in self._early_rows if step % self._every == 0]
        self._early_rows.clear()
        self._initial_W = self._initial_W.new_empty(0)
        self._initial.clear()
        with self._disk_errors():
            for step, row in rows:
                self._move_to_block(step, row)
            self._transfer = open_transfer(writer, self.parameter.tensor.device)
        self.rows, self.last_step = len(rows), rows[-1][0]
        if last_step % self._every:
            for name in self.variables:
                self._transfer.put(name, last[name])
        else:
            self._remember_W()

    def _move_to_block(self, step: int, row: Row) -> None:
        """Write a row, and release each value after its copy: rows can be as large as the model."""
        assert self.writer is not None
        transfer = DirectTransfer(self.writer)
        for name in self.variables:
            value = row.pop(name)
            self._check_kind(name, value, None)
            transfer.put(name, value)
        transfer.commit(step)

    def _initial_row(self, like: Row) -> Row:
        """Return the row before the first step, with the types of another row."""
        start = {"zero": 0.0, "nan": float("nan")}
        return {
            name: self._initial.get(name, self._initial_W).to("cpu", like[name].dtype)
            if VARIABLES[name].row0 == "initial" or name in self._initial
            # One number, of the shape of the row: it takes no memory.
            else like[name].new_full((), start[VARIABLES[name].row0]).expand_as(like[name])
            for name in self.variables
        }

    def _store_row(self, step: int) -> None:
        """Store the row in the transfer as the row of `step`."""
        assert self._transfer is not None
        with self._disk_errors():
            self._transfer.commit(step)
        self.rows += 1
        self.last_step = step
        self._whole_step = None
        self._remember_W()

    def _remember_W(self) -> None:
        if self._last_W is not None:
            self._last_W.copy_(self.recorded_tokens(self.parameter.tensor))

    @contextlib.contextmanager
    def _disk_errors(self) -> Iterator[None]:
        """Add the sizes and a fix to the error of a full disk."""
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
                f"no space is left for {writer.path}: {format_bytes(free)} are free, but a block "
                f"of {writer.layout.block_rows} rows takes up to {format_bytes(block)}; its first "
                f"{writer.committed_rows} rows are committed; free space, or record less"
            ) from error


def _own_variables(planned: PlannedRun, variables: tuple[str, ...]) -> tuple[str, ...]:
    """Return the variables that this process records."""
    return tuple(name for name in variables if has_rows_of(planned.share, name))


def _native(tensor: torch.Tensor) -> str:
    return _name(tensor.dtype)


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _remedy(unseen: list[str]) -> str:
    found = [remedy for names, remedy in _REMEDIES if not names.isdisjoint(unseen)]
    return "; ".join(found) or "leave it out of record"


_REMEDIES = (
    ({"loss"}, "the model returns no loss; pass it in every step with observe(loss=…)"),
    ({"logits"}, "pass the logits in every step with observe(logits=…)"),
    (
        {*OF_HIDDEN_STATES},
        "no module has the matrix as its weight and gets the hidden states; pass them in every "
        "step with observe(hidden=…), or name the module that returns them with hidden_from=…",
    ),
    (
        {"grad", "grad_token_norm"},
        "the parameter has no gradient; use it in the forward pass of every step",
    ),
    ({"random_state"}, "call the model itself in every step, so that its hooks run"),
    (
        {"batch"},
        "pass the indices of the examples in every step with observe(batch=…), or add a tensor "
        f"{EXAMPLE_INDEX} to the model's inputs, which the model does not get",
    ),
    (
        {"example_loss"},
        "the model is not a causal language model of transformers with labels; pass the losses in "
        "every step with observe(example_loss=…)",
    ),
)
