"""A run that is there already, and is to go on: compared with its plan, opened after its rows."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self

import numpy as np
import numpy.typing as npt
import torch

from trajstore.errors import InvalidArgument, NothingToResume
from trajstore.schema import COORDINATES, STEP, VARIABLES, along_token
from trajstore.store.metadata.stretches import stretches_attribute
from trajstore.store.reading.open_group import open_group
from trajstore.store.writing.resumed_run import resumed_run
from trajstore.store.writing.writer import RunWriter
from trajstore.trainers.recording.compared_run import (
    ComparedRun,
    Comparison,
    RowDifference,
    RowTarget,
)
from trajstore.trainers.recording.device_to_host import place_tensor
from trajstore.trainers.recording.planned_run import PlannedRun
from trajstore.trainers.recording.provenance import resumed_provenance
from trajstore.values.native_types import narrow, native_type

__all__ = ["ExistingRun"]


@dataclass(frozen=True, kw_only=True, eq=False)
class ExistingRun:
    """A run, cut to the rows that come before the next step. Made by `find`.

    Attributes
    ----------
    planned : PlannedRun
        What the training that goes on wants of it.
    variables : tuple of str
        Its own, in its own order.
    rows : int
        Rows that it keeps.
    last_step : int
        Step of the last of them.
    last_weights : tensor, (token, hidden)
        W in that row, of its native type, on the CPU, of the tokens of this process; where the run
        holds none, its cells.
    attributes : mapping
        Attributes of the root that change.
    compared : ComparedRun or None
        Where the rows to come are only compared with those of the run.
    """

    planned: PlannedRun
    variables: tuple[str, ...]
    rows: int
    last_step: int
    last_weights: torch.Tensor
    attributes: Mapping[str, Any]
    compared: ComparedRun | None = None

    @classmethod
    def find(cls, planned: PlannedRun, comparison: Comparison | None = None) -> Self:
        """Look at the run that is where one is planned, without changing anything.

        Parameters
        ----------
        planned : PlannedRun
        comparison : Comparison, optional
            Have the rows to come compared with those of the run, which stays as it is.

        Raises
        ------
        RunNotFound
            If there is none.
        NothingToResume
            If it does not reach the step after which the training goes on.
        InvalidArgument
            If it was recorded in another way.
        """
        arrays: Any = open_group(planned.path)
        attributes: dict[str, Any] = arrays.attrs.asdict()
        held = tuple(name for name in arrays.array_keys() if name in VARIABLES)
        _check_manner(planned, attributes.get("recording", {}))
        _check_variables(planned, held)
        _check_tokens(planned, np.asarray(arrays["token"][...]))
        _check_populations(planned, arrays)
        if "parameter" in arrays:
            _check_model(planned, np.asarray(arrays["parameter"][...]))
        steps = _kept_steps(planned, np.asarray(arrays[STEP.name][...]))
        _check_change_norms(planned, held, int(steps[-1]))
        W = arrays["W" if "W" in held else "cells"]
        native = native_type(str(W.attrs["native_dtype"]))
        own = slice(None) if planned.share is None else planned.share.tokens(W.shape[1])
        last = np.asarray(W[steps.size - 1, own])
        return cls(
            planned=planned,
            variables=held,
            rows=int(steps.size),
            last_step=int(steps[-1]),
            last_weights=place_tensor(narrow(last, native), native.name),
            attributes=_changed_attributes(planned, attributes),
            compared=None
            if comparison is None
            else ComparedRun(
                resumed_run(
                    planned.path, None, attributes=None, memory=planned.memory, threads=None
                ),
                np.asarray(arrays[STEP.name][...]).tolist(),
                int(steps.size),
                comparison,
            ),
        )

    def check(self, W: torch.Tensor) -> None:
        """Insist that the training goes on with the weights that the run has.

        Parameters
        ----------
        W : tensor, (token, hidden)
            Of the recorded tokens, on the CPU.

        Raises
        ------
        NothingToResume
            If a bit differs.
        """
        step = self.planned.loop.first_step
        held = "W" if "W" in self.variables else "cells"
        now = W if held == "W" else W.to(torch.bfloat16)
        if step == self.last_step and not _same_bits(now, self.last_weights):
            if self.compared is not None:
                comparison = self.compared.comparison
                if comparison.difference is None:
                    found = RowDifference(step=step, row=self.rows - 1, variables=(held,))
                    comparison.difference = found
                return
            raise NothingToResume(
                f"the weights that the training goes on with are not those of {self.planned.path} "
                f"at step {step}; load the checkpoint of that step, or record anew"
            )

    def open(self) -> RowTarget:
        """What takes the rows to come: a writer of the run after its rows.

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
            commit_every=self.planned.options.commit_every,
            fsync=self.planned.options.fsync,
            share=self.planned.share,
        )


