"""`what_if` writes a counterfactual run: W from the recorded gradients and another optimizer.

`Counterfactual` computes its rows; other variables are copied from the recorded run.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from trajstore.arguments import ANY, checks_types, exact
from trajstore.defaults import EXCHANGE_MEMORY
from trajstore.errors import InvalidArgument, StepNotFound
from trajstore.provenance import RunAttributes
from trajstore.schema import EVERYTHING, INTEGERS, MODEL, OPTIMIZER_STATE, RECORDED, VARIABLES
from trajstore.store.metadata.metadata_form import FINGERPRINT
from trajstore.store.reading.tiled_reader import TiledRun, open_tiled
from trajstore.store.writing.create import check_local_target, staged_run
from trajstore.store.writing.writer import RunWriter
from trajstore.trainers.counterfactuals.settings import (
    changed_inputs,
    changed_schedule,
    changed_settings,
)
from trajstore.trainers.process_mode import process_mode
from trajstore.trainers.recording.device_to_host import type_name
from trajstore.trainers.recording.notes import provenance
from trajstore.trainers.recording.options import Tokens, select_tokens
from trajstore.trainers.replays.findings import CannotReplay, replay_device
from trajstore.trainers.replays.optimizer_steps import OptimizerSteps, RecordedOptimizer
from trajstore.trainers.replays.recorded_rows import (
    DERIVED,
    Placement,
    RecordedRow,
    RecordedRows,
    tensor_of,
)
from trajstore.values.native_types import NATIVE_TYPES, NativeType, as_bits, native_type
from trajstore.values.optimizer_rule import MOMENTS

Array = npt.NDArray[Any]

_WINDOW = 128 << 20

CAVEAT = (
    "the gradients are those of the recorded run, independent of the new W; the result shows what "
    "another optimizer computes from them, not a training run with these settings"
)
"""Note that every counterfactual carries."""

_FORMS = ("tensors", "sparse_gradient")  # of hyperparameters and of the gradient

OPTIMIZER_VARIABLES = (
    "W", *MOMENTS, "lr", "hyperparameters", "clip_coef", "W_step_norm", "W_ulp_l1", "cells",
)  # fmt: skip
"""Variables that settings of the optimizer change; all others are those of the recorded run."""


class Counterfactual:
    """Computes the rows of a counterfactual. Most errors are found before the first row.

    Parameters
    ----------
    source : TiledRun
    assignments : sequence of str
    at, tokens, seed
        As for `what_if`.
    device : torch.device

    Attributes
    ----------
    source : TiledRun
    rows : RecordedRows
    settings : ChangedSettings
    steps : OptimizerSteps
        With the changed settings.
    recorded : OptimizerSteps
        As recorded: they give the initial state.
    placement : Placement
        Placement of the chosen tokens.
    first : int
        Row with the initial state.
    variables : dict of str to NativeType
        Variables of the new run.
    first_difference : int or None
        First step after which W or a moment differs from the recorded one. It is searched only if
        no setting changes, and is known after all rows.

    Raises
    ------
    StepNotFound, ConfigError, CannotReplay, InvalidArgument
        As `what_if`.
    """

    def __init__(
        self,
        source: TiledRun,
        assignments: Sequence[str],
        *,
        at: int | None,
        tokens: Tokens,
        seed: int | None,
        device: torch.device,
    ) -> None:
        self.source, self.rows = source, (rows := RecordedRows(source))
        self.placement = Placement(source, device, _chosen(source, tokens))
        self.recorded = OptimizerSteps(source, rows, self.placement, forced=False)
        self.first = first = _row_of(rows, at)
        self.settings = settings = changed_settings(
            source.attributes, rows.natives["W"].name, assignments, seed=seed
        )
        largest = rows.largest_hyperparameters
        recorded, changed = RunAttributes.of(source.attributes).optimizer.stored, settings.optimizer
        if changed["class"] == recorded["class"]:
            changed = changed | {name: recorded[name] for name in _FORMS if name in recorded}
        self._optimizer = changed
        optimizer = RecordedOptimizer(
            changed,
            getattr(torch, settings.weights_dtype),
            device,
            {name: value for name, value in largest.items() if name in settings.kept},
        )
        inputs = changed_inputs(self.recorded, optimizer, settings, first)
        self.steps = self.recorded.changed(optimizer, inputs)
        for number in range(1, first + 1) if self.recorded.rebuilt else ():
            self.recorded.check(number)
        fresh = {*optimizer.state_names} - {*self.recorded.optimizer.state_names}
        if first and (fresh or not settings.keeps_state):
            name = settings.optimizer["class"].rpartition(".")[2]
            raise CannotReplay(
                f"{name} with these settings has no state at step {rows.steps[first]}, because "
                "the run had another optimizer; start at the first row, without at=…"
            )
        for number in range(first + 1, len(rows)):
            self.steps.check(number)
        self.variables = self._variables()
        self.first_difference: int | None = None

    def __iter__(self) -> Iterator[tuple[RecordedRow, dict[str, Array]]]:
        """Yield each row of the new run with its bits."""
        begun = self._begin()
        yield begun, self._values(begun, None)
        compared = [
            name
            for name in ("W", *self.recorded.optimizer.state_names)
            if name in self.variables and not self.settings.given
        ]
        read = [n for n in self.variables if n in VARIABLES and n not in OPTIMIZER_VARIABLES]
        names = ["grad", *read, *compared]
        for row in self.rows.read(names, first=self.first + 1, window=_WINDOW):
            last = self.steps.optimizer.value("W").clone()
            self.steps.take(row)
            values = self._values(row, last)
            if self.first_difference is None and any(
                not np.array_equal(values[name], self.placement.of_tokens(row.bits[name]))
                for name in compared
            ):
                self.first_difference = row.step
            yield row, values

    def _begin(self) -> RecordedRow:
        """Set the optimizer to the recorded state of the first row, and return that row.

        State that is not recorded is that of the recorded optimizer after all steps from row 0 on.
        """
        recorded, first, state, count = self.recorded, self.first, {}, 0
        names = {*self.variables, *recorded.recorded}
        (row,) = self.rows.read(names, first=first, stop=first + 1)
        if self.settings.keeps_state:
            start = 0 if recorded.rebuilt else first
            (before,) = self.rows.read(recorded.recorded, first=start, stop=start + 1)
            recorded.begin(before)
            for step in self.rows.read(["grad"], first=start + 1, stop=first + 1, window=_WINDOW):
                recorded.take(step)
            state = recorded.optimizer.kept(recorded.optimizer.state_names)
            count = recorded.steps_taken(row)
        weights = self.placement.parameter(row.bits["W"], self.rows.natives["W"])
        self.steps.optimizer.begin(weights, state, count)
        return row

    def _values(self, row: RecordedRow, last: torch.Tensor | None) -> dict[str, Array]:
        """Return the bits of a row of the new run; `last` is W before its step."""
        values: dict[str, Array] = {}
        inputs, value = self.steps.inputs, self.steps.optimizer.value
        given: dict[str, Array] = {
            "lr": inputs.lr[row.number].view(np.uint64),
            "hyperparameters": np.array([*inputs.numbers[row.number].values()]).view(np.uint64),
            "clip_coef": inputs.clip_coef[row.number],
        }
        for name, native in self.variables.items():
            source, derive = DERIVED.get(name, ("", None))
            if name in ("W", *self.steps.optimizer.state_names):
                values[name] = self._bits(value(name))
            elif derive and source == "W" and (last is not None or name == "cells"):
                values[name] = self._bits(derive(value("W"), value("W") if last is None else last))
            elif name in given:
                values[name] = given[name]
            elif name == "W_ulp_l1" and self.variables["W"] != self.rows.natives["W"]:
                # The motion before this row was counted in spacings of another type.
                values[name] = np.full_like(self._recorded(name, row), native.nan_bits)
            else:
                values[name] = self._recorded(name, row)
        return values

    def _recorded(self, name: str, row: RecordedRow) -> Array:
        """Return the recorded bits of the chosen tokens, in the type of the new run."""
        if VARIABLES[name].dims == ("step",):
            scalar: Array = self.rows.scalars(name)[row.number]
            return scalar
        bits, native, target = row.bits[name], self.rows.natives[name], self.variables[name]
        if "token" in VARIABLES[name].dims:
            bits = self.placement.of_tokens(bits)
        if native == target:
            return bits
        return as_bits(tensor_of(bits, native).to(getattr(torch, target.name)), target, name)

    def _bits(self, tensor: torch.Tensor) -> Array:
        return self.placement.bits(tensor, native_type(type_name(tensor.dtype)))

    def _variables(self) -> dict[str, NativeType]:
        """Return the variables of the new run with their types."""
        types, rows, optimizer = {}, self.rows, self.steps.optimizer
        for name in dict.fromkeys([*RECORDED, *optimizer.state_names]):
            if name in (*MODEL, *EVERYTHING, *INTEGERS):  # of the recorded model, not of another
                continue
            if name in ("W", "grad") and name in rows:
                types[name] = NATIVE_TYPES[self.settings.weights_dtype]
            elif name in MOMENTS or name not in VARIABLES:
                kept = name in rows or not self.settings.keeps_state
                if kept and name in optimizer.starts:
                    types[name] = NATIVE_TYPES[type_name(optimizer.example[name].dtype)]
            elif name in rows:
                types[name] = rows.natives[name]
        return types

    def notes(self, remarks: Sequence[str]) -> tuple[str, ...]:
        """Return notes about the result when all rows are computed, with those of the writer."""
        notes = [CAVEAT] if self.settings.given else []
        if not self.settings.keeps_state:
            notes.append("the optimizer has another class and starts without a state")
        left_out = [name for name in self.rows.natives if name not in self.variables]
        if left_out:
            notes.append(
                f"{', '.join(left_out)}: left out, because the gradients of W do not determine them"
            )
        if self.variables["W"].itemsize < self.rows.natives["W"].itemsize:
            notes.append(f"gradients were rounded to {self.variables['W'].name} first")
        notes += remarks
        if not self.settings.given and self.first_difference is None:
            notes.append("no setting was changed; the result equals the recorded run, bit for bit")
        elif not self.settings.given:
            notes.append(
                "no setting was changed, but W or a moment differs from the recorded run from step "
                f"{self.first_difference} on. Either the run was changed after recording, which "
                "`trajstore verify` detects, or this machine or version of torch rounds differently"
            )
        return tuple(notes)

    def writer(self, path: Path, origin: Mapping[str, Any], **options: Any) -> RunWriter:
        """Return the writer of the new run.

        Parameters
        ----------
        path : Path
        origin : mapping
            Identifies the run with the gradients.
        **options
            Of `RunWriter.create`.
        """
        source, of_tokens = self.source, self.placement.of_tokens
        populations = {name: of_tokens(values) for name, values in source.populations.items()}
        coordinates: dict[str, Any] = {
            name: of_tokens(values)
            for name, values in source.coordinates.items()
            if name not in populations
        }
        return RunWriter.create(
            path,
            hidden=source.series["W"].shape[2],
            hyperparameter=tuple(self.steps.inputs.numbers[0]),
            variables={name: native.name for name, native in self.variables.items()},
            config=self.settings.config,
            attributes=self._attributes(origin),
            encoding=source.attributes.get("encoding", "delta"),
            buffers=1,
            commit_every=None,
            fsync=False,  # the complete run is flushed before it gets its name
            populations=populations,
            **source.row_lengths,
            **coordinates,
            **options,
        )

    def _attributes(self, origin: Mapping[str, Any]) -> dict[str, Any]:
        """Return the attributes of the root of the new run."""
        before, settings = self.source.attributes, self.settings
        of_settings = {*OPTIMIZER_VARIABLES, *self.steps.optimizer.state_names}
        what_if = {
            **origin,
            "from_step": int(self.rows.steps[self.first]),
            "settings": [f"{name}={value}" for name, value in settings.given.items()],
            "of_recorded_path": sorted(set(self.variables) - of_settings),
            "caveat": CAVEAT,
        }
        schedule = changed_schedule(before, settings)
        recorded = RunAttributes.of(before)
        known = {"corpus": recorded.corpus, "tokenizer": recorded.tokenizer}
        known = {name: value for name, value in known.items() if value}
        attributes: dict[str, Any] = {
            "optimizer": {**self._optimizer, "schedule": schedule},
            "provenance": provenance(self.placement.device, known | {"what_if": what_if}),
        }
        if "recording" in before:
            attributes["recording"] = before["recording"]
        if state_names := [name for name in self.variables if name not in VARIABLES]:
            attributes[OPTIMIZER_STATE] = [{"name": name, "of": "element"} for name in state_names]
        return attributes


def _row_of(rows: RecordedRows, step: int | None) -> int:
    if not len(rows):
        raise CannotReplay("the run has no rows yet; record at least two steps")
    if step is None:
        return 0
    if step == rows.steps[-1]:
        raise CannotReplay(f"{step} is the last step of the run; give an earlier one: at=…")
    matches = np.flatnonzero(rows.steps == step)
    if not matches.size:
        raise StepNotFound(
            f"step {step} was not recorded; the run holds steps {rows.steps[0]} to {rows.steps[-1]}"
        )
    return int(matches[0])


def _chosen(source: TiledRun, tokens: Tokens) -> Array | None:
    """Return the positions of the chosen tokens in the run; None for all."""
    recorded = source.coordinates["token"].astype(np.int64)
    if isinstance(tokens, str):
        return select_tokens(tokens, len(recorded), source.coordinates.get("is_dead"))
    requested = np.unique(exact("tokens", tokens, "int64", least=ANY))
    missing = requested[~np.isin(requested, recorded)]
    if not requested.size:
        raise InvalidArgument("tokens: got no ids, expected at least one; give ids of the run")
    if missing.size:
        raise InvalidArgument(
            f"tokens: the run lacks {', '.join(map(str, missing[:5]))}; give ids of the run"
        )
    return np.flatnonzero(np.isin(recorded, requested))


@dataclass(frozen=True, kw_only=True)
class WhatIf:
    """A finished counterfactual.

    Attributes
    ----------
    path : Path
    rows : int
    first_step, last_step : int
    notes : tuple of str
        Notes about its interpretation.
    """

    path: Path
    rows: int
    first_step: int
    last_step: int
    notes: tuple[str, ...]


@checks_types
def what_if(
    run: str | os.PathLike[str],
    output: str | os.PathLike[str],
    settings: Sequence[str] = (),
    *,
    at: int | None = None,
    tokens: Tokens = "all",
    seed: int | None = None,
    memory: int | str = EXCHANGE_MEMORY,
    overwrite: bool = False,
    on_progress: Callable[[int, int], None] | None = None,
) -> WhatIf:
    """Apply the recorded gradients of a run with other settings, and write a new run (open loop).

    The real optimizer of `torch.optim` starts from the recorded state and takes each step with its
    recorded gradient. Without settings the result equals the recorded run, bit for bit. Variables
    that do not depend on the optimizer (gradient, loss, logits, norms of gradients) are copied from
    the recorded run.

    Parameters
    ----------
    run : path-like
        A run with W, its gradient, ``lr`` and ``clip_coef`` of every step.
    output : path-like
        Path of the new run, by custom ``NAME.zarr``; it appears there when it is complete, in the
        encoding of `run`.
    settings : sequence of str
        ``section.field=value`` as for a recording, such as ``optimizer.lr=3e-4``,
        ``optimizer.state_dtype=float32``, ``model.dtype=float32``, ``schedule.name=constant``,
        ``training.max_grad_norm=0`` or ``rounding=stochastic``.
    at : int, optional
        Step whose recorded state is the start; default: the first row.
    tokens : {'all', 'dead', 'live'} or array_like of int
        Tokens whose rows are computed; each element of W is independent of the others.
    seed : int, optional
        Seed of stochastic rounding; default: 0.
    memory : int or str, default 320 MiB
        Memory of the writer's buffer.
    overwrite : bool
        Replace an existing run.
    on_progress : callable, optional
        Called with the number of finished rows and the number of all rows.

    Returns
    -------
    WhatIf

    Raises
    ------
    RunNotFound, FormatError
        If there is no run, or a chunk is damaged.
    RunExists
        If `output` exists.
    StepNotFound
        If there is no row of `at`.
    ConfigError
        If a setting does not exist, does not act on recorded gradients, or is missing in the
        optimizer.
    CannotReplay
        If the run lacks gradients of every step, the optimizer or its state.

    Examples
    --------
    >>> found = what_if("everything.zarr", "other.zarr", ["optimizer.lr=1e-4"])
    >>> found.rows, found.first_step, found.last_step
    (4, 0, 3)
    """
    target = check_local_target(output, overwrite=overwrite)
    if target.exists() and target.samefile(run):
        raise InvalidArgument(
            f"{output} is the run with the gradients; choose another path for the new run"
        )
    source = open_tiled(run)
    device = replay_device(source.attributes)
    remarks: list[str] = []
    with process_mode(device.threads, device.modes):
        planned = Counterfactual(
            source, settings, at=at, tokens=tokens, seed=seed, device=device.device
        )
        origin: dict[str, Any] = {
            "run": os.path.basename(os.path.normpath(run)),
            "created": source.attributes.get("created"),
            FINGERPRINT: source.attributes.get(FINGERPRINT),
            "tokens": tokens if isinstance(tokens, str) else "a list of ids",
        }
        if earlier := RunAttributes.of(source.attributes).what_if:
            origin["earlier"] = earlier
        with (
            staged_run(target, overwrite=overwrite) as path,
            planned.writer(path, origin, memory=memory, on_note=remarks.append) as new,
        ):
            for count, (row, values) in enumerate(planned, 1):
                for name, place in new.next_row().items():
                    place[...] = values[name]
                new.commit_row(row.step)
                if on_progress is not None:
                    on_progress(count, len(planned.rows) - planned.first)
    steps = planned.rows.steps[planned.first :].tolist()
    return WhatIf(
        path=target,
        rows=len(steps),
        first_step=steps[0],
        last_step=steps[-1],
        notes=(*device.notes, *planned.notes(remarks)),
    )
