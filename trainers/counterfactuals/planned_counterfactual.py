"""A counterfactual as it will be, decided before anything is written."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from trajstore.errors import InvalidArgument, StepNotFound
from trajstore.schema import MODEL, RECORDED
from trajstore.store.metadata.fork_provenance import steps_of_another_optimizer
from trajstore.store.reading.tiled_reader import TiledRun
from trajstore.trainers.counterfactuals.changed_rates import (
    changed_clip_coefs,
    changed_learning_rates,
    changed_schedule,
)
from trajstore.trainers.counterfactuals.settings import ChangedSettings, changed_settings
from trajstore.trainers.recording.parameter_rows import MOMENTS
from trajstore.trainers.recording.provenance import provenance
from trajstore.trainers.recording.token_selection import Tokens, select_tokens
from trajstore.trainers.replay.parameter_placement import Placement, recorded_placement, tensor_of
from trajstore.trainers.replay.recorded_optimizer import RecordedOptimizer, recorded_optimizer
from trajstore.trainers.replay.recorded_rows import RecordedRows
from trajstore.trainers.replay.replay_result import CannotReplay
from trajstore.trainers.replay.step_simulator import check_inputs
from trajstore.values.native_types import NATIVE_TYPES, NativeType

__all__ = ["CAVEAT", "OF_THE_OPTIMIZER", "PlannedCounterfactual"]

Array = npt.NDArray[Any]

CAVEAT = (
    "the gradients are those of the recorded path, whatever became of W: this is what another "
    "optimizer makes of them, not what training with these settings would have done"
)
"""What everybody who looks at a counterfactual has to know."""

OF_THE_OPTIMIZER = ("W", *MOMENTS, "lr", "clip_coef", "W_step_norm", "W_ulp_l1", "cells")
"""Variables that settings of the optimizer change; all others are of the recorded path."""


@dataclass(frozen=True, kw_only=True, eq=False)
class PlannedCounterfactual:
    """What a counterfactual is made of. Made by `of`, which refuses what is impossible.

    Attributes
    ----------
    source : TiledRun
    rows : RecordedRows
    settings : ChangedSettings
    optimizer : RecordedOptimizer
        With the changed settings.
    recorded : RecordedOptimizer
        As the run had it.
    placement : Placement
        Of the chosen tokens.
    chosen : ndarray of int, optional
        Their positions; None for all that the run holds.
    first : int
        Row that it goes on from.
    lr : ndarray of float64, (step,)
    clip_coef : list of ndarray, ()
        Bits.
    variables : dict of str to NativeType
        Of the new run.
    needs_rebuilding : bool
        Whether the state to begin with is not recorded, and follows from the steps before.
    """

    source: TiledRun
    rows: RecordedRows
    settings: ChangedSettings
    optimizer: RecordedOptimizer
    recorded: RecordedOptimizer
    placement: Placement
    chosen: Array | None
    first: int
    lr: npt.NDArray[np.float64]
    clip_coef: list[Array]
    variables: dict[str, NativeType]
    needs_rebuilding: bool

    @classmethod
    def of(
        cls,
        source: TiledRun,
        rows: RecordedRows,
        assignments: Sequence[str],
        *,
        from_step: int | None,
        tokens: Tokens,
        seed: int | None,
        device: torch.device,
    ) -> PlannedCounterfactual:
        """Decide all of it, before anything is written.

        Raises
        ------
        StepNotFound, ConfigError, CannotReplay, InvalidArgument
            As `what_if`.
        """
        check_inputs(source)
        first = _row_of(rows, from_step)
        held = rows.natives["W"].name
        settings = changed_settings(source.attributes, held, assignments, seed=seed)
        weights = getattr(torch, settings.weights_dtype)
        recorded = recorded_optimizer(source.attributes, getattr(torch, held), device)
        optimizer = recorded_optimizer({"optimizer": settings.optimizer}, weights, device)
        rebuilt = any(name not in rows for name in recorded.state_names)
        if rebuilt and rows.steps[first] and not rows.from_start:
            raise CannotReplay(
                f"the optimizer's state is not recorded, and the run begins at step "
                f"{rows.steps[0]}, so it cannot be rebuilt; record the tier all"
            )
        begin = 0 if rebuilt else first
        _check_every_step(rows, begin)
        _check_state(rows, settings, recorded, optimizer, first)
        forked_at = steps_of_another_optimizer(source.attributes)
        if rows.steps[begin] < forked_at:
            raise CannotReplay(
                f"the steps up to {forked_at} were taken with another optimizer, before the run "
                f"was forked; begin there (--from {forked_at}), or ask about the run that it was "
                "forked from"
            )
        if first and rebuilt:
            recorded_lr = np.array([rows.value("lr", number) for number in range(len(rows))])
            recorded_coefs = [rows.scalar("clip_coef", number) for number in range(len(rows))]
            _check_known(rows, recorded_lr, recorded_coefs, range(1, first + 1))
        lr = changed_learning_rates(rows, source.attributes, settings)
        clip_coef = changed_clip_coefs(rows, settings)
        _check_known(rows, lr, clip_coef, range(first + 1, len(rows)))
        placement, chosen = _placement(source, tokens, device)
        return cls(
            source=source,
            rows=rows,
            settings=settings,
            optimizer=optimizer,
            recorded=recorded,
            placement=placement,
            chosen=chosen,
            first=first,
            lr=lr,
            clip_coef=clip_coef,
            variables=_variables(rows, settings, optimizer),
            needs_rebuilding=rebuilt,
        )

    @property
    def notes(self) -> tuple[str, ...]:
        """What should be known about it."""
        found = [CAVEAT] if self.settings.given else []
        if not self.settings.keeps_state:
            found.append("the optimizer is of another class, and begins without a state")
        if self.left_out:
            found.append(
                f"{', '.join(self.left_out)}: left out, as the gradients of W do not tell what "
                "they would be"
            )
        if self.variables["W"].itemsize < self.rows.natives["W"].itemsize:
            found.append(f"gradients were rounded to {self.variables['W'].name} first")
        return tuple(found)

    @property
    def left_out(self) -> tuple[str, ...]:
        """Variables of the recorded run that the new one does not hold."""
        return tuple(name for name in self.rows.natives if name not in self.variables)

    def attributes(self, origin: Mapping[str, Any]) -> dict[str, Any]:
        """Attributes of the root of the new run.

        Parameters
        ----------
        origin : mapping
            What identifies the run that it is made of.
        """
        before = self.source.attributes
        known = before.get("provenance")
        kept = {
            name: known[name]
            for name in ("corpus", "tokenizer")
            if isinstance(known, Mapping) and name in known
        }
        told = {
            **origin,
            "from_step": int(self.rows.steps[self.first]),
            "settings": [f"{name}={value}" for name, value in self.settings.given.items()],
            "of_recorded_path": sorted(set(self.variables) - set(OF_THE_OPTIMIZER)),
            "caveat": CAVEAT,
        }
        attributes = {
            "optimizer": {
                **self.settings.optimizer,
                "schedule": changed_schedule(before, self.settings),
            },
            "provenance": provenance(self.placement.device, kept | {"what_if": told}),
        }
        if "recording" in before:
            attributes["recording"] = before["recording"]
        return attributes

    def of_tokens(self, values: Array) -> Array:
        """Values of the chosen tokens, of all that the run holds, (token, …)."""
        return values if self.chosen is None else values[self.chosen]


def _row_of(rows: RecordedRows, step: int | None) -> int:
    if not len(rows):
        raise CannotReplay("the run has no rows yet")
    if step is None:
        return 0
    if step == rows.steps[-1]:
        raise CannotReplay(f"{step} is the last step of the run, so nothing is left to be done")
    found = np.flatnonzero(rows.steps == step)
    if not found.size:
        raise StepNotFound(
            f"there is no row of step {step}; the run holds steps {rows.steps[0]} to "
            f"{rows.steps[-1]}"
        )
    return int(found[0])


def _check_state(
    rows: RecordedRows,
    settings: ChangedSettings,
    recorded: RecordedOptimizer,
    optimizer: RecordedOptimizer,
    first: int,
) -> None:
    """Insist on a state for the optimizer where it has taken steps."""
    step = int(rows.steps[first])
    if step == 0:
        return
    fresh = set(optimizer.state_names) - set(recorded.state_names)
    if not settings.keeps_state or fresh:
        name = settings.optimizer["class"].rpartition(".")[2]
        raise CannotReplay(
            f"{name} with these settings has no state at step {step}, where the run had another "
            "optimizer; begin where training began, without --from"
        )
    if optimizer.counts_steps and not rows.counts_skipped(first + 1):
        raise CannotReplay(
            f"how many steps were skipped until step {step}, and so do not count, is not recorded; "
            "ask about a run that holds every step from 0 on"
        )


def _check_every_step(rows: RecordedRows, first: int) -> None:
    gaps = np.flatnonzero(np.diff(rows.steps[first:]) != 1)
    if gaps.size:
        at = first + int(gaps[0])
        raise CannotReplay(
            f"after step {rows.steps[at]} comes step {rows.steps[at + 1]}, and the gradients "
            "between were not recorded; record with every=1, or begin later (--from)"
        )


def _check_known(
    rows: RecordedRows, lr: npt.NDArray[np.float64], clip_coef: list[Array], numbers: range
) -> None:
    native = rows.natives["clip_coef"]
    for number in numbers:
        if rows.skipped[number]:
            continue
        if np.isnan(lr[number]):
            raise CannotReplay(f"the learning rate of step {rows.steps[number]} is not known")
        if tensor_of(clip_coef[number], native).isnan():
            raise CannotReplay(
                f"clip_coef is NaN at step {rows.steps[number]}, so what the gradient was "
                "multiplied by is not known; say how it is to be clipped, such as "
                "--set training.max_grad_norm=1"
            )


def _placement(
    source: TiledRun, tokens: Tokens, device: torch.device
) -> tuple[Placement, Array | None]:
    """Placement of the chosen tokens, and their positions in the run."""
    whole = recorded_placement(source, device)
    held = source.coordinates["token"].astype(np.int64)
    if isinstance(tokens, str):
        ids = select_tokens(tokens, len(held), source.coordinates.get("is_dead"))
        chosen = ids
    else:
        wanted = np.unique(np.asarray(tokens))
        if wanted.dtype.kind not in "iu":
            raise InvalidArgument(
                f"tokens: got {tokens!r}, expected all, dead, live or a list of ids"
            )
        missing = wanted[~np.isin(wanted, held)]
        if missing.size or not wanted.size:
            raise InvalidArgument(
                f"tokens: the run does not hold {', '.join(map(str, missing[:5])) or 'none'}"
            )
        chosen = np.flatnonzero(np.isin(held, wanted))
    if chosen is None:
        return whole, None
    # A run that does not say how large the vocabulary was is all that there is.
    return replace(whole, ids=chosen if whole.ids is None else held[chosen]), chosen


def _variables(
    rows: RecordedRows, settings: ChangedSettings, optimizer: RecordedOptimizer
) -> dict[str, NativeType]:
    """Variables of the new run, each with its type."""
    found = {}
    for name in RECORDED:
        if name in MODEL:  # they are of a model that other settings would have made another
            continue
        if name in ("W", "grad") and name in rows:
            found[name] = NATIVE_TYPES[settings.weights_dtype]
        elif name in MOMENTS:
            kept = name in rows or not settings.keeps_state
            if kept and name in optimizer.state_names:
                dtype = str(optimizer.example[name].dtype).removeprefix("torch.")
                found[name] = NATIVE_TYPES[dtype]
        elif name in rows:
            found[name] = rows.natives[name]
    return found