def _check_manner(planned: PlannedRun, before: Mapping[str, Any]) -> None:
    for name, value in planned.manner.items():
        if before.get(name) != value:
            raise InvalidArgument(
                f"{name}: {planned.path} was recorded with {before.get(name)}, got {value}; a run "
                "that goes on is recorded as before"
            )


def _check_variables(planned: PlannedRun, held: tuple[str, ...]) -> None:
    wanted, required = planned.options.variables, planned.options.required
    missing = sorted(set(held) - set(wanted)) + sorted(required - set(held))
    if missing:
        raise InvalidArgument(
            f"record: {planned.path} holds {', '.join(held)}, and {', '.join(wanted)} are to be "
            f"recorded; a run that goes on keeps its variables, so see to {', '.join(missing)}"
        )


def _check_change_norms(planned: PlannedRun, held: tuple[str, ...], last_step: int) -> None:
    """Insist that the W of the last row is known, where the way from it is to be recorded."""
    of_change = [name for name in ("W_step_norm", "W_ulp_l1") if name in held]
    if of_change and "W" not in held and planned.loop.first_step != last_step:
        raise NothingToResume(
            f"{', '.join(of_change)}: the next row's is the way from W at step {last_step}, which "
            f"{planned.path} does not hold; go on from a checkpoint of that step, or record anew"
        )


def _check_tokens(planned: PlannedRun, held: npt.NDArray[Any]) -> None:
    if not np.array_equal(held, planned.token):
        raise InvalidArgument(
            f"tokens: those of {planned.path} are not those that are to be recorded; a run that "
            "goes on keeps its tokens"
        )


def _check_populations(planned: PlannedRun, arrays: Any) -> None:
    """Insist on the populations that a run has, where some are given; without, it keeps them."""
    if not planned.populations:
        return
    held = {name: np.asarray(arrays[name][...]) for name in arrays.array_keys()
            if name in along_token([name]) and name not in COORDINATES}  # fmt: skip
    odd = sorted(held.keys() ^ planned.populations.keys()) or [
        name for name in held if not np.array_equal(held[name], planned.populations[name])
    ]
    if odd:
        raise InvalidArgument(
            f"populations: {', '.join(odd)} are not as in {planned.path}; a run that goes on "
            "keeps its populations, so leave them out"
        )


def _check_model(planned: PlannedRun, held: npt.NDArray[Any]) -> None:
    names = () if planned.model is None else planned.model.names
    if tuple(map(str, held)) != names:
        raise InvalidArgument(
            f"the parameters of the model are not those of {planned.path}, which are "
            f"{', '.join(map(str, held[:3]))} and others, {len(held)} in all, and now "
            f"{len(names)}; a run that goes on is of the same model"
        )


def _kept_steps(planned: PlannedRun, steps: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """Steps of the rows that a run keeps, which must reach the one that the training has taken."""
    step, every = planned.loop.first_step, planned.options.every
    # A row that is only there because training ended is none of a longer training.
    regular = steps[(steps % every == 0) | (np.arange(steps.size) == 0)]
    kept: npt.NDArray[Any] = regular[regular <= step]
    if not kept.size or kept[-1] != max(steps[0], step - step % every):
        reached = f"step {steps[-1]}" if steps.size else "no step"
        raise NothingToResume(
            f"{planned.path} has come to {reached}, and the training goes on after step {step}; go "
            "on from an earlier checkpoint, or record anew"
        )
    return kept


def _changed_attributes(planned: PlannedRun, before: Mapping[str, Any]) -> dict[str, Any]:
    """Attributes that do not stay as they were: what has changed since is added to them."""
    changed: dict[str, Any] = {
        "optimizer": {**before.get("optimizer", {}), "schedule": planned.schedule},
        "provenance": resumed_provenance(
            before.get("provenance", {}), planned.device, planned.loop.first_step
        ),
    }
    if planned.options.config is not None:
        changed["config"] = dict(planned.options.config)
        changed |= stretches_attribute(before, changed["config"], planned.loop.first_step)
    return changed


def _same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    if a.dtype != b.dtype or a.shape != b.shape:
        return False
    return torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8))
