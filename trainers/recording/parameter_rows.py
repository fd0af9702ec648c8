"""The growing run of one parameter, from the values of a step to a complete row.

During a step the hooks `set` what the loop may change, and at its end they `complete` it. Until the
run exists, `FirstRows` keeps the rows. From there on a `Transfer` copies each value directly to its
place.
"""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from trajstore.errors import RecordingError
from trajstore.provenance import OptimizerAttributes
from trajstore.schema import INTEGERS, OF_EXAMPLES, STEP, VARIABLES
from trajstore.store.writing.writer import RunWriter
from trajstore.trainers.recording.device_summaries import ULP_TYPES, token_norm, ulp_l1
from trajstore.trainers.recording.device_to_host import (
    JoinedVector,
    Row,
    Transfer,
    Value,
    copy_to_host,
    open_transfer,
    same_bits,
    type_name,
)
from trajstore.trainers.recording.examples import padded
from trajstore.trainers.recording.existing_run import ComparedRun, ExistingRun
from trajstore.trainers.recording.first_rows import (
    FirstRows,
    remedies_for,
    value_before_steps,
    why_misfit,
    why_unrecordable,
)
from trajstore.trainers.recording.kept_state import kept_elements, step_count
from trajstore.trainers.recording.notes import FULL, CannotFollow, file_error
from trajstore.trainers.recording.planned_run import PlannedRun
from trajstore.trainers.recording.sharding import own_rows, own_tokens, own_variables
from trajstore.trainers.recording.torch_internals import versions
from trajstore.units import format_bytes

_UNSHARDED = (torch.Tensor, torch.nn.Parameter, JoinedVector)


