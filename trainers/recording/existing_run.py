"""An existing run: resumed after its rows, or compared with a repeated training.

Either way it is first compared with the plan of the training. A `ComparedRun` has the interface of
a `RunWriter`: it provides memory for a row and takes the filled row.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Self

import numpy as np
import numpy.typing as npt
import torch

from trajstore.errors import InvalidArgument, NothingToResume
from trajstore.provenance import OptimizerAttributes, RunAttributes
from trajstore.schema import COORDINATES, STEP, VARIABLES, along_token, variables_of
from trajstore.store.metadata.metadata_form import segments_attribute
from trajstore.store.reading.open_group import open_group
from trajstore.store.writing.resumed_run import ResumedRun, resumed_run
from trajstore.store.writing.writer import RunWriter
from trajstore.trainers.recording.device_to_host import place_tensor, same_bits, type_name
from trajstore.trainers.recording.model_state import STATE
from trajstore.trainers.recording.notes import resumed_provenance
from trajstore.trainers.recording.planned_run import PlannedRun
from trajstore.values.native_types import narrow, native_type
from trajstore.values.optimizer_rule import MOMENTS


@dataclass(frozen=True, kw_only=True, eq=False)
class ExistingRun:
    """An existing run, cut to the rows before the next step. `find` creates it.

    Attributes
    ----------
    planned : PlannedRun
        Plan of the resumed training.
    variables : tuple of str
        Variables of the run, in its order.
    rows : int
        Rows to keep.
    last_step : int
        Step of the last row to keep.
    missing_steps : range
        Steps between it and the next step of the training that should have rows.
    is_dead : ndarray of bool, (token,), or None
        Its labels.
    last_weights : tensor, (token, hidden)
        W in that row, in its native type, on the CPU, with the tokens of this process; `cells` if
        the run has no W.
    hyperparameters : tuple of str
        Names of the hyperparameters in its rows.
    optimizer : OptimizerAttributes
        Class and hyperparameters of the optimizer that a replay builds.
    attributes : mapping
        Attributes of the root that change.
    resumed_row : mapping of str to tensor
        Values in the row of the step from which the training continues, which may be dropped: of
        the matrix, the optimizer and, if it is recorded, the rest of the state. Without the row,
        empty.
    compared : ComparedRun or None
        Set if the following rows are only compared with those of the run.
    """

    planned: PlannedRun
    variables: tuple[str, ...]
    rows: int
    last_step: int
    missing_steps: range
    is_dead: npt.NDArray[np.bool_] | None
    last_weights: torch.Tensor
    hyperparameters: tuple[str, ...]
    optimizer: OptimizerAttributes
    attributes: Mapping[str, Any]
    resumed_row: Mapping[str, torch.Tensor] = field(default_factory=dict)
    compared: ComparedRun | None = None

    @classmethod
    def find(cls, planned: PlannedRun, comparison: Comparison | None = None) -> Self:
        """Read the run at the planned path, without a change.

        Parameters
        ----------
        planned : PlannedRun
        comparison : Comparison, optional
            Compare the following rows with those of the run, which stays unchanged.

        Raises
        ------
        RunNotFound
            If there is no run.
        NothingToResume
            If its first row is of a later step than the training has taken, its matrix has
            another shape or type, or it is complete, ends before that step, and `allow_gap` is
            not set; with a comparison also if it lacks rows up to that step.
        InvalidArgument
            If it was recorded with other options.
        """
        arrays: Any = open_group(planned.path)
        attributes: dict[str, Any] = arrays.attrs.asdict()
        known = variables_of(attributes)
        recorded = tuple(name for name in arrays.array_keys() if name in known)
        _check_options(planned, RunAttributes.of(attributes).recording, recorded, arrays)
        if planned.state is not None:
            planned.state.resume(attributes, recorded)
        all_steps = np.asarray(arrays[STEP.name][...])
        steps, missing = _kept_steps(planned, all_steps)
        if missing and comparison is not None:
            raise _ends_early(planned, steps)
        _check_gap(planned, attributes, int(all_steps[-1]))
        _check_change_norms(planned, recorded, int(steps[-1]))
        weights = "W" if "W" in recorded else "cells"
        W, is_last = arrays[weights], int(steps[-1]) == planned.recording.loop.first_step
        tokens = slice(None) if planned.share is None else planned.share.tokens(W.shape[1])
        last = steps.size - 1
        names = arrays["hyperparameter"][...] if "hyperparameter" in arrays else ()
        resumed = {}
        for row in np.flatnonzero(all_steps == planned.recording.loop.first_step).tolist():
            for name in (weights, *_state_of_step(recorded)):
                key = (row, tokens) if arrays[name].ndim == W.ndim else row
                resumed[name] = _row(arrays[name], key)
        compared = None
        if comparison is not None:
            stored = resumed_run(planned.path, None, memory=planned.memory)
            compared = ComparedRun(stored, all_steps.tolist(), int(steps.size), comparison)
        return cls(
            planned=planned,
            variables=recorded,
            rows=int(steps.size),
            last_step=int(steps[-1]),
            missing_steps=missing,
            is_dead=arrays["is_dead"][...] if "is_dead" in arrays else None,
            last_weights=resumed[weights] if is_last else _row(W, (last, tokens)),
            hyperparameters=tuple(map(str, names)),
            optimizer=RunAttributes.of(attributes).optimizer,
            attributes=_changed_attributes(planned, attributes),
            resumed_row=resumed,
            compared=compared,
        )

    def check(self, W: torch.Tensor, of_optimizer: Mapping[str, torch.Tensor]) -> None:
        """Check that the training continues with the weights of the run.

        Another state of the optimizer is a note, unless the run has the state of the model.

        Parameters
        ----------
        W : tensor, (token, hidden)
            Weights of the recorded tokens, on the CPU.
        of_optimizer : mapping of str to tensor
            What the optimizer keeps of them, on the CPU.

        Raises
        ------
        NothingToResume
            If a bit differs, or one of the state of the model.
        """
        row, recording = self.resumed_row, self.planned.recording
        step, is_compared = recording.loop.first_step, self.compared is not None
        if not row or (is_compared and step != self.last_step):
            return
        weights = "W" if "W" in row else "cells"
        now = W if weights == "W" else W.to(torch.bfloat16)
        different: tuple[str, ...] = () if same_bits(now, row[weights]) else (weights,)
        others = (weights, _COUNT, _DIGEST)
        if self.planned.state is not None:
            state = {name: values for name, values in row.items() if name not in others}
            different += self.planned.state.differing(state)
        elif not is_compared:
            self._compare_optimizer(of_optimizer, {*row} - {weights, _DIGEST})
        if _DIGEST in row and recording.digests is not None:
            now = recording.digests.of_parameters().cpu()
            different += () if torch.equal(now, row[_DIGEST]) else (_DIGEST,)
        if different and self.compared is not None:
            comparison = self.compared.comparison
            difference = RowDifference(step=step, row=self.rows - 1, variables=different)
            comparison.difference = comparison.difference or difference
        elif different:
            names = "the weights" if different == (weights,) else ", ".join(different)
            raise NothingToResume(
                f"{names} of the training differ from {self.planned.path} at step {step}; load "
                "the checkpoint of that step, correct first_step, or record a new run"
            )

    def _compare_optimizer(self, now: Mapping[str, torch.Tensor], names: Iterable[str]) -> None:
        """Note values of the optimizer that differ; a NaN in the row is not known."""
        different, notes = [], self.planned.recording.notes
        for name in sorted(names):
            before = self.resumed_row[name]
            value = now[name].to(before.dtype) if name in now else torch.zeros_like(before)
            if not (before.isnan().all() or same_bits(value, before)):
                different.append(name)
        if different:
            notes.step = self.planned.recording.loop.first_step
            notes.mention(
                f"{', '.join(different)} of the optimizer differ from the run at step {notes.step},"
                " so the training continues with another state; to continue with that of the run, "
                "load the optimizer's state_dict before the recording"
            )

    def open(self) -> RunWriter | ComparedRun:
        """Return a writer that continues the run after its rows, or the comparison.

        Raises
        ------
        RunLocked
            If another process writes to it.
        """
        if self.compared is not None:
            return self.compared
        return RunWriter.resume(
            self.planned.path,
            rows=self.rows,
            attributes=self.attributes,
            memory=self.planned.memory,
            commit_every=self.planned.recording.options.commit_every,
            fsync=self.planned.recording.options.fsync,
            share=self.planned.share,
            lazy=True,
            on_note=self.planned.recording.on_note,
        )


_COUNT, _DIGEST = "step_count", "params_digest"


def _state_of_step(recorded: Iterable[str]) -> list[str]:
    """Return the variables that a training has before a step, besides those of the matrix."""
    kept = (*STATE, *MOMENTS, _COUNT, _DIGEST)
    return sorted(name for name in recorded if name in kept or name not in VARIABLES)


def _check_options(
    planned: PlannedRun, before: Mapping[str, Any], recorded: tuple[str, ...], arrays: Any
) -> None:
    """Check options, variables and coordinates against those of the run."""
    options = {name: before.get(name) for name in planned.recording_attribute}
    pairs = {name: (was, planned.recording_attribute[name]) for name, was in options.items()}
    W = next(name for name in ("W", "grad", "cells") if name in arrays)
    tensor, kind = planned.parameter.tensor, arrays[W].attrs["native_dtype"]
    type_now = kind if W == "cells" else type_name(tensor.dtype)
    shape = options["vocabulary"], arrays[W].shape[2]
    del pairs["vocabulary"]  # it is the first number of the shape
    pairs[planned.parameter.name] = (
        f"{kind} of shape {shape}",
        f"{type_now} of shape {tuple(tensor.shape)}",
    )
    pairs["tokens"] = (arrays["token"][...], planned.token)
    if planned.populations:  # by default it keeps its own
        names = {n for n in along_token(arrays.array_keys()) if n not in COORDINATES}
        for name in names | planned.populations.keys():
            was = arrays[name][...] if name in names else None
            pairs[f"populations: {name}"] = (was, planned.populations.get(name))
    if "parameter" in arrays and planned.parameter_names is not None:
        stored = np.array([*map(str, arrays["parameter"][...])])
        pairs["parameters of the model"] = (stored, np.array([*planned.parameter_names]))
    for name, (was, now) in pairs.items():
        if not np.array_equal(np.asarray(was), np.asarray(now)):
            raise InvalidArgument(
                f"{name}: {planned.path} was recorded with {_shown(was)}, got {_shown(now)}; a "
                "resumed run keeps it, so give the same, or record a new run"
            )
    wanted, required = planned.recording.options.resolved, planned.recording.options.required
    extra = set(recorded) - set(wanted)
    if planned.recording.options.whole_state:
        extra &= VARIABLES.keys()
    if missing := sorted(extra) + sorted(required - set(recorded)):
        raise InvalidArgument(
            f"variables: {planned.path} has {', '.join(recorded)}, got {', '.join(wanted)}; a "
            f"resumed run keeps its variables, so correct {', '.join(missing)}"
        )


def _shown(value: Any) -> str:
    """Return a value in a message; of an array, the size and the first elements."""
    if not isinstance(value, np.ndarray):
        return str(value)
    return f"{value.size} ({', '.join(map(str, value[:3]))}, …)"


def _check_change_norms(planned: PlannedRun, recorded: tuple[str, ...], last_step: int) -> None:
    """Check that the last W is known if the change from it is recorded."""
    of_change = [name for name in ("W_step_norm", "W_ulp_l1") if name in recorded]
    if of_change and "W" not in recorded and planned.recording.loop.first_step != last_step:
        raise NothingToResume(
            f"{', '.join(of_change)}: the next row needs W at step {last_step}, which "
            f"{planned.path} lacks; resume from a checkpoint of that step, or record a new run"
        )


def _kept_steps(planned: PlannedRun, steps: npt.NDArray[Any]) -> tuple[npt.NDArray[Any], range]:
    """Return the steps of the rows to keep, at least one, and later ones that should have rows."""
    step, every = planned.recording.loop.first_step, planned.recording.options.every
    # A row that exists only because the training ended has no place in a longer training.
    regular = steps[(steps % every == 0) | (np.arange(steps.size) == 0)]
    kept: npt.NDArray[Any] = regular[regular <= step]
    if not kept.size:
        raise _ends_early(planned, steps)
    last = int(kept[-1])
    return kept, range(last - last % every + every, step + 1, every)


def _check_gap(planned: PlannedRun, attributes: Mapping[str, Any], end: int) -> None:
    """Check that a run ended early, or that a gap is allowed, if it ends before the training."""
    step, options = planned.recording.loop.first_step, planned.recording.options
    if end < step and attributes["status"] == "complete" and not options.allow_gap:
        raise NothingToResume(
            f"{planned.path} is complete and ends at step {end}, but the training continues after "
            f"step {step}; correct first_step, load the checkpoint of step {end}, or leave out the "
            "steps between with allow_gap=True"
        )


def _ends_early(planned: PlannedRun, steps: npt.NDArray[Any]) -> NothingToResume:
    reached = f"has the steps {steps[0]} to {steps[-1]}" if steps.size else "has no step"
    return NothingToResume(
        f"{planned.path} {reached}, but the training continues after step "
        f"{planned.recording.loop.first_step}; resume from another checkpoint, or record a new run"
    )


def _changed_attributes(planned: PlannedRun, before: Mapping[str, Any]) -> dict[str, Any]:
    """Return the changed attributes, with the earlier entries where they are lists."""
    step, config = planned.recording.loop.first_step, planned.recording.options.config
    run = RunAttributes.of(before)
    changed: dict[str, Any] = {
        "optimizer": {**run.optimizer.stored, "schedule": planned.schedule},
        "provenance": resumed_provenance(run, planned.device, step),
    }
    if config is not None:
        changed |= {"config": dict(config), **segments_attribute(before, dict(config), step)}
    return changed


def _row(array: Any, key: Any) -> torch.Tensor:
    """Return one row of a variable, or a part of it, in its native type."""
    native = native_type(str(array.attrs["native_dtype"]))
    return place_tensor(narrow(np.asarray(array[key]), native), native.name)


@dataclass(frozen=True, kw_only=True)
class RowDifference:
    """The first row in which a repeated training differs from the run.

    Attributes
    ----------
    step : int
        Step of the row.
    row : int
        Number of the row.
    variables : tuple of str
        Variables that differ.
    stored, computed : mapping of str to ndarray
        Native bits of the row and of the training, for each of them; empty if unknown.
    """

    step: int
    row: int
    variables: tuple[str, ...]
    stored: Mapping[str, npt.NDArray[Any]] = field(default_factory=dict)
    computed: Mapping[str, npt.NDArray[Any]] = field(default_factory=dict)


class Comparison:
    """Result of comparing a repeated training with a run.

    Parameters
    ----------
    make_writer : callable, optional
        Called with the number of the first different row; returns a writer for that row and all
        later ones. Without it, rows after the first difference are ignored.
    variables : collection of str, optional
        Variables to compare; default: all.
    first_row : int
        Number of the first row to compare.
    goes_on : bool
        The training continues after a difference.

    Attributes
    ----------
    difference : RowDifference or None
        None while every bit agrees.
    successor : RunWriter or None
        Writer of the rows from the difference on.
    agreed : int
        Rows before the difference.
    """

    def __init__(
        self,
        make_writer: Callable[[int], RunWriter] | None = None,
        variables: Collection[str] | None = None,
        first_row: int = 0,
        *,
        goes_on: bool = False,
    ) -> None:
        self.variables = variables
        self._goes_on = goes_on
        self.first_row = first_row
        self.difference: RowDifference | None = None
        self.successor: RunWriter | None = None
        self.agreed = 0
        self._make_writer = make_writer

    @property
    def is_over(self) -> bool:
        """True if the training ends, because a row differs and no later one is wanted."""
        return self.difference is not None and not self._goes_on and self.successor is None

    def differ(self, difference: RowDifference) -> RunWriter | None:
        """Store the first difference, and return the writer of the following rows."""
        self.difference = difference
        if self._make_writer is not None:
            self.successor = self._make_writer(difference.row)
        return self.successor

    def close(self) -> None:
        """Close the writer of the different rows."""
        if self.successor is not None:
            self.successor.close("interrupted")


class ComparedRun:
    """Takes rows as a `RunWriter` does, and compares each with a run, bit for bit.

    The run is read one block at a time and never changed.

    Parameters
    ----------
    stored : ResumedRun
        Run with the rows to compare.
    steps : sequence of int
        Steps of all its rows.
    rows : int
        Number of rows before the first compared row.
    comparison : Comparison

    Attributes
    ----------
    path : Path
    layout : Layout
        Layout of the run.
    rows : int
        Rows so far, including those before the comparison.
    bytes_recorded, bytes_written, seconds_waited : int, int, float
        As in `RunWriter`; nothing is stored.
    """

    notes: Sequence[Mapping[str, Any]] = ()
    bytes_written = 0
    seconds_waited = 0.0

    def __init__(
        self, stored: ResumedRun, steps: Sequence[int], rows: int, comparison: Comparison
    ) -> None:
        self.path = stored.path
        self.layout = stored.layout
        self.rows = rows
        self.comparison = comparison
        self._stored = stored
        self._steps = steps
        self._recorded_steps = frozenset(steps)
        self._row: dict[str, npt.NDArray[Any]] = {
            name: np.empty(array.row, array.native.bits)
            for name, array in stored.layout.arrays.items()
            if name != STEP.name
        }
        self._number = -1  # number of the block in memory
        self._block: dict[str, npt.NDArray[Any]] = {}

    @property
    def committed_rows(self) -> int:
        """Rows so far."""
        return self.rows

    @property
    def bytes_recorded(self) -> int:
        """Bytes of the rows so far, in native types."""
        return self.rows * sum(place.nbytes for place in self._row.values())

    def next_rows(self, most: int) -> dict[str, npt.NDArray[Any]]:
        """Return memory for one row, as `RunWriter.next_rows`: each row may have another place."""
        if self.comparison.successor is not None:
            return self.comparison.successor.next_rows(1)
        return {name: place[None] for name, place in self._row.items()}

    def commit_row(self, step: int) -> None:
        """Compare the filled row from `next_rows` with the row of `step`.

        An earlier training may have ended with an extra row; the extended run lacks it, so it is
        ignored.
        """
        if step not in self._recorded_steps:
            return
        comparison = self.comparison
        if comparison.successor is not None:
            comparison.successor.commit_row(step)
        elif comparison.difference is None and self.rows >= comparison.first_row:
            if not (unequal := self._unequal(step)):
                comparison.agreed += 1
            elif (successor := comparison.differ(self._difference(step, unequal))) is not None:
                for name, place in successor.next_row().items():
                    place[...] = self._row[name]
                successor.commit_row(step)
        self.rows += 1

    def commit(self) -> None:
        """Store nothing."""

    def close(self, status: str = "complete") -> None:
        """Release the block; the comparison stays open for the next segment."""
        self._block = {}

    def _difference(self, step: int, unequal: tuple[str, ...]) -> RowDifference:
        place = self.rows % self.layout.block_rows
        known = [name for name in unequal if name in self._row]  # not a wrong step
        return RowDifference(
            step=step,
            row=self.rows,
            variables=unequal,
            stored={name: self._block[name][place] for name in known},
            computed={name: self._row[name].copy() for name in known},
        )

    def _unequal(self, step: int) -> tuple[str, ...]:
        """Return the variables whose bits differ from the row."""
        if self.rows >= self._stored.rows or self._steps[self.rows] != step:
            return (STEP.name,)
        number, place = divmod(self.rows, self.layout.block_rows)
        if number != self._number:
            self._block = {}  # release the old block first
            first = number * self.layout.block_rows
            rows = slice(first, min(first + self.layout.block_rows, self._stored.rows))
            self._block = {
                name: self._stored.arrays[name].native_bits(rows, self.layout.arrays[name].native)
                for name in self._row
                if self.comparison.variables is None or name in self.comparison.variables
            }
            self._number = number
        return tuple(
            name for name, bits in self._block.items() if (self._row[name] != bits[place]).any()
        )
