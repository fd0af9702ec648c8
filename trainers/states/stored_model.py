"""Where a run stores its model and its optimizer, and the states that it holds."""

from __future__ import annotations

import itertools
import math
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from trajstore.arguments import ANY, exact_step
from trajstore.errors import FormatError, StepNotFound, VariableNotRecorded
from trajstore.provenance import RunAttributes
from trajstore.schema import INTEGERS, KEPT, KEYFRAMES, OPTIMIZER_STATE, STEP, kept_as
from trajstore.store.reading.array_reader import StoredArray, stored_array
from trajstore.store.reading.open_group import open_group, whole
from trajstore.store.reading.run_attributes import attribute, own_type
from trajstore.store.storage.remote_path import METADATA_KEY, RunPath, location
from trajstore.threads import default_threads
from trajstore.trainers.recording.digests import digests
from trajstore.trainers.recording.kept_state import ADAM_STATE
from trajstore.trainers.replays.recorded_rows import tensor_of
from trajstore.trainers.states.state import State
from trajstore.values.native_types import NativeType, as_bits, narrow, native_type
from trajstore.values.optimizer_rule import ADAM, MOMENTS, MOMENTUM, VECTORS, with_numbers

Array = npt.NDArray[Any]

_OF_STEPS = ("params_lr", "hyperparameters", "random_state", "scale", "skipped", "batch",
             *INTEGERS)  # fmt: skip

Row = Mapping[str, Array]
"""Native bits of one row, by variable."""


@dataclass(frozen=True, kw_only=True)
class StoredParameter:
    """One parameter of the recorded model. Tied parameters are one.

    Attributes
    ----------
    name : str
        First of its names in the model.
    tied : tuple of str
        Further names.
    shape : tuple of int
    natives : mapping of str to NativeType
        Its own type of each recorded quantity: ``W``, ``grad``, and what the optimizer keeps. A
        vector of parameters of several types has a wider one.
    variable : str
        Variable with its values: ``W``, or a vector of several parameters.
    offset : int
        First element in that vector.
    group : int or None
        Number of the optimizer's parameter group; None without an optimizer.
    position : int
        Place in that group; 0 for all if the run does not record it.
    requires_grad : bool
    """

    name: str
    tied: tuple[str, ...]
    shape: tuple[int, ...]
    natives: Mapping[str, NativeType] = field(hash=False)
    variable: str
    offset: int
    group: int | None
    position: int
    requires_grad: bool

    @property
    def names(self) -> tuple[str, ...]:
        """All names of the parameter in the model."""
        return (self.name, *self.tied)

    @property
    def native(self) -> NativeType:
        """Type of its values."""
        return self.natives["W"]

    def bits(self, row: Row, kind: str = "W") -> Array:
        """Return its bits in a row, in its own type: of ``W``, ``grad``, ``exp_avg`` and so on.

        Raises
        ------
        InvalidArgument
            If its own type, of 16 bits, does not hold a value.
        """
        values, native = row[variable_of(self.variable, kind)], self.natives[kind]
        if self.variable != "W":
            values = values[self.offset : self.offset + math.prod(self.shape)]
        if values.itemsize != native.itemsize:  # a vector that also holds a wider type
            values = narrow(values.view(f"f{values.itemsize}"), native)
        return values.reshape(self.shape)


def variable_of(variable: str, kind: str) -> str:
    """Name of the variable with a quantity of the parameters whose values are in `variable`.

    >>> variable_of("W", "grad"), variable_of("params", "exp_avg")
    ('grad', 'params_exp_avg')
    """
    return kind if variable == "W" else VECTORS.get(kind, f"params_{kind}")


