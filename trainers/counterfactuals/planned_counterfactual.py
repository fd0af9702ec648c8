"""The plan of a counterfactual, made before anything is written."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from trajstore.arguments import ANY, exact
from trajstore.errors import InvalidArgument, StepNotFound, argument, config_field
from trajstore.schema import EVERYTHING, MODEL, OPTIMIZER_STATE, RECORDED, VARIABLES
from trajstore.store.metadata.zarr_json import unproven_rows
from trajstore.store.reading.run_attributes import steps_of_another_optimizer
from trajstore.store.reading.tiled_reader import TiledRun
from trajstore.trainers.counterfactuals.settings import (
    ChangedSettings,
    changed_clip_coefs,
    changed_learning_rates,
    changed_schedule,
    changed_settings,
)
from trajstore.trainers.recording.device_to_host import type_name
from trajstore.trainers.recording.notes import provenance
from trajstore.trainers.recording.options import Tokens, select_tokens
from trajstore.trainers.replays.recorded_optimizer import RecordedOptimizer, recorded_optimizer
from trajstore.trainers.replays.recorded_rows import (
    Placement,
    RecordedRows,
    check_inputs,
    recorded_placement,
    tensor_of,
)
from trajstore.trainers.replays.replay_result import CannotReplay
from trajstore.values.native_types import NATIVE_TYPES, NativeType
from trajstore.values.optimizer_rule import MOMENTS

Array = npt.NDArray[Any]

CAVEAT = (
    "the gradients are those of the recorded run, independent of the new W; the result shows what "
    "another optimizer computes from them, not a training run with these settings"
)
"""Note that every counterfactual carries."""

OPTIMIZER_VARIABLES = (
    "W", *MOMENTS, "lr", "hyperparameters", "clip_coef", "W_step_norm", "W_ulp_l1", "cells",
)  # fmt: skip
"""Variables that settings of the optimizer change; all others are those of the recorded run."""


class PlannedCounterfactual:
    """The plan of a counterfactual, before anything is written.

    Parameters
    ----------
    source : TiledRun
    rows : RecordedRows
    assignments : sequence of str
    at, tokens, seed
        As for `what_if`.
    device : torch.device

    Attributes
    ----------
    source : TiledRun
    rows : RecordedRows
    settings : ChangedSettings
    optimizer : RecordedOptimizer
        With the changed settings.
    recorded : RecordedOptimizer
        As recorded.
    placement : Placement
        Placement of the chosen tokens.
    chosen : ndarray of int, optional
        Positions of the chosen tokens; None for all tokens of the run.
    first : int
        Row with the initial state.
    lr : ndarray of float64, (step,)
    numbers : list of dict of str to float, (step,)
        Other hyperparameters of the step before each row.
    clip_coef : list of ndarray, ()
        Bits of each factor.
    variables : dict of str to NativeType
        Variables of the new run.
    needs_rebuilding : bool
        True if the initial state is not recorded and has to be computed from earlier steps.

    Raises
    ------
    StepNotFound, ConfigError, CannotReplay, InvalidArgument
        As `what_if`.
    """

    def __init__(
        self,
        source: TiledRun,
        rows: RecordedRows,
        assignments: Sequence[str],
        *,
        at: int | None,
        tokens: Tokens,
        seed: int | None,
        device: torch.device,
    ) -> None:
        check_inputs(rows)
        self.source, self.rows = source, rows
        self.first = first = _row_of(rows, at)
        recorded_dtype = rows.natives["W"].name
        self.settings = settings = changed_settings(
            source.attributes, recorded_dtype, assignments, seed=seed
        )
        weights = getattr(torch, settings.weights_dtype)
        largest = rows.largest_hyperparameters
        self.recorded = recorded_optimizer(
            source.attributes, getattr(torch, recorded_dtype), device, largest
        )
        largest = {name: value for name, value in largest.items() if name in settings.kept}
        recorded, changed = source.attributes["optimizer"], settings.optimizer
        if changed["class"] == recorded["class"]:
            changed = {**recorded, **changed}  # also the forms of gradient and hyperparameters
        self.optimizer = recorded_optimizer({"optimizer": changed}, weights, device, largest)
        if self.optimizer.steps_some_rows:
            raise CannotReplay(
                "SparseAdam changes only the rows of a batch, and the gradients do not tell which "
                "rows with a gradient of 0 were among them"
            )
        rebuilt = any(name not in rows for name in self.recorded.state_names)
        self.needs_rebuilding = rebuilt
        if rebuilt and rows.steps[first] and not rows.from_start:
            raise CannotReplay(
                f"the optimizer's state is not recorded and cannot be computed, because the run "
                f"starts at step {rows.steps[0]}; record the tier matrix"
            )
        begin = 0 if rebuilt else first
        _check_every_step(rows, begin)
        _check_state(rows, settings, self.recorded, self.optimizer, first)
        forked_at = steps_of_another_optimizer(source.attributes)
        if rows.steps[begin] < forked_at:
            raise CannotReplay(
                f"another optimizer took the steps up to {forked_at}, before the run was forked; "
                "start at the fork ("
                + argument("at", forked_at)
                + "), or use the source of the fork"
            )
        if first and rebuilt:
            known = range(1, first + 1)
            unknown = [self.recorded.unknown(rows.hyperparameters(row)) for row in range(len(rows))]
            _check_known(source.attributes, rows, rows.rates, rows.clip_coefs, unknown, known)
        self.lr = changed_learning_rates(rows, source.attributes, settings)
        self.clip_coef = changed_clip_coefs(rows, settings)
        numbers, recorded = self.optimizer.numbers, rows.hyperparameters(0)
        # In the order of the run, with which the new one is compared.
        numbers = {name: numbers[name] for name in (*recorded, *numbers) if name in numbers}
        kept = settings.kept & numbers.keys()
        self.numbers = [
            numbers | {n: value for n, value in rows.hyperparameters(row).items() if n in kept}
            for row in range(len(rows))
        ]
        later = range(first + 1, len(rows))
        unknown = [*map(self.optimizer.unknown, self.numbers)]
        _check_known(source.attributes, rows, self.lr, self.clip_coef, unknown, later)
        self.placement, self.chosen = _placement(source, tokens, device)
        self.recorded.check_whole(self.placement)
        self.variables = _variables(rows, settings, self.optimizer)

    @property
    def notes(self) -> tuple[str, ...]:
        """Notes about the interpretation of the result."""
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
        return tuple(notes)

    def attributes(self, origin: Mapping[str, Any]) -> dict[str, Any]:
        """Return the attributes of the root of the new run.

        Parameters
        ----------
        origin : mapping
            Identifies the run with the gradients.
        """
        before = self.source.attributes
        known = before.get("provenance")
        corpus = {
            name: known[name]
            for name in ("corpus", "tokenizer")
            if isinstance(known, Mapping) and name in known
        }
        what_if = {
            **origin,
            "from_step": int(self.rows.steps[self.first]),
            "settings": [f"{name}={value}" for name, value in self.settings.given.items()],
            "of_recorded_path": sorted(
                set(self.variables) - {*OPTIMIZER_VARIABLES, *self.optimizer.state_names}
            ),
            "caveat": CAVEAT,
        }
        attributes: dict[str, Any] = {
            "optimizer": {
                **self.settings.optimizer,
                "schedule": changed_schedule(before, self.settings),
            },
            "provenance": provenance(self.placement.device, corpus | {"what_if": what_if}),
        }
        if "recording" in before:
            attributes["recording"] = before["recording"]
        if state_names := [name for name in self.variables if name not in VARIABLES]:
            attributes[OPTIMIZER_STATE] = [{"name": name, "of": "element"} for name in state_names]
        return attributes

    def of_tokens(self, values: Array) -> Array:
        """Select the chosen tokens from values of all tokens of the run, (token, …)."""
        return values if self.chosen is None else values[self.chosen]


def _row_of(rows: RecordedRows, step: int | None) -> int:
    if not len(rows):
        raise CannotReplay("the run has no rows yet; record at least two steps")
    if step is None:
        return 0
    if step == rows.steps[-1]:
        raise CannotReplay(
            f"{step} is the last step of the run; give an earlier one: " + argument("at")
        )
    matches = np.flatnonzero(rows.steps == step)
    if not matches.size:
        raise StepNotFound(
            f"step {step} was not recorded; the run holds steps {rows.steps[0]} to {rows.steps[-1]}"
        )
    return int(matches[0])


def _check_state(
    rows: RecordedRows,
    settings: ChangedSettings,
    recorded: RecordedOptimizer,
    optimizer: RecordedOptimizer,
    first: int,
) -> None:
    """Raise an error if the optimizer has no state after its first step."""
    step = int(rows.steps[first])
    if step == 0:
        return
    fresh = set(optimizer.state_names) - set(recorded.state_names)
    if not settings.keeps_state or fresh:
        name = settings.optimizer["class"].rpartition(".")[2]
        raise CannotReplay(
            f"{name} with these settings has no state at step {step}, because the run had another "
            "optimizer; start at the first row, without " + argument("at")
        )
    if optimizer.counts_steps and not rows.counts_skipped(first + 1):
        raise CannotReplay(
            f"the number of skipped steps before step {step} is not recorded; use a run with every "
            "step from 0 on"
        )


def _check_every_step(rows: RecordedRows, first: int) -> None:
    gaps = np.flatnonzero(np.diff(rows.steps[first:]) != 1)
    if gaps.size:
        row = first + int(gaps[0])
        raise CannotReplay(
            f"step {rows.steps[row + 1]} follows step {rows.steps[row]}, so the gradients between "
            "them are missing; record with "
            + argument("every", 1)
            + ", or start later ("
            + argument("at")
            + ")"
        )


def _check_known(
    attributes: Mapping[str, Any],
    rows: RecordedRows,
    lr: npt.NDArray[np.float64],
    clip_coef: list[Array],
    unknown: list[list[str]],
    numbers: range,
) -> None:
    """Check that all that steps use is known; `unknown` has the names of hyperparameters."""
    native, unproven = rows.natives["clip_coef"], unproven_rows(attributes, rows.steps)
    for number in numbers:
        if rows.idle[number]:
            continue
        if np.isnan(lr[number]):
            raise CannotReplay(
                f"the learning rate of step {rows.steps[number]} is NaN; set schedule.name"
            )
        if number in unproven and tensor_of(clip_coef[number], native).isnan():
            raise CannotReplay(
                f"clip_coef is NaN at step {rows.steps[number]}, so the factor of the gradient is "
                "unknown; set the clipping, such as " + config_field("training.max_grad_norm", 1)
            )
        if unknown[number]:
            raise CannotReplay(
                f"{', '.join(unknown[number])} of hyperparameters is NaN at step "
                f"{rows.steps[number]}; set it, such as "
                + config_field("optimizer.weight_decay", 0)
                + ", or start later "
                "(" + argument("at") + ")"
            )


def _placement(
    source: TiledRun, tokens: Tokens, device: torch.device
) -> tuple[Placement, Array | None]:
    """Return the placement of the chosen tokens, and their positions in the run."""
    whole = recorded_placement(source, device)
    recorded = source.coordinates["token"].astype(np.int64)
    if isinstance(tokens, str):
        ids = select_tokens(tokens, len(recorded), source.coordinates.get("is_dead"))
        chosen = ids
    else:
        requested = np.unique(exact("tokens", tokens, "int64", least=ANY))
        missing = requested[~np.isin(requested, recorded)]
        if not requested.size:
            raise InvalidArgument("tokens: got no ids, expected at least one; give ids of the run")
        if missing.size:
            raise InvalidArgument(
                f"tokens: the run lacks {', '.join(map(str, missing[:5]))}; give ids of the run"
            )
        chosen = np.flatnonzero(np.isin(recorded, requested))
    if chosen is None:
        return whole, None
    # Without a recorded size of the vocabulary, the tokens of the run are the vocabulary.
    return replace(whole, ids=chosen if whole.ids is None else recorded[chosen]), chosen


def _variables(
    rows: RecordedRows, settings: ChangedSettings, optimizer: RecordedOptimizer
) -> dict[str, NativeType]:
    """Return the variables of the new run with their types."""
    types = {}
    for name in dict.fromkeys([*RECORDED, *optimizer.state_names]):
        if name in (*MODEL, *EVERYTHING):  # of the recorded model, not of the changed one
            continue
        if name in ("W", "grad") and name in rows:
            types[name] = NATIVE_TYPES[settings.weights_dtype]
        elif name in MOMENTS or name not in VARIABLES:
            kept = name in rows or not settings.keeps_state
            if kept and name in optimizer.starts:
                types[name] = NATIVE_TYPES[type_name(optimizer.example[name].dtype)]
        elif name in rows:
            types[name] = rows.natives[name]
    return types
