"""The growing run of one parameter, from the tensors of a step to a complete row.

In every step the hooks call `set` for each variable, in any order, and then `end_row`. The values
stay in host memory until the first row is complete, because only it has all types. Then the run is
created. From there on a `Transfer` copies each value directly to its place.
"""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from trajstore.byte_sizes import format_bytes
from trajstore.errors import RecordingError
from trajstore.schema import OF_EXAMPLES, VARIABLES, row_lengths, variables_of
from trajstore.store.writing.writer import RunWriter
from trajstore.trainers.recording.compared_run import RowTarget
from trajstore.trainers.recording.device_norms import ULP_TYPES, token_norm, ulp_l1
from trajstore.trainers.recording.device_to_host import (
    DirectTransfer,
    HostTransfer,
    Transfer,
    memory_in_transit,
    open_transfer,
)
from trajstore.trainers.recording.flat_vectors import JoinedVector, same_bits, type_name
from trajstore.trainers.recording.hidden_states import OF_HIDDEN_STATES
from trajstore.trainers.recording.kept_state import Entry, find_kept, is_element, state_attribute
from trajstore.trainers.recording.model_state import OF_ADAM
from trajstore.trainers.recording.parameters import (
    as_dense,
    as_float64,
    last_layers,
    makes_logits,
)
from trajstore.trainers.recording.planned_run import PlannedRun
from trajstore.trainers.recording.resumed_run import ExistingRun
from trajstore.trainers.recording.run_notes import FULL, CannotFollow, file_error
from trajstore.trainers.recording.sharding import own_rows, own_variables
from trajstore.trainers.recording.step_examples import EXAMPLE_INDEX, padded
from trajstore.trainers.recording.torch_internals import version
from trajstore.values.native_types import NATIVE_TYPES
from trajstore.values.optimizer_rule import MOMENTS

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
    hyperparameters : tuple of str
        Names of the numbers of the optimizer's group that the rows hold.
    recorded_optimizer : mapping
        Class and hyperparameters of the optimizer of a resumed run; empty for a new run.
    writer : RunWriter or ComparedRun or None
        None until the run is created.
    rows : int
        Rows passed to the writer.
    last_step : int
        Step of the last row.

    Raises
    ------
    RecordingError
        If a variable cannot be computed in the parameter's type.
    NothingToResume
        If the run to resume has other weights.
    """

    def __init__(self, planned: PlannedRun, existing: ExistingRun | None = None) -> None:
        self.parameter = planned.parameter
        self.watched = planned.recording.options.resolved
        self.variables = own_variables(planned.share, self.watched)
        self.writer: RowTarget | None = None
        self.rows = 0
        self.last_step = planned.recording.loop.first_step
        W = self.own_W()
        if "W_ulp_l1" in self.variables and W.dtype not in ULP_TYPES:
            raise RecordingError(
                f"W_ulp_l1 of {self.parameter.name}: got {W.dtype}, expected one of "
                f"{', '.join(map(str, ULP_TYPES))}; leave W_ulp_l1 out of variables"
            )
        self._planned = planned
        self._notes = planned.recording.notes
        self._written_W: torch.Tensor | None = None  # W of the last complete step, where it lies
        self._every = planned.recording.options.every
        self._ids = None if planned.ids is None else torch.from_numpy(planned.ids).to(W.device)
        self.take_initial(with_moments=existing is None)
        self._last_W: torch.Tensor | None = None  # W in the last row, on the device
        if "W_step_norm" in self.variables or "W_ulp_l1" in self.variables:
            self._last_W = self._select(W).clone()
        examples = planned.recording.loop.examples
        # Lengths of the dimensions example and position.
        self._room: dict[str, int] = {} if examples is None else {"example": examples}
        self._row: Row = {}  # row of the current step
        self._early_rows: list[tuple[int, Row]] = []  # rows before the run is created
        self._other_state: set[str] = set()  # names of what no row holds
        self._transfer: Transfer = HostTransfer()
        self._whole_step: int | None = None  # step of the complete row that is only in the transfer
        self._existing = existing
        if existing is not None:
            existing.check(self._initial_W)
            self.watched = existing.variables
            self.variables = own_variables(planned.share, self.watched)
        names = planned.hyperparameters if existing is None else existing.hyperparameters
        self.hyperparameters = names if "hyperparameters" in self.watched else ()
        self.recorded_optimizer = {} if existing is None else existing.optimizer

    @property
    def has_begun(self) -> bool:
        """True if the run exists, and no other process would wait for the rows of this one."""
        share = self._planned.share
        return self.writer is not None and (share is None or share.count == 1)

    def take_initial(self, *, with_moments: bool = True) -> None:
        """Copy the state before the first step."""
        summaries = self._planned.recording.summaries
        self._initial_W = self._select(self.own_W()).to("cpu", copy=True)
        self._initial: Row = {} if summaries is None else summaries.initial()
        # Of the state at the end of the last step; None if the row before the first step has it.
        self._state_marks: dict[str, tuple[int, int]] | None = None
        if with_moments:
            self._initial |= self._initial_moments()
            kept = [] if self._count() or self.last_step else self._kept_elements()
            if not all(map(self._records_state, kept)):
                self._state_marks = {}  # row 0 is that of an optimizer without a state

    def _initial_moments(self) -> Row:
        """Return the moments of an optimizer that has taken steps; NaN for a missing moment."""
        found: Row = {}
        if self._planned.recording.optimizer.state.get(self.parameter.tensor):
            missing = torch.full_like(self._initial_W, float("nan"))
            found = {name: missing for name in MOMENTS if name in self.variables}
        for name, value in self._kept_elements().items():
            found[name] = self.recorded_tokens(value).to("cpu", copy=True)
        return found | {name: value.cpu() for name, value in self._count().items()}

    def _records_state(self, name: str) -> bool:
        return name in self.variables or self._planned.recording.options.whole_state

    def _kept_elements(self) -> dict[str, torch.Tensor]:
        """Return the tensors of the parameter's shape that the optimizer keeps, by their names."""
        own = self.parameter.tensor
        kept = self._planned.recording.optimizer.state.get(own, {})
        return {
            name: as_dense(value) for name, value in kept.items() if is_element(name, own, value)
        }

    def _count(self) -> Row:
        """Return the number of steps that the optimizer has counted with the parameter, if it does.

        It counts no step without a gradient, and begins again if the loop replaces its state.
        """
        state = self._planned.recording.optimizer.state.get(self.parameter.tensor, {})
        count: Any = state.get("step")
        if isinstance(count, int | float) or (isinstance(count, torch.Tensor) and not count.ndim):
            return {"step_count": as_float64(count)}
        return {}

    def is_state_unchanged(self) -> bool:
        """Return False if what the optimizer keeps has changed since the end of the last step."""
        return self._state_marks in (None, self.marks_of_state())

    def marks_of_state(self) -> dict[str, tuple[int, int]]:
        """Return tensor and version of what the optimizer keeps of the parameter."""
        kept = self._planned.recording.optimizer.state.get(self.parameter.tensor, {})
        return {
            name: (id(value), version(value))
            for name, value in kept.items()
            if isinstance(value, torch.Tensor)
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
        if isinstance(self.writer, RunWriter):
            self._planned.feed_log(self.writer, existing.last_step)
        last_step = existing.last_step
        self.writer.notes = self._notes.resumed(self.writer.notes, last_step)
        if missing := existing.missing_steps:
            self._notes.add_missing(self.parameter.name, missing)
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

    def set(self, name: str, value: torch.Tensor | JoinedVector) -> None:
        """Copy a variable of the current step to the place where it is stored.

        A second value in the same step replaces the first.

        Parameters
        ----------
        name : str
            Ignored if the variable is not recorded.
        value : tensor or JoinedVector
            A variable with a token dimension has the whole vocabulary, or the tokens of this
            process. The number of examples and positions is at most that of the first row.

        A value of another shape than in the first row, or of a type that the array cannot hold
        exactly, is noted and not recorded.

        Raises
        ------
        CannotFollow
            If it is W, or a vector of the model.
        RecordingError
            If the disk is full.
        """
        if name not in self.variables and not self._adopts(name):
            return
        if isinstance(value, torch.Tensor):
            value = own_rows(value.detach())
            if name in OF_EXAMPLES:
                if (problem := self._lack_of_room(name, value)) is not None:
                    self._notes.add(problem)
                    return
                value = self._padded(name, value)
        ids = self._ids if VARIABLES[name].dims[1:2] == ("token",) else None
        shape = tuple(value.shape if ids is None else (len(ids), *value.shape[1:]))
        if self.writer is None:
            problem = self._oddity(name, value.dtype, value.shape)
        else:
            problem = self._difference(name, value.dtype, shape)
            if problem and (name == "W" or isinstance(value, JoinedVector)):
                raise CannotFollow(f"{problem}; record a new run for the new shape or type")
            problem = problem and f"{problem}; it is not recorded in such a step"
        if problem is None:
            self._put(name, value, ids)
        else:
            self._notes.add(problem)

    def set_state(self) -> None:
        """Set what the optimizer keeps of the parameter: tensors of its shape, and its count."""
        for name, value in (self._kept_elements() | self._count()).items():
            self.set(name, value)
        self._state_marks = self.marks_of_state()

    def set_cells(self) -> None:
        """Set W rounded to bfloat16."""
        if "cells" in self.variables:
            self.set("cells", self.own_W().to(torch.bfloat16))

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

    def replace_gradient(self, selected: torch.Tensor) -> None:
        """Replace the gradient of the current step, (token, hidden) of the recorded tokens."""
        self._set_selected("grad", selected)
        if "grad_token_norm" in self.variables:
            self._set_selected("grad_token_norm", token_norm(selected))

    def forget(self, *names: str) -> None:
        """Take variables back that were set in the current step."""
        for name in names:
            self._row.pop(name, None)

    def copy_of(self, name: str) -> torch.Tensor | None:
        """Return the value of the current step for the recorded tokens; None if it was not set."""
        return self._row.get(name)

    def is_W_unchanged(self, *, waits: bool = False) -> bool:
        """Return False if W has other bits than at the end of the last step, or at the start.

        A device would have to be waited for. Without `waits`, True is returned for it.
        """
        before = self._initial_W if self._written_W is None else self._written_W
        if not before.numel() or (self.parameter.tensor.device.type != "cpu" and not waits):
            return True
        now = self.recorded_tokens(self.parameter.tensor).cpu()
        # Another type ends the recording with an error of its own.
        return now.dtype != before.dtype or same_bits(now, before.cpu())

    def end_row(self, step: int, *, had_effect: bool) -> None:
        """Complete the row of `step`, and store it if `every` selects it.

        The run is created at the first step that had an effect: before it there may be no moments,
        so no types.

        Raises
        ------
        RecordingError
            If the disk is full.
        """
        due = step % self._every == 0
        if self.writer is None:
            self._written_W = self._row.get("W")
            self._early_rows.append((step, self._row))
            if had_effect:
                self._create_run()
            self._row = {}
            self._whole_step = None if due else step
            return
        self._fill_missing()
        self._written_W = self._row.get("W")
        self._row = {}
        self._whole_step = step
        if due:
            self._store_row(step)

    def commit(self) -> None:
        """Commit all rows, and wait until they are stored."""
        if self.writer is not None:
            with self._disk_errors():
                self._transfer.flush()
                self.writer.commit()

    def close(self, *, complete: bool) -> None:
        """Commit the last step if it is complete, and close the run."""
        self._written_W = self._last_W = None
        self._row = {}
        with contextlib.ExitStack() as closing:  # closes each, also if another fails
            if self._planned.share is not None:
                closing.callback(self._planned.share.close)
            if self.writer is not None:
                closing.enter_context(self._disk_errors())
                closing.callback(self.writer.close, "complete" if complete else "interrupted")
                closing.callback(self._transfer.close)
                if self._whole_step is not None:
                    self._store_row(self._whole_step)

    def _fill_missing(self) -> None:
        """Set what the step lacks: moments that do not exist yet to 0, all others to NaN."""
        missing = [name for name in self.variables if name not in self._row]
        for name in missing:
            unknown = self.parameter.optimizer is None and VARIABLES[name].row0 == "zero"
            value = float("nan") if unknown else _start(name)
            self._put(name, self._without(name, value), None)
        if lost := [name for name in missing if VARIABLES[name].row0 != "zero"]:
            self._notes.add(f"a step has no {', '.join(lost)}, recorded as NaN; {_remedy(lost)}")

    def _without(self, name: str, value: float) -> torch.Tensor:
        """Return what the array of a variable holds where a step has no value."""
        assert self.writer is not None
        array = self.writer.layout.arrays[name]
        dtype = getattr(torch, array.native.name)
        return torch.full(array.row, value, dtype=dtype, device="cpu")

    def own_W(self) -> torch.Tensor:
        """Return the parameter, or this process's tokens of it."""
        return own_rows(self.parameter.tensor.detach())

    def _select(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor if self._ids is None else tensor.index_select(0, self._ids)

    def _adopts(self, name: str) -> bool:
        """Add a variable of a name of the optimizer, until the run is created."""
        if name in VARIABLES or name in self._other_state or not self._records_state(name):
            return False
        if self.writer is not None:
            self._notes.mention(
                f"the run does not hold {name}, which the optimizer did not keep in the first "
                "step; record a new run"
            )
            return False
        self.variables += (name,)
        return True

    def _set_selected(self, name: str, value: torch.Tensor) -> None:
        if name in self.variables:
            self._put(name, value, None)

    def _put(self, name: str, value: torch.Tensor | JoinedVector, ids: torch.Tensor | None) -> None:
        with self._disk_errors():
            self._row[name] = self._transfer.put(name, value, ids)
        # This overwrites the row of the previous step, if it was not stored.
        self._whole_step = None

    def _oddity(self, name: str, dtype: torch.dtype, shape: tuple[int, ...]) -> str | None:
        """Return a sentence if no run can hold a value of that type and shape."""
        dims = VARIABLES[name].dims[1:]
        lengths = dict(zip(("token", "hidden"), self.own_W().shape, strict=True))
        shaped = len(dims) == len(shape) and all(
            lengths.get(dim, length) == length for dim, length in zip(dims, shape, strict=True)
        )
        if shaped and type_name(dtype) in NATIVE_TYPES:
            return None
        return (
            f"{name} is not recorded: the training has {type_name(dtype)} of shape "
            f"{tuple(shape)}, expected floats with the dimensions {', '.join(dims) or 'none'}"
        )

    def _lack_of_room(self, name: str, value: torch.Tensor) -> str | None:
        dims = VARIABLES[name].dims[1:]
        for dim, length in zip(dims, value.shape, strict=True):
            room = length if dim == "hidden" else self._room.setdefault(dim, length)
            if length > room:
                return (
                    f"{name}: a step has {length} {dim}s, but the rows of {self._planned.path} "
                    f"have room for {room}, as in the first step; start with the largest batch"
                )
        return None

    def _padded(self, name: str, value: torch.Tensor) -> torch.Tensor:
        """Return a value padded with NaN to the row's number of examples and positions."""
        dims = VARIABLES[name].dims[1:]
        return padded(value, [self._room.get(dim, value.shape[-1]) for dim in dims])

    def _difference(self, name: str, dtype: torch.dtype, shape: tuple[int, ...]) -> str | None:
        """Return a sentence if the array cannot hold a value of that type and shape."""
        assert self.writer is not None
        array = self.writer.layout.arrays[name]
        held = getattr(torch, array.native.name)
        # Vectors and matrices keep their type; a number is converted if no bit is lost.
        fits = dtype == held or (not shape and torch.promote_types(dtype, held) == held)
        if fits and shape == array.row:
            return None
        return (
            f"{name} is now {type_name(dtype)} of shape {shape}, but was {array.native.name} of "
            f"shape {array.row} in the first row"
        )

    def _create_run(self) -> None:
        """Create the run with the variables of the current step, and write all rows so far."""
        last_step, last = self._early_rows[-1]
        options = self._planned.recording.options
        state = self._planned.recording.state
        optimizer, kept = self._planned.recording.optimizer, []
        if options.whole_state:
            known, matrix = ((), self.parameter.tensor) if state is None else (state.kept, None)
            kept = find_kept(optimizer, known, matrix=matrix)
        other = [entry["name"] for entry in kept if entry["of"] == "other"]
        self._other_state.update(other)
        for name, empty in self._expected(kept).items():
            if name not in last and VARIABLES[name].row0 != "zero":
                self._notes.add(f"a step has no {name}, recorded as NaN; {_remedy([name])}")
            last.setdefault(name, empty)
        left_out = [name for name in self.variables if name not in last]
        of_run = variables_of(state_attribute(optimizer, kept))
        self.variables = tuple(name for name in self.variables if name in last and name in of_run)
        required = options.required
        if lost := [name for name in left_out if name in required]:
            self._notes.add(f"{', '.join(lost)} not recorded: {_remedy(lost)}")
        needless = {*MOMENTS, *OF_ADAM}  # not every optimizer has them
        if state is not None and state.draws_nothing:
            needless.add("random_state")
        model, head = self._planned.recording.model, self.parameter.head
        is_unembedded = head is None and last_layers(model, [len(self.parameter.tensor)])
        if not makes_logits(model, head) and not is_unembedded:
            needless.add("logits")
        if other:
            self._notes.mention(
                f"{', '.join(other)} not recorded: the optimizer keeps them in another form than "
                "one tensor of the parameter's shape or one number, or under a name of the run"
            )
        for names, remedy in _REMEDIES:  # of a tier, which takes what there is
            if lost := [name for name in left_out if name in names - required - needless]:
                self._notes.mention(f"{', '.join(lost)} not recorded: {remedy}")
        for _, row in self._early_rows:
            for name in self.variables:
                if name not in row:
                    row[name] = torch.full_like(last[name], _start(name))
        types = {name: type_name(last[name].dtype) for name in self.variables}
        room = row_lengths({name: tuple(last[name].shape) for name in types})
        if state is not None:
            self._initial |= state.initial()
        in_transit = memory_in_transit(
            self.parameter.tensor.device, (last[name] for name in self.variables)
        )
        self.writer = writer = self._planned.create(types, room, in_transit, kept)
        self._planned.feed_log(writer, self.last_step)
        writer.notes = self._notes.entries
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

    def _expected(self, entries: list[Entry]) -> Row:
        """Return values that the first complete step may lack, although later ones have them."""
        W, owner = self._initial_W, self.parameter.optimizer
        whole: Mapping[Any, Any] = {} if owner is None else owner.state
        # Some optimizers also keep a count under a name.
        state = {own: kept for own, kept in whole.items() if isinstance(own, torch.Tensor)}
        found = {
            "grad": torch.full_like(W, float("nan")),
            "loss": W.new_full((), float("nan"), dtype=torch.float64),  # holds a loss of any type
            "grad_token_norm": W.new_full(W.shape[:1], float("nan"), dtype=torch.float32),
        }
        names = [*MOMENTS]
        if not state.get(self.parameter.tensor):  # it had no gradient yet
            names += [entry["name"] for entry in entries if entry["of"] == "element"]
        if any("step" in kept for kept in state.values()):
            found["step_count"] = torch.tensor(0.0, dtype=torch.float64)
        for name in names:
            for tensor, kept in state.items():
                same_type = tensor.dtype == self.parameter.tensor.dtype
                if same_type and is_element(name, tensor, kept.get(name)):
                    found[name] = torch.zeros_like(W, dtype=kept[name].dtype)
                    break
        return {n: value for n, value in found.items() if n in self.variables or self._adopts(n)}

    def _move_to_block(self, step: int, row: Row) -> None:
        """Write a row, and release each value after its copy: rows can be as large as the model."""
        assert self.writer is not None
        transfer = DirectTransfer(self.writer)
        for name in self.variables:
            value = row.pop(name)
            problem = self._difference(name, value.dtype, tuple(value.shape))
            if problem is not None:  # an early row, before the types were known
                self._notes.add(f"{problem}; it is not recorded in such a step")
                value = self._without(name, float("nan"))
            transfer.put(name, value)
        transfer.commit(step)

    def _initial_row(self, like: Row) -> Row:
        """Return the row before the first step, with the types of another row."""
        return {
            name: self._initial.get(name, self._initial_W).to("cpu", like[name].dtype)
            if VARIABLES[name].row0 == "initial" or name in self._initial
            # One number, of the shape of the row: it takes no memory.
            else like[name].new_full((), _start(name)).expand_as(like[name])
            for name in self.variables
        }

    def _store_row(self, step: int) -> None:
        """Store the row in the transfer as the row of `step`."""
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
        try:
            yield
        except Exception as error:
            cause, writer = file_error(error), self.writer
            full = cause is not None and cause.errno in FULL
            if writer is None or not full or not isinstance(writer.path, Path):
                raise
            block = writer.bytes_recorded * writer.layout.block_rows // max(writer.rows, 1)
            free = shutil.disk_usage(writer.path.parent).free
            raise RecordingError(
                f"no space is left for {writer.path}: {format_bytes(free)} are free, but a block "
                f"of {writer.layout.block_rows} rows takes up to {format_bytes(block)}; its first "
                f"{writer.committed_rows} rows are committed; free space, or record less"
            ) from error


def _start(name: str) -> float:
    """Return the value of a variable before a step has one."""
    return 0.0 if VARIABLES[name].row0 == "zero" else float("nan")


def _remedy(unseen: list[str]) -> str:
    found = [remedy for names, remedy in _REMEDIES if not names.isdisjoint(unseen)]
    return "; ".join(found) or "leave it out of variables"


_REMEDIES = (
    (
        {"loss"},
        "the gradient is not known to be that of one number; pass the loss in every step with "
        "observe(loss=…)",
    ),
    ({"logits"}, "pass the logits in every step with observe(logits=…)"),
    (
        {*OF_HIDDEN_STATES},
        "no module has the matrix as its weight and gets the hidden states; pass them in every "
        "step with observe(hidden=…), or name the module that returns them with hidden_from=…",
    ),
    (
        {"grad", "grad_token_norm"},
        "the parameter has no gradient: it is not trained or unused, or its gradient was discarded",
    ),
    (
        {*MOMENTS, *OF_ADAM},
        "the optimizer keeps no such state of the parameter's shape",
    ),
    (
        {"random_state"},
        "the model draws no random numbers, or is not called itself in every step, so that its "
        "hooks do not run",
    ),
    (
        {"batch"},
        "pass the indices of the examples in every step with observe(batch=…), or add a tensor "
        f"{EXAMPLE_INDEX} to the model's inputs; it is removed before the model runs",
    ),
    (
        {"example_loss"},
        "the model is not a causal language model of transformers with labels; pass the losses in "
        "every step with observe(example_loss=…)",
    ),
)
