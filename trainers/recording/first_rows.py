"""The first rows of a parameter, until a complete step tells what its run holds, in which types.

They are kept in host memory. Then the run is created, with the state before the first step as its
first row.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch

from trajstore.schema import INTEGERS, VARIABLES, row_lengths, variables_of
from trajstore.store.writing.writer import RunWriter
from trajstore.trainers.recording.device_to_host import (
    Row,
    RowPlaces,
    Value,
    memory_in_transit,
    type_name,
)
from trajstore.trainers.recording.examples import EXAMPLE_INDEX, OF_HIDDEN_STATES
from trajstore.trainers.recording.kept_state import (
    Entry,
    find_kept,
    is_element,
    kept_elements,
    state_attribute,
    step_count,
)
from trajstore.trainers.recording.model_state import OF_ADAM
from trajstore.trainers.recording.parameters import RecordedParameter, last_layers, makes_logits
from trajstore.trainers.recording.planned_run import PlannedRun
from trajstore.trainers.recording.sharding import own_tokens
from trajstore.values.native_types import NATIVE_TYPES
from trajstore.values.optimizer_rule import MOMENTS


class FirstRows:
    """The rows of a parameter before its run exists.

    Parameters
    ----------
    planned : PlannedRun
    ids : tensor of int or None
        Recorded tokens; None for all.

    Attributes
    ----------
    W : tensor, (token, hidden)
        Recorded tokens of the parameter before the first step, on the CPU.
    other_state : list of str
        Names of what the optimizer keeps, but no row holds.
    """

    def __init__(self, planned: PlannedRun, ids: torch.Tensor | None) -> None:
        self.other_state: list[str] = []
        self._planned = planned
        self._options = planned.recording.options
        self._optimizer = planned.recording.optimizer
        self._notes = planned.recording.notes
        self._ids = ids
        self._rows: list[tuple[int, Row]] = []
        self.W = torch.empty(0, device="cpu")
        self._initial: Row = {}

    # The state before the first step -------------------------------------------------------------

    def take_initial(
        self, parameter: RecordedParameter, variables: Iterable[str], *, with_moments: bool
    ) -> bool:
        """Copy the state before the first step; return True if the optimizer had one."""
        summaries = self._planned.recording.summaries
        matrix = parameter.tensor
        self.W = own_tokens(matrix, self._ids).to("cpu", copy=True)
        self._initial = {} if summaries is None else summaries.initial()
        if (digests := self._planned.recording.digests) is not None:
            self._initial["params_digest"] = digests.of_parameters().cpu()
        if not with_moments:
            return True
        state = self._optimizer.state.get(matrix, {})
        count = step_count(state)
        elements = kept_elements(matrix, state)
        if state:
            missing = torch.full_like(self.W, float("nan"))
            self._initial |= {name: missing for name in MOMENTS if name in variables}
        for name, value in elements.items():
            self._initial[name] = own_tokens(value, self._ids).to("cpu", copy=True)
        self._initial |= {name: value.cpu() for name, value in count.items()}
        has_begun = bool(count) or self._planned.recording.loop.first_step > 0
        return has_begun or all(self.records_state(name, variables) for name in elements)

    def records_state(self, name: str, variables: Iterable[str]) -> bool:
        """Return True if a value that the optimizer keeps is recorded."""
        return name in variables or self._options.whole_state

    # Rows ----------------------------------------------------------------------------------------

    def may_add(self, name: str, variables: Iterable[str]) -> bool:
        """Return True if the run can have a variable of a name of the optimizer."""
        known = name in VARIABLES or name in self.other_state
        return not known and self.records_state(name, variables)

    def add(self, step: int, row: Row) -> None:
        """Add a complete row."""
        self._rows.append((step, row))

    def create_run(
        self, parameter: RecordedParameter, variables: tuple[str, ...]
    ) -> tuple[RunWriter, tuple[str, ...]]:
        """Create the run, without rows, with those of the variables that the last row has.

        Returns
        -------
        writer : RunWriter
        variables : tuple of str
        """
        last = self._rows[-1][1]
        state = self._planned.state
        kept: list[Entry] = []
        if self._options.whole_state:
            known, matrix = ((), parameter.tensor) if state is None else (state.kept, None)
            kept = find_kept(self._optimizer, known, matrix=matrix)
        self.other_state = [entry["name"] for entry in kept if entry["of"] == "other"]
        for name, empty in self._values_of_later_steps(parameter, kept).items():
            if name in variables or self.may_add(name, variables):
                variables = tuple(dict.fromkeys((*variables, name)))
                if name not in last and VARIABLES[name].row0 != "zero":
                    self._notes.add(
                        f"a step has no {name}, recorded as NaN; {remedies_for([name])}"
                    )
                last.setdefault(name, empty)
        of_run = variables_of(state_attribute(self._optimizer, kept))
        inputs = self._planned.recording.inputs
        if inputs is not None and "inputs" in variables and not inputs.are_observed:
            if "batch" in last and "inputs" not in self._options.required:
                variables = tuple(name for name in variables if name != "inputs")
            else:
                inputs.note_single()
        recorded = tuple(name for name in variables if name in last and name in of_run)
        self._note_lacks(parameter, [name for name in variables if name not in last])
        for _, row in self._rows:
            for name in recorded:
                if name not in row:
                    row[name] = torch.full_like(last[name], value_before_steps(name))
        types = {name: type_name(last[name].dtype) for name in recorded}
        room = row_lengths({name: tuple(last[name].shape) for name in types})
        if state is not None:
            self._initial |= state.initial()
        in_transit = memory_in_transit(parameter.tensor.device, (last[name] for name in recorded))
        return self._planned.create(types, room, in_transit, kept), recorded

    def _note_lacks(self, parameter: RecordedParameter, left_out: list[str]) -> None:
        """Note the variables that the run does not hold, each with its remedy."""
        required, state = self._options.required, self._planned.recording.state
        if lost := [name for name in left_out if name in required]:
            self._notes.add(f"{', '.join(lost)} not recorded: {remedies_for(lost)}")
        needless = {*MOMENTS, *OF_ADAM}  # not every optimizer has them
        if self._options.has_keyframes and not {"batch", "inputs"}.issubset(left_out):
            needless |= {"batch", "inputs"}  # one of them suffices
        if state is not None and state.draws_nothing:
            needless.add("random_state")
        model, head = self._planned.recording.model, parameter.head
        is_unembedded = head is None and last_layers(model, [len(parameter.tensor)])
        if not makes_logits(model, head) and not is_unembedded:
            needless.add("logits")
        if self.other_state:
            self._notes.mention(
                f"{', '.join(self.other_state)} not recorded: the optimizer keeps them in another "
                "form than one tensor of the parameter's shape or one number, or under a name of "
                "the run"
            )
        for names, remedy in _REMEDIES:  # of a tier, which takes what there is
            if lost := [name for name in left_out if name in names - required - needless]:
                self._notes.mention(f"{', '.join(lost)} not recorded: {remedy}")

    def write(self, writer: RunWriter, names: tuple[str, ...], first: int) -> tuple[int, int, Row]:
        """Write the state before the first step, that of step `first`, and the rows that are due.

        Returns
        -------
        rows, last_step : int
            Their number, and the step of the last one.
        row : dict of str to tensor
            Values of the last step, if it is not due; otherwise empty.
        """
        step, last = self._rows[-1]
        every = self._options.every
        due = [(number, row) for number, row in self._rows if number % every == 0]
        rows = [(first, self._initial_row(names, last)), *due]
        self._rows.clear()
        self._initial.clear()
        self.W = self.W.new_empty(0)
        places = RowPlaces(writer)
        for number, row in rows:
            self._write(places.next_row(), names, row)
            places.commit(number)
        return len(rows), rows[-1][0], {name: last[name] for name in names} if step % every else {}

    def _values_of_later_steps(self, parameter: RecordedParameter, entries: list[Entry]) -> Row:
        """Return values that the first complete step may lack, although later ones have them."""
        W, owner = self.W, parameter.optimizer
        whole: Mapping[Any, Any] = {} if owner is None else owner.state
        # Some optimizers also keep a count under a name.
        state = {p: kept for p, kept in whole.items() if isinstance(p, torch.Tensor)}
        values = {
            "grad": torch.full_like(W, float("nan")),
            "loss": W.new_full((), float("nan"), dtype=torch.float64),  # holds a loss of any type
            "grad_token_norm": W.new_full(W.shape[:1], float("nan"), dtype=torch.float32),
        }
        names = [*MOMENTS]
        if not state.get(parameter.tensor):  # it had no gradient yet
            names += [entry["name"] for entry in entries if entry["of"] == "element"]
        if any("step" in kept for kept in state.values()):
            values["step_count"] = torch.tensor(0.0, dtype=torch.float64)
        for name in names:
            for tensor, kept in state.items():
                same_type = tensor.dtype == parameter.tensor.dtype
                if same_type and is_element(name, tensor, kept.get(name)):
                    values[name] = torch.zeros_like(W, dtype=kept[name].dtype)
                    break
        return values

    def _write(self, places: Row, names: tuple[str, ...], row: Row) -> None:
        """Write a row, and release each value after its copy: rows can be as large as the model."""
        for name in names:
            value, place = row.pop(name), places[name]
            if (problem := why_misfit(name, value, place)) is not None:  # of an early row
                self._notes.add(f"{problem}; it is not recorded in such a step")
                value = torch.full_like(place, float("nan"))
            place.copy_(value)

    def _initial_row(self, names: Iterable[str], like: Row) -> Row:
        """Return the row before the first step, with the types of another row."""
        return {
            name: self._initial.get(name, self.W).to("cpu", like[name].dtype)
            if VARIABLES[name].row0 == "initial" or name in self._initial
            # One number, of the shape of the row: it takes no memory.
            else like[name].new_full((), value_before_steps(name)).expand_as(like[name])
            for name in names
        }


def why_unrecordable(name: str, value: Value, like: torch.Tensor) -> str | None:
    """Return a sentence if no run can hold a value for the tokens of a matrix `like` that."""
    dims = VARIABLES[name].dims[1:]
    lengths = dict(zip(("token", "hidden"), like.shape, strict=True))
    shaped = len(dims) == len(value.shape) and all(
        lengths.get(dim, length) == length for dim, length in zip(dims, value.shape, strict=True)
    )
    if shaped and type_name(value.dtype) in (("int64",) if name in INTEGERS else NATIVE_TYPES):
        return None
    return (
        f"{name} is not recorded: the training has {type_name(value.dtype)} of shape "
        f"{tuple(value.shape)}, expected floats with the dimensions {', '.join(dims) or 'none'}"
    )


def why_misfit(name: str, value: Value, place: torch.Tensor) -> str | None:
    """Return a sentence if a place, of the first row, cannot hold a value exactly."""
    # Vectors and matrices keep their type; a number is converted if no bit is lost. A run of
    # version 0.4 may have the loss in 16 bits, which round the mean of several micro-batches.
    joint = (place.dtype, torch.float32) if name == "loss" else (place.dtype,)
    fits = value.dtype == place.dtype or (
        not value.shape and torch.promote_types(value.dtype, place.dtype) in joint
    )
    if fits and value.shape == place.shape:
        return None
    return (
        f"{name} is now {type_name(value.dtype)} of shape {tuple(value.shape)}, but was "
        f"{type_name(place.dtype)} of shape {tuple(place.shape)} in the first row"
    )


def value_before_steps(name: str) -> float:
    """Return the value of a variable before a step has one."""
    return 0.0 if VARIABLES[name].row0 == "zero" else float("nan")


def remedies_for(missing: list[str]) -> str:
    """Return what a loop can do for variables that a step lacks."""
    remedies = [remedy for names, remedy in _REMEDIES if not names.isdisjoint(missing)]
    return "; ".join(remedies) or "leave it out of variables"


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
        {"inputs"},
        "the model gets no tensors; pass those that determine the step with observe(inputs=…)",
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
