"""`what_if` writes a counterfactual run: W from the recorded gradients and another optimizer.

`CounterfactualRows` computes its rows; other variables are copied from the recorded run.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from trajstore.arguments import checks_types
from trajstore.errors import InvalidArgument, argument
from trajstore.schema import VARIABLES
from trajstore.store.metadata.metadata_form import FINGERPRINT
from trajstore.store.reading.run_attributes import attribute
from trajstore.store.reading.tiled_reader import open_tiled
from trajstore.store.writing.create import check_local_target, staged_run
from trajstore.store.writing.writer import RunWriter
from trajstore.trainers.counterfactuals.planned_counterfactual import (
    OPTIMIZER_VARIABLES,
    PlannedCounterfactual,
)
from trajstore.trainers.process_mode import process_mode
from trajstore.trainers.recording.device_summaries import token_norm, ulp_l1
from trajstore.trainers.recording.device_to_host import type_name
from trajstore.trainers.recording.options import Tokens
from trajstore.trainers.replays.recorded_optimizer import RecordedOptimizer, replay_device
from trajstore.trainers.replays.recorded_rows import RecordedRow, RecordedRows, tensor_of
from trajstore.trainers.replays.replay_result import CannotReplay
from trajstore.units import EXCHANGE_MEMORY
from trajstore.values.native_types import as_bits, native_type

Array = npt.NDArray[Any]

_WINDOW = 128 << 20


class CounterfactualRows:
    """Iterator that computes row after row.

    Parameters
    ----------
    planned : PlannedCounterfactual

    Attributes
    ----------
    first_difference : int or None
        First step after which W or a moment differs from the recorded one. It is searched only if
        no setting changes, and is known after all rows.
    """

    def __init__(self, planned: PlannedCounterfactual) -> None:
        self._planned = planned
        self._rows = planned.rows
        self._variables = planned.variables
        self.first_difference: int | None = None
        self._compared = [
            name
            for name in ("W", *planned.recorded.state_names)
            if name in planned.variables and not planned.settings.given
        ]

    def __iter__(self) -> Iterator[tuple[RecordedRow, dict[str, Array]]]:
        """Yield each row of the new run with its bits."""
        first = self._planned.first
        names = {*self._variables, *self._planned.recorded.state_names}
        (row,) = self._rows.read(names, first=first, stop=first + 1)
        self._begin(row)
        recorded = {name: self._rows.scalar(name, first) for name in ("lr", "clip_coef")}
        values = self._values(row, None) | recorded
        if "hyperparameters" in values:
            before = self._rows.hyperparameters(first)
            known = [before.get(name, math.nan) for name in self._planned.numbers[first]]
            values["hyperparameters"] = np.array(known).view(np.uint64)
        if "W_ulp_l1" in values and self._variables["W"] != self._rows.natives["W"]:
            # The motion before this row was counted in spacings of another type.
            values["W_ulp_l1"] = np.full_like(
                values["W_ulp_l1"], self._variables["W_ulp_l1"].nan_bits
            )
        yield row, values
        read = [
            name
            for name in self._variables
            if name in VARIABLES and name not in OPTIMIZER_VARIABLES
        ] + self._compared
        has_motion = "W_step_norm" in self._variables or "W_ulp_l1" in self._variables
        for row in self._rows.read(read, first=first + 1, window=_WINDOW):
            number, optimizer = row.number, self._planned.optimizer
            last = optimizer.value("W").clone() if has_motion else None
            rate, clip_coef = float(self._planned.lr[number]), self._planned.clip_coef[number]
            self._step(optimizer, row, rate, clip_coef, self._planned.numbers[number])
            values = self._values(row, last)
            if self.first_difference is None and not self._is_as_recorded(row, values):
                self.first_difference = row.step
            yield row, values

    def _is_as_recorded(self, row: RecordedRow, values: dict[str, Array]) -> bool:
        return all(
            np.array_equal(values[name], self._planned.of_tokens(row.bits[name]))
            for name in self._compared
        )

    def _begin(self, row: RecordedRow) -> None:
        """Set the optimizer to the recorded state of a row."""
        planned, names = self._planned, self._planned.recorded.state_names
        count = self._rows.steps_taken(row.number)
        state = {}
        if count and planned.needs_rebuilding:
            self._rebuild(row.number)
            state = {name: planned.recorded.value(name) for name in names}
        elif count:
            state = {name: self._parameter(name, row) for name in names}
        if state and row.number == 0 and not any(value.any() for value in state.values()):
            raise CannotReplay(
                f"the optimizer's state at step {row.step} was not recorded, because recording "
                "began there; start a step later (" + argument("at") + ")"
            )
        planned.optimizer.begin(self._parameter("W", row), state, count)

    def _rebuild(self, last: int) -> None:
        """Have the recorded optimizer take all recorded steps up to a row."""
        recorded, rows = self._planned.recorded, self._rows
        (start,) = rows.read(["W"], stop=1)
        recorded.begin(self._parameter("W", start), {}, 0)
        for row in rows.read(["grad"], first=1, stop=last + 1, window=_WINDOW):
            rate, clip_coef = rows.value("lr", row.number), rows.scalar("clip_coef", row.number)
            self._step(recorded, row, rate, clip_coef, rows.hyperparameters(row.number))

    def _step(
        self,
        optimizer: RecordedOptimizer,
        row: RecordedRow,
        rate: float,
        clip_coef: Array,
        numbers: dict[str, float],
    ) -> None:
        """Take the step of a row, unless it was skipped."""
        if not self._rows.idle[row.number]:
            factor = tensor_of(clip_coef, self._rows.natives["clip_coef"])
            optimizer.step(self._parameter("grad", row), factor, rate, numbers)

    def _parameter(self, name: str, row: RecordedRow) -> torch.Tensor:
        return self._planned.placement.parameter(
            self._planned.of_tokens(row.bits[name]), self._rows.natives[name]
        )

    def _bits(self, tensor: torch.Tensor) -> Array:
        native = native_type(type_name(tensor.dtype))
        return self._planned.placement.bits(tensor, native)

    def _values(self, row: RecordedRow, last: torch.Tensor | None) -> dict[str, Array]:
        """Return the bits of a row of the new run."""
        values: dict[str, Array] = {}
        value = self._planned.optimizer.value
        for name in self._variables:
            if name in ("W", *self._planned.optimizer.state_names):
                values[name] = self._bits(value(name))
            elif name == "cells":
                values[name] = self._bits(value("W").to(torch.bfloat16))
            elif name == "lr":
                values[name] = self._planned.lr[row.number].view(np.uint64)
            elif name == "hyperparameters":
                numbers = np.array([*self._planned.numbers[row.number].values()])
                values[name] = numbers.view(np.uint64)
            elif name == "clip_coef":
                values[name] = self._planned.clip_coef[row.number]
            elif name == "grad":
                values[name] = self._gradient(row)
            elif last is not None and name in ("W_step_norm", "W_ulp_l1"):
                measure = token_norm if name == "W_step_norm" else ulp_l1
                values[name] = self._bits(measure(value("W"), last))
            elif VARIABLES[name].dims == ("step",):
                values[name] = self._rows.scalar(name, row.number)
            else:
                bits = row.bits[name]
                values[name] = (
                    self._planned.of_tokens(bits) if "token" in VARIABLES[name].dims else bits
                )
        return values

    def _gradient(self, row: RecordedRow) -> Array:
        """Return the gradient that the optimizer gets, before clipping."""
        native, target = self._rows.natives["grad"], self._variables["grad"]
        bits = self._planned.of_tokens(row.bits["grad"])
        if native == target:
            return bits
        return as_bits(tensor_of(bits, native).to(getattr(torch, target.name)), target, "grad")


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
    rows = RecordedRows(source)
    device = replay_device(source.attributes)
    with process_mode(device.threads, device.modes):
        planned = PlannedCounterfactual(
            source, rows, settings, at=at, tokens=tokens, seed=seed,
            device=device.device,
        )  # fmt: skip
        origin: dict[str, Any] = {
            "run": os.path.basename(os.path.normpath(run)),
            "created": source.attributes.get("created"),
            FINGERPRINT: source.attributes.get(FINGERPRINT),
            "tokens": tokens if isinstance(tokens, str) else "a list of ids",
        }
        earlier = attribute(source.attributes, "provenance", "what_if")
        if earlier is not None:
            origin["earlier"] = earlier
        remarks: list[str] = []
        with staged_run(target, overwrite=overwrite) as new:
            first_difference = _write(
                new, planned, origin, memory=memory, on_progress=on_progress, on_note=remarks.append
            )
    again = () if planned.settings.given else (_nothing_changed(first_difference),)
    return WhatIf(
        path=target,
        rows=len(rows) - planned.first,
        first_step=int(rows.steps[planned.first]),
        last_step=int(rows.steps[-1]),
        notes=(*device.notes, *planned.notes, *remarks, *again),
    )


def _nothing_changed(first_difference: int | None) -> str:
    """Return a note about a run with unchanged settings."""
    if first_difference is None:
        return "no setting was changed; the result equals the recorded run, bit for bit"
    return (
        "no setting was changed, but W or a moment differs from the recorded run from step "
        f"{first_difference} on. Either the run was changed after recording, which "
        "`trajstore verify` detects, or this machine or version of torch rounds differently"
    )


def _write(
    path: Path,
    planned: PlannedCounterfactual,
    origin: Mapping[str, Any],
    *,
    memory: int | str,
    on_progress: Callable[[int, int], None] | None,
    on_note: Callable[[str], None],
) -> int | None:
    """Write the new run row by row; return `CounterfactualRows.first_difference`."""
    rows = CounterfactualRows(planned)
    total = len(planned.rows) - planned.first
    chosen: dict[str, Any] = {
        name: planned.of_tokens(values)
        for name, values in planned.source.coordinates.items()
        if name not in planned.source.populations
    }
    chosen["populations"] = {
        name: planned.of_tokens(values) for name, values in planned.source.populations.items()
    }
    with RunWriter.create(
        path,
        hidden=planned.source.series["W"].shape[2],
        hyperparameter=tuple(planned.numbers[0]),
        **planned.source.row_lengths,
        variables={name: native.name for name, native in planned.variables.items()},
        config=planned.settings.config,
        attributes=planned.attributes(origin),
        memory=memory,
        encoding=planned.source.attributes.get("encoding", "delta"),
        on_note=on_note,
        buffers=1,
        commit_every=None,
        fsync=False,  # the complete run is flushed before it gets its name
        **chosen,
    ) as new:
        for count, (row, values) in enumerate(rows, 1):
            for name, place in new.next_row().items():
                place[...] = values[name]
            new.commit_row(row.step)
            if on_progress is not None:
                on_progress(count, total)
    return rows.first_difference