def row_of(run: RunPath, steps: Array, step: int) -> int:
    """Return the row of a step of a run with these steps.

    Raises
    ------
    StepNotFound
        If the run does not hold it.
    """
    row = int(np.searchsorted(steps, step))
    if row < len(steps) and steps[row] == step:
        return row
    near = [str(neighbor) for neighbor in steps[max(row - 1, 0) : row + 1]]
    hint = f"the nearest: {' and '.join(near)}" if near else "it has no rows"
    raise StepNotFound(f"{run} has no row of step {step}; {hint}")


class StoredModel:
    """The model and optimizer of a run, with their rows. The steps are those of the opening.

    Parameters
    ----------
    run : path-like or str

    Attributes
    ----------
    run : path-like or str
    attributes : dict
        Attributes of the root.
    steps : ndarray of int64, (step,)
        Steps with the whole state.
    all_steps : ndarray of int64, (step,)
        Steps of all rows.
    has_keyframes : bool
        True if some rows only hold the whole state.
    buffers : list of dict
        Entries of the recorded buffers.
    parameters : tuple of StoredParameter
        In the order of the model's `named_parameters`.

    Raises
    ------
    RunNotFound, FormatError
        If there is no run.
    VariableNotRecorded
        If it does not hold all parameters.
    """

    def __init__(self, run: RunPath) -> None:
        self.run = run
        group: Any = open_group(run)
        self.attributes: dict[str, Any] = group.attrs.asdict()
        self._place = run
        self._of_steps: dict[str, Any] = {}  # what each step has, beside keyframes
        self.all_steps: Array = whole(run, group, STEP.name)
        self.has_keyframes = RunAttributes.of(self.attributes).keyframe_every is not None
        if self.has_keyframes:
            names = [name for name in _OF_STEPS if name in group]
            self._of_steps = {name: group[name] for name in names}
            self._place = location(run) / KEYFRAMES
            if not (self._place / METADATA_KEY).exists():
                raise VariableNotRecorded(f"{run} has no keyframes, or none yet")
            group = open_group(self._place)
            self.attributes = group.attrs.asdict() | {"created": self.attributes["created"]}
        table = self.attributes.get("parameters")
        if not table or any(entry["variable"] not in group for entry in table):
            raise VariableNotRecorded(
                f"{run} does not hold all parameters of its model; record it with the "
                "tier everything, or keyframes"
            )
        self._arrays: dict[str, Any] = dict(group.arrays())
        self.buffers: list[dict[str, Any]] = self.attributes.get("buffers", [])
        kept = self.attributes.get(OPTIMIZER_STATE, ())
        vectors = [entry["name"] for entry in kept if entry["of"] == "element"]
        kinds = dict.fromkeys([*VECTORS, *vectors])
        self.parameters = tuple(_stored(entry, self._arrays, run, kinds) for entry in table)
        steps = whole(self._place, group, STEP.name)
        # A killed recording may have committed a keyframe, but not its row.
        self.steps: Array = steps[steps <= self.all_steps.max(initial=-1)]
        self._stored: dict[str, StoredArray | None] = {}

    @property
    def restorable(self) -> Array:
        """Steps with the whole state; the random state after a step is in the row of the next."""
        if "random_state" not in self:
            return self.steps
        followed: Array = self.steps[np.isin(self.steps + 1, self.all_steps)]
        return followed

    def __contains__(self, variable: object) -> bool:
        return variable in self._of_steps or variable in self._arrays

    def variables(self, kind: str = "W") -> tuple[str, ...]:
        """Names of the variables with a quantity of all parameters, each once."""
        return tuple(dict.fromkeys(variable_of(p.variable, kind) for p in self.parameters))

    def number(self, step: int) -> int:
        """Return the row of a step.

        Raises
        ------
        InvalidArgument
            If it is not a whole number.
        StepNotFound
            If the run does not hold it.
        """
        wanted = exact_step(step, least=ANY)
        if self.has_keyframes and wanted in self.all_steps and wanted not in self.steps:
            before = self.steps[self.steps < wanted]
            raise StepNotFound(
                f"{self.run} has no keyframe of step {wanted}; develop it with your loop from the "
                f"keyframe {before[-1] if len(before) else self.steps[0]} "
                "(trajstore.trainers.develop), or choose a keyframe"
            )
        return row_of(self.run, self.steps, wanted)

    def state(self, step: int) -> State:
        """Return the state after a step.

        Raises
        ------
        StepNotFound
            If the run does not hold it.
        VariableNotRecorded
            If it does not hold the whole state of its optimizer.
        FormatError
            If a keyframe does not fit its digests.
        """
        kept = self.kept(step)
        ((_, weights),) = self.weights([step])
        return State(step=step, weights=weights, kept=kept)

    def weights(self, steps: Iterable[int]) -> Iterator[tuple[int, dict[str, torch.Tensor]]]:
        """Read the parameters and recorded buffers after steps; a block of rows is decoded once.

        Parameters
        ----------
        steps : iterable of int
            Increasing.

        Yields
        ------
        step : int
        weights : dict of str to tensor
            Copies, by the first name of each parameter.

        Raises
        ------
        StepNotFound
            If the run does not hold a step; raised before the first one is read.
        FormatError
            If a keyframe does not fit its digests.
        """
        variables = [*self.variables(), *(["buffers"] if self.buffers else [])]
        for step, row in self.rows(steps, variables):
            weights = {p.name: tensor_of(p.bits(row), p.native) for p in self.parameters}
            self._check_digests(step, [*weights.values()])
            for entry in self.buffers:
                values = row["buffers"][entry["offset"] :][: math.prod(entry["shape"])]
                buffer = tensor_of(values, self.native("buffers")).view(entry["shape"])
                weights[entry["name"]] = buffer.to(getattr(torch, entry["dtype"]))
            yield step, weights

    def rows(self, steps: Iterable[int], variables: Sequence[str]) -> Iterator[tuple[int, Row]]:
        """Read native bits of variables after increasing steps: views, valid until the next."""
        numbers = [self.number(step) for step in steps]
        arrays = [self._arrays[name] for name in variables]
        length = min(int((array.shards or array.chunks)[0]) for array in arrays)
        for _, block in itertools.groupby(numbers, lambda number: number // length):
            inside = [*block]
            first, stop = inside[0], inside[-1] + 1
            read = {name: self._read(name, first, stop) for name in variables}
            for number in inside:
                row = {name: values[number - first] for name, values in read.items()}
                yield int(self.steps[number]), row

    def native(self, variable: str) -> NativeType:
        """Return the native type of a variable."""
        return native_type(self._arrays[variable].attrs["native_dtype"])

    def value(self, variable: str, step: int) -> Array:
        """Read one row of a variable that is not a parameter, such as ``params_lr``."""
        if variable in self._of_steps:
            return np.asarray(self._of_steps[variable][row_of(self.run, self.all_steps, step)])
        return np.asarray(self._arrays[variable][self.number(step)])

    def settings(self, step: int) -> list[dict[str, float]]:
        """Return the known numbers that the step used, for each parameter group.

        That is the rate ``lr``, and the hyperparameters of the group of W, by their names in
        `trajstore.values.optimizer_rule`.
        """
        rates = self.value("params_lr", step).tolist()
        settings = [{} if math.isnan(rate) else {"lr": rate} for rate in rates]
        if not {"hyperparameters", "hyperparameter"} <= self._arrays.keys():
            return settings
        names = map(str, self._arrays["hyperparameter"][...])
        values = self.value("hyperparameters", step).tolist()
        known = {name: v for name, v in zip(names, values, strict=True) if not math.isnan(v)}
        for parameter in self.parameters:
            if parameter.variable == "W" and parameter.group is not None:
                settings[parameter.group] |= known
        return settings

    def state_dicts(self, step: int) -> list[dict[str, Any]]:
        """Return the state dict of each optimizer after a step, as `optimizer_state_at`."""
        states = self.kept(step)
        groups = RunAttributes.of(self.attributes).optimizer.groups
        dicts: dict[str | None, dict[str, Any]] = {}
        for number, (group, used) in enumerate(zip(groups, self.settings(step), strict=True)):
            state_dict = dicts.setdefault(group.get("name"), {"state": {}, "param_groups": []})
            members = [p for p in self.parameters if p.group == number]
            members.sort(key=lambda p: p.position)
            first = sum(len(each["params"]) for each in state_dict["param_groups"])
            numbers = range(first, first + len(members))
            state_dict["state"] |= {
                n: states[p.name] for n, p in zip(numbers, members, strict=True) if p.name in states
            }
            settings = with_numbers(group["hyperparameters"], used).items()
            values = {key: tuple(v) if isinstance(v, list) else v for key, v in settings}
            state_dict["param_groups"].append({**values, "params": [*numbers]})
        return [*dicts.values()]

    def kept(self, step: int) -> dict[str, dict[str, Any]]:
        """Return what the optimizers keep after a step, by the name of each parameter that has it.

        Raises
        ------
        VariableNotRecorded, StepNotFound
            As `optimizer_state_at`.
        """
        self.number(step)
        self._check_kept()
        entries = self.attributes.get(OPTIMIZER_STATE)
        if entries is not None:
            marks = self.value(KEPT.name, step)
        elif "exp_avg" in self:
            entries, marks = ADAM_STATE, (self.value("params_count", step) > 0) * 7
        else:
            return {}
        names = {entry["name"]: kept_as(entry["name"], entry["of"])[-1] for entry in entries}
        vectors = [entry["name"] for entry in entries if entry["of"] == "element"]
        variables = [v for name in vectors for v in self.variables(name) if v in self]
        ((_, row),) = self.rows([step], variables) if variables else ((step, {}),)
        numbers = {
            name: self.value(variable, step)
            for name, variable in names.items()
            if name not in vectors and variable in self
        }
        states: dict[str, dict[str, Any]] = {}
        for number, parameter in enumerate(self.parameters):
            for entry in (e for bit, e in enumerate(entries) if int(marks[number]) >> bit & 1):
                name, values = entry["name"], states.setdefault(parameter.name, {})
                variable = variable_of(parameter.variable, name) if name in vectors else names[name]
                if variable not in self:
                    raise VariableNotRecorded(
                        f"{self.run} does not hold {variable} of {parameter.name}"
                    )
                if name in vectors:
                    values[name] = tensor_of(parameter.bits(row, name), parameter.natives[name])
                else:
                    values[name] = _number(numbers[name][number], entry["type"])
        return states

    def _check_kept(self) -> None:
        """Check that the run holds the whole state of its optimizer.

        Raises
        ------
        VariableNotRecorded
            If it does not.
        """
        optimizer = RunAttributes.of(self.attributes).optimizer
        groups, name = optimizer.groups, optimizer.rule
        kept, missing = self.attributes.get(OPTIMIZER_STATE), []
        if not groups:
            missing = ["parameter groups"]
        elif kept is not None:
            is_whole = KEPT.name in self
            missing = [e["name"] for e in kept if e["of"] == "other" or not is_whole]
        elif name in ADAM:
            trained = [p for p in self.parameters if p.group is not None and p.requires_grad]
            names = dict.fromkeys(variable_of(p.variable, "exp_avg") for p in trained)
            missing = [name for name in names if name not in self]
            if any(group["hyperparameters"].get("amsgrad") for group in groups):
                missing.append("max_exp_avg_sq")
        elif name == "SGD":
            if any(group["hyperparameters"].get("momentum") for group in groups):
                missing = ["momentum_buffer"]
        else:
            missing = ["state"]
        if missing:
            raise VariableNotRecorded(
                f"{self.run} does not hold the {', '.join(missing)} of its optimizer "
                f"{optimizer.path or 'unknown'}; the tier everything holds what an optimizer keeps "
                "as numbers, and in its parameters' shape"
            )

    def _check_digests(self, step: int, parameters: Sequence[torch.Tensor]) -> None:
        """Compare the parameters of a keyframe with their digests; other rows have a checksum."""
        if "params_digest" not in self._of_steps:
            return
        wrong = digests(parameters).numpy() != self.value("params_digest", step)
        if wrong.any():
            names = [self.parameters[number].name for number in np.flatnonzero(wrong)]
            older = self.steps[self.steps < step]
            raise FormatError(
                f"{self.run}: the keyframe of step {step} does not fit its digest of "
                f"{', '.join(names)}; one of them is damaged, so use "
                + (f"the keyframe of step {older[-1]}" if len(older) else "a copy of the run")
            )

    def _read(self, name: str, first: int, stop: int) -> Array:
        array, native = self._arrays[name], self.native(name)
        if name not in self._stored:
            self._stored[name] = self._local(name)
        stored = self._stored[name]
        rows = slice(first, stop)
        if stored is not None:
            return stored.native_bits(rows, native)
        return as_bits(np.asarray(array[rows]), native, name)

    def _local(self, name: str) -> StoredArray | None:
        if not isinstance(location(self.run), Path):
            return None
        stored = stored_array(self._place, name, self._arrays[name])
        return None if stored is None else replace(stored, threads=default_threads())


def _stored(
    entry: Mapping[str, Any], arrays: Mapping[str, Any], run: RunPath, kinds: Iterable[str]
) -> StoredParameter:
    """Return an entry of the attribute ``parameters``, whose form was checked on opening."""
    natives: dict[str, NativeType] = {}
    for kind in kinds:
        name = variable_of(entry["variable"], kind)
        if name in arrays:
            joint = native_type(arrays[name].attrs["native_dtype"])
            natives[kind] = native = native_type(own_type(entry, kind, joint.name))
            if native != joint and native.itemsize >= joint.itemsize:
                raise FormatError(
                    f"{run}: {entry['name']} is {native.name}, but {name} is {joint.name}; the run "
                    "is damaged"
                )
    parameter = StoredParameter(
        name=entry["name"],
        tied=tuple(entry.get("tied", ())),
        shape=tuple(entry["shape"]),
        natives=natives,
        variable=entry["variable"],
        offset=entry.get("offset", 0),
        group=entry["group"],
        position=entry.get("position", 0),
        requires_grad=entry["requires_grad"],
    )
    stored = math.prod(arrays[parameter.variable].shape[1:]) if parameter.variable in arrays else 0
    end = parameter.offset + math.prod(parameter.shape)
    if end > stored:
        raise FormatError(
            f"{run}: {parameter.name} ends at element {end} of {parameter.variable}, which has "
            f"{stored}; the run is damaged"
        )
    return parameter


def rows_hold_state(config: Mapping[str, Any], variables: Collection[str]) -> bool:
    """Return True if each row holds the whole state of a training from a configuration.

    Rows lack the growth of a gradient scaler.

    Parameters
    ----------
    config : mapping
    variables : collection of str
        Recorded variables.
    """
    if attribute(config, "training", "autocast") == "float16":
        return False
    kept: tuple[str, ...] = (*MOMENTS, *(variable_of("params", name) for name in MOMENTS))
    kept += ("params_count",)
    if attribute(config, "optimizer", "name") == "sgd":
        momentum = (KEPT.name, *kept_as(MOMENTUM, "element"))
        kept = momentum if attribute(config, "optimizer", "momentum") else ()
    return {"W", "params", "params_lr", *kept} <= {*variables}


def _number(value: float, kind: str) -> Any:
    """Return a number in the type in which the optimizer keeps it."""
    python = {"bool": bool, "int": int, "float": float}.get(kind)
    if python is not None:
        return python(value)
    return torch.tensor(value, dtype=getattr(torch, kind), device="cpu")