class ParameterRows:
    """Rows of one parameter, one every `every` optimizer steps.

    Parameters
    ----------
    planned : PlannedRun
        Some variables of a tier may be missing in the first step (moments of SGD, logits of a model
        without an unembedding); they are left out.
    existing : ExistingRun, optional
        Run to resume, in place of a new one; it does not change before `resume`.
    keyframes : ParameterRows, optional
        Rows with the state of the model, if the run has it in keyframes only.

    Attributes
    ----------
    parameter : RecordedParameter
    variables : tuple of str
        Variables that this process records.
    watched : tuple of str
        Variables that all processes record together.
    hyperparameters : tuple of str
        Names of the numbers of the optimizer's group that the rows hold.
    recorded_optimizer : OptimizerAttributes
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

    def __init__(
        self,
        planned: PlannedRun,
        existing: ExistingRun | None = None,
        keyframes: ParameterRows | None = None,
    ) -> None:
        self.keyframes: ParameterRows | None = None  # not yet: they have taken their initial state
        self.parameter = planned.parameter
        self.watched = planned.recording.options.resolved
        self.variables = own_variables(planned.share, self.watched)
        self.writer: RunWriter | ComparedRun | None = None
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
        self._optimizer = planned.recording.optimizer
        self._every = planned.recording.options.every
        self._ids = None if planned.ids is None else torch.from_numpy(planned.ids).to(W.device)
        self._first = FirstRows(planned, self._ids)
        self._transfer: Transfer | None = None  # None before the run exists
        self._row: Row = {}  # row of the current step
        self._unstored_step: int | None = (
            None  # step of the complete row that is only in the transfer
        )
        self._templates: Row = {}  # shapes and types of the run, on the device `meta`
        # Kinds of values that the places have taken, and the tokens to select of them.
        self._known_kinds: dict[str, tuple[torch.dtype, tuple[int, ...], torch.Tensor | None]] = {}
        self.take_initial(with_moments=existing is None)
        self._written_W: torch.Tensor | None = None  # W of the last complete step, where it lies
        self._last_W: torch.Tensor | None = None  # W in the last row, on the device
        if "W_step_norm" in self.variables or "W_ulp_l1" in self.variables:
            self._last_W = self.recorded_tokens(W).clone()
        examples = planned.recording.loop.examples
        # Lengths of the dimensions example and position.
        self._lengths: dict[str, int] = {} if examples is None else {"example": examples}
        self._existing = existing
        if existing is not None:
            kept = kept_elements(self.parameter.tensor, self._state())
            state = {name: self.recorded_tokens(value) for name, value in kept.items()}
            state |= step_count(self._state())
            existing.check(self._first.W, {name: value.cpu() for name, value in state.items()})
            self.watched = existing.variables
            self.variables = own_variables(planned.share, self.watched)
        names = planned.hyperparameters if existing is None else existing.hyperparameters
        self.hyperparameters = names if "hyperparameters" in self.watched else ()
        self.recorded_optimizer = existing.optimizer if existing else OptimizerAttributes.of(None)
        self.keyframes = keyframes

    @property
    def has_begun(self) -> bool:
        """True if the run exists, and no other process would wait for the rows of this one."""
        share = self._planned.share
        return self.writer is not None and (share is None or share.count == 1)

    def take_initial(self, *, with_moments: bool = True) -> None:
        """Copy the state before the first step."""
        if self.keyframes is not None:
            self.keyframes.take_initial(with_moments=with_moments)
        is_whole = self._first.take_initial(
            self.parameter, self.variables, with_moments=with_moments
        )
        # Of the state at the end of the last step; None if the row before the first step has it.
        # Without one, that row is of an optimizer without a state.
        self._state_marks: dict[str, tuple[int, int]] | None = None if is_whole else {}

    def is_state_unchanged(self) -> bool:
        """Return False if what the optimizer keeps has changed since the end of the last step."""
        return self._state_marks in (None, self.marks_of_state())

    def _state(self) -> Mapping[str, Any]:
        return self._optimizer.state.get(self.parameter.tensor, {})

    def marks_of_state(self) -> dict[str, tuple[int, int]]:
        """Return tensor and version of what the optimizer keeps of the parameter."""
        kept = {k: value for k, value in self._state().items() if isinstance(value, torch.Tensor)}
        tensors = [*kept.values()]
        marks = zip(map(id, tensors), versions(tensors), strict=True)
        return dict(zip(kept, marks, strict=True))

    def resume(self) -> None:
        """Open the run to resume after its last row, which the next row changes first.

        A new run is created later.

        Raises
        ------
        RunLocked
            If another process writes to it.
        """
        if self.keyframes is not None:
            self.keyframes.resume()
        existing = self._existing
        if existing is None:
            return
        if self._last_W is not None and "W" in existing.variables:
            self._last_W.copy_(existing.last_weights)
        writer = existing.open()
        if isinstance(writer, RunWriter):
            self._planned.feed_log(writer, existing.last_step, existing.is_dead)
        self.writer = writer
        last_step = existing.last_step
        writer.notes = self._notes.resumed(writer.notes, last_step)
        if missing := existing.missing_steps:
            self._notes.add_missing(self.parameter.name, missing)
        self._existing = None
        self._open_transfer(writer)
        if (inputs := self._planned.recording.inputs) is not None and "inputs" in self._templates:
            inputs.room = len(self._templates["inputs"])
        if "loss" in self._templates and (kind := self._templates["loss"].dtype).itemsize < 4:
            self._notes.mention(
                f"loss is rounded to {type_name(kind)}, the type of the run; record a new run to "
                "have it in float32"
            )
        for name in set(OF_EXAMPLES) & self._templates.keys():
            self._lengths |= dict(
                zip(VARIABLES[name].dims[1:], self._templates[name].shape, strict=True)
            )
        self.rows, self.last_step = existing.rows, last_step
        self._first = FirstRows(self._planned, self._ids)

    def _open_transfer(self, writer: RunWriter | ComparedRun) -> None:
        self._templates = {
            name: torch.empty(array.row, dtype=getattr(torch, array.native.name), device="meta")
            for name, array in writer.layout.arrays.items()
            if name != STEP.name
        }
        with self._disk_errors():
            self._transfer = open_transfer(writer, self.parameter.tensor.device)

    def own_W(self) -> torch.Tensor:
        """Return the parameter, or this process's tokens of it."""
        return own_rows(self.parameter.tensor.detach())

    def recorded_tokens(self, tensor: torch.Tensor) -> torch.Tensor:
        """Select the recorded tokens of a tensor whose first dimension is the vocabulary.

        If the tensor is sharded over processes, the result has the tokens of this process.
        """
        return own_tokens(tensor, self._ids)

    # Values of a step ----------------------------------------------------------------------------

    def set(self, values: Mapping[str, Value]) -> None:
        """Copy variables of the current step to the places where they are stored.

        A second value in the same step replaces the first.

        Parameters
        ----------
        values : mapping of str to tensor or JoinedVector
            By variable; those that are not recorded are ignored. A variable with a token dimension
            has the whole vocabulary, or the tokens of this process. The number of examples and
            positions is at most that of the first row.

        A value of another shape than in the first row, or of a type that the array cannot hold
        exactly, is noted and not recorded.

        Raises
        ------
        CannotFollow
            If it is W, or a vector of the model.
        RecordingError
            If the disk is full.
        """
        accepted = {}
        for name, value in values.items():
            dtype, shape, ids = self._known_kinds.get(name, (None, None, None))
            if value.dtype is dtype and value.shape == shape and type(value) in _UNSHARDED:
                # A tensor, as its type says; mypy does not follow that.
                accepted[name] = value if ids is None else value.index_select(0, ids)  # type: ignore[union-attr]
            elif (checked := self._checked(name, value)) is not None:
                accepted[name] = checked
        self._put(accepted)

    def _checked(self, name: str, value: Value) -> Value | None:
        """Return a value as the row takes it; None if it does not, with a note if it should."""
        if name not in self.variables and not self._adopts(name):
            return None
        original = value
        if isinstance(value, torch.Tensor):
            value = own_rows(value.detach())
            if name in OF_EXAMPLES:
                if (problem := self._why_too_long(name, value)) is not None:
                    self._notes.add(problem)
                    return None
                dims = VARIABLES[name].dims[1:]
                value = padded(value, [self._lengths.get(dim, value.shape[-1]) for dim in dims])
        if self.writer is None:
            problem = why_unrecordable(name, value, self.own_W())
        ids = self._ids
        if ids is not None and VARIABLES[name].dims[1:2] != ("token",):
            ids = None
        may_select = self.writer is not None or problem is None
        if ids is not None and may_select and isinstance(value, torch.Tensor):
            value = value.index_select(0, ids)
        if self.writer is not None:
            problem = why_misfit(name, value, self._templates[name])
            if problem and (name == "W" or isinstance(value, JoinedVector)):
                raise CannotFollow(f"{problem}; record a new run for the new shape or type")
            problem = problem and f"{problem}; it is not recorded in such a step"
            if problem is None and type(original) in _UNSHARDED and name not in OF_EXAMPLES:
                self._known_kinds[name] = original.dtype, original.shape, ids
        if problem is not None:
            self._notes.add(problem)
            return None
        return value

    def _why_too_long(self, name: str, value: torch.Tensor) -> str | None:
        dims = VARIABLES[name].dims[1:]
        for dim, length in zip(dims, value.shape, strict=True):
            room = length if dim == "hidden" else self._lengths.setdefault(dim, length)
            if length > room:
                return (
                    f"{name}: a step has {length} {dim}s, but the rows of {self._planned.path} "
                    f"have room for {room}, as in the first step; start with the largest batch"
                )
        return None

    def _adopts(self, name: str) -> bool:
        """Add a variable of a name of the optimizer, until the run is created."""
        if not self._first.may_add(name, self.variables):
            return False
        if self.writer is not None:
            self._notes.mention(
                f"the run does not hold {name}, which the optimizer did not keep in the first "
                "step; record a new run"
            )
            return False
        self.variables += (name,)
        return True

    def _put(self, values: Mapping[str, Value]) -> None:
        if values:
            self._unstored_step = None  # this overwrites that row, if it was not stored
            with self._disk_errors():
                put = copy_to_host if self._transfer is None else self._transfer.put
                self._row |= put(values)

    def set_gradient(self, gradient: torch.Tensor) -> None:
        """Set the gradient, (token, hidden) of this process, and the norm of each token's."""
        self.set({"grad": gradient})
        if "grad_token_norm" in self.variables:
            self._put({"grad_token_norm": token_norm(self.recorded_tokens(gradient))})

    def replace_gradient(self, selected: torch.Tensor) -> None:
        """Replace the gradient of the current step, (token, hidden) of the recorded tokens."""
        values = {"grad": selected} if "grad" in self.variables else {}
        if "grad_token_norm" in self.variables:
            values["grad_token_norm"] = token_norm(selected)
        self._put(values)

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
        before = self._first.W if self._written_W is None else self._written_W
        if not before.numel() or (self.parameter.tensor.device.type != "cpu" and not waits):
            return True
        now = self.recorded_tokens(self.parameter.tensor).cpu()
        if now.dtype != before.dtype:  # that ends the recording with an error of its own
            return not waits
        return same_bits(now, before.cpu())

    # Rows ----------------------------------------------------------------------------------------

    def is_due(self, step: int) -> bool:
        """Return True if the run has a row of a step, or does not exist yet."""
        return self.writer is None or step % self._every == 0

    def complete(self, step: int, values: Mapping[str, Value], *, had_effect: bool) -> None:
        """Set W, its state and the values of a step, and store the row if `every` selects it.

        The run is created at the first step that had an effect: before it there may be no moments,
        so no types.

        Parameters
        ----------
        step : int
            Optimizer steps taken.
        values : mapping of str to tensor
            What the hooks have found beside W, its gradient and its state.
        had_effect : bool
            True if every optimizer has taken a step so far, and this one had gradients.

        Raises
        ------
        RecordingError
            If the disk is full.
        """
        W = self.parameter.tensor
        state = self._state()
        row = {"W": W, **kept_elements(W, state), **step_count(state), **values}
        if "cells" in self.variables:
            row["cells"] = self.own_W().to(torch.bfloat16)
        self.set(row)
        self._state_marks = self.marks_of_state()
        if self._last_W is not None:
            now = self.recorded_tokens(W)
            norms = {"W_step_norm": token_norm, "W_ulp_l1": ulp_l1}
            chosen = {name: norm for name, norm in norms.items() if name in self.variables}
            self._put({name: norm(now, self._last_W) for name, norm in chosen.items()})
        is_due = step % self._every == 0
        if self.writer is None:
            self._written_W = self._row.get("W")
            self._first.add(step, self._row)
            if had_effect:
                self._create_run()
            self._unstored_step = None if is_due else step
        else:
            self._fill_missing()
            self._written_W = self._row.get("W")
            self._unstored_step = step
            if is_due:
                self._store_row(step)
        self._row = {}

    def _create_run(self) -> None:
        """Create the run with the variables of the current step, and write all rows so far."""
        writer, self.variables = self._first.create_run(self.parameter, self.variables)
        self.writer = writer
        self._planned.feed_log(writer, self.last_step, self._planned.coordinates.get("is_dead"))
        writer.notes = self._notes.entries
        with self._disk_errors():
            rows = self._first.write(writer, self.variables, self.last_step)
        self.rows, self.last_step, waiting = rows
        self._open_transfer(writer)
        if waiting:
            assert self._transfer is not None
            self._transfer.put(waiting)
        else:
            self._remember_W()

    def _fill_missing(self) -> None:
        """Set what the step lacks: moments that do not exist yet to 0, all others to NaN."""
        missing = [name for name in self.variables if name not in self._row]
        for name in missing:
            is_state = VARIABLES[name].row0 == "zero" and name not in INTEGERS
            unknown = self.parameter.optimizer is None and is_state
            value = float("nan") if unknown else value_before_steps(name)
            self._put({name: torch.full_like(self._templates[name], value, device="cpu")})
        if lost := [name for name in missing if VARIABLES[name].row0 != "zero"]:
            self._notes.add(
                f"a step has no {', '.join(lost)}, recorded as NaN; {remedies_for(lost)}"
            )

    def _store_row(self, step: int) -> None:
        """Store the row in the transfer as the row of `step`."""
        assert self._transfer is not None
        with self._disk_errors():
            if self.keyframes is not None and isinstance(self.keyframes.writer, RunWriter):
                self.keyframes.writer.begin()  # drops the keyframes of later steps first
            self._transfer.commit(step)
        self.rows += 1
        self.last_step = step
        self._unstored_step = None
        self._remember_W()

    def _remember_W(self) -> None:
        if self._last_W is not None:
            self._last_W.copy_(self.recorded_tokens(self.parameter.tensor))

    def commit(self) -> None:
        """Commit all rows, and wait until they are stored."""
        if self.writer is not None:
            with self._disk_errors():
                if self._transfer is not None:
                    self._transfer.flush()
                self.writer.commit()
        if self.keyframes is not None:
            self.keyframes.commit()

    def close(self, *, complete: bool) -> None:
        """Commit the last step if it is complete, and close the run."""
        self._written_W = self._last_W = None
        self._row = {}
        with contextlib.ExitStack() as closing:  # closes each, also if another fails
            if self.keyframes is not None:
                closing.callback(self.keyframes.close, complete=complete)
            if self._planned.share is not None:
                closing.callback(self._planned.share.close)
            if self.writer is not None:
                closing.enter_context(self._disk_errors())
                closing.callback(self.writer.close, "complete" if complete else "interrupted")
                if self._transfer is not None:
                    closing.callback(self._transfer.close)
                if self._unstored_step is not None:
                    self._store_row(self._unstored_step)

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
