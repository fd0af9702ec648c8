"""An existing run to resume: compared with its plan, then opened after its rows."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Self

import numpy as np
import numpy.typing as npt
import torch

from trajstore.errors import InvalidArgument, NothingToResume
from trajstore.schema import COORDINATES, STEP, VARIABLES, along_token, variables_of
from trajstore.store.metadata.metadata_form import segments_attribute
from trajstore.store.reading.open_group import open_group
from trajstore.store.writing.resumed_run import resumed_run
from trajstore.store.writing.writer import RunWriter
from trajstore.trainers.recording.device_to_host import (
    ComparedRun,
    Comparison,
    RowDifference,
    RowTarget,
    place_tensor,
    same_bits,
)
from trajstore.trainers.recording.model_state import STATE
from trajstore.trainers.recording.notes import resumed_provenance
from trajstore.trainers.recording.planned_run import PlannedRun
from trajstore.values.native_types import narrow, native_type


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
    last_weights : tensor, (token, hidden)
        W in that row, in its native type, on the CPU, with the tokens of this process; `cells` if
        the run has no W.
    hyperparameters : tuple of str
        Names of the hyperparameters in its rows.
    optimizer : mapping
        Class and hyperparameters of the optimizer that a replay builds.
    attributes : mapping
        Attributes of the root that change.
    last_state : mapping of str to tensor
        If the state of the model is recorded, the rest of the state in that row.
    compared : ComparedRun or None
        Set if the following rows are only compared with those of the run.
    """

    planned: PlannedRun
    variables: tuple[str, ...]
    rows: int
    last_step: int
    missing_steps: range
    last_weights: torch.Tensor
    hyperparameters: tuple[str, ...]
    optimizer: Mapping[str, Any]
    attributes: Mapping[str, Any]
    last_state: Mapping[str, torch.Tensor] = field(default_factory=dict)
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
            If its first row is of a later step than the training has taken; with a comparison also
            if it lacks rows up to that step.
        InvalidArgument
            If it was recorded with other options.
        """
        arrays: Any = open_group(planned.path)
        attributes: dict[str, Any] = arrays.attrs.asdict()
        known = variables_of(attributes)
        recorded = tuple(name for name in arrays.array_keys() if name in known)
        _check_options(planned, attributes.get("recording", {}), recorded)
        _check_coordinates(planned, arrays)
        state: list[str] = []
        if planned.recording.state is not None:
            planned.recording.state.resume(attributes, recorded)
            state = sorted(name for name in recorded if name in STATE or name not in VARIABLES)
        all_steps = np.asarray(arrays[STEP.name][...])
        steps, missing = _kept_steps(planned, all_steps)
        if missing and comparison is not None:
            raise _ends_early(planned, steps)
        _check_change_norms(planned, recorded, int(steps[-1]))
        W = arrays["W" if "W" in recorded else "cells"]
        tokens = slice(None) if planned.share is None else planned.share.tokens(W.shape[1])
        last = steps.size - 1
        names = arrays["hyperparameter"][...] if "hyperparameter" in arrays else ()
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
            last_weights=_row(W, (last, tokens)),
            hyperparameters=tuple(map(str, names)),
            optimizer=attributes.get("optimizer", {}),
            attributes=_changed_attributes(planned, attributes),
            last_state={name: _row(arrays[name], last) for name in state},
            compared=compared,
        )

    def check(self, W: torch.Tensor) -> None:
        """Check that the training continues with the weights of the run.

        Parameters
        ----------
        W : tensor, (token, hidden)
            Weights of the recorded tokens, on the CPU.

        Raises
        ------
        NothingToResume
            If a bit differs, or one of the state of the model.
        """
        if (step := self.planned.recording.loop.first_step) != self.last_step:
            return
        weights = "W" if "W" in self.variables else "cells"
        now = W if weights == "W" else W.to(torch.bfloat16)
        wrong: tuple[str, ...] = () if same_bits(now, self.last_weights) else (weights,)
        if self.planned.recording.state is not None:
            wrong += self.planned.recording.state.differing(self.last_state)
        if wrong and self.compared is not None:
            comparison = self.compared.comparison
            difference = RowDifference(step=step, row=self.rows - 1, variables=wrong)
            comparison.difference = comparison.difference or difference
        elif wrong:
            names = "the weights" if wrong == (weights,) else ", ".join(wrong)
            raise NothingToResume(
                f"{names} of the training differ from {self.planned.path} at step {step}; load "
                "the checkpoint of that step, or record a new run"
            )

    def open(self) -> RowTarget:
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
        )


def _check_options(
    planned: PlannedRun, before: Mapping[str, Any], recorded: tuple[str, ...]
) -> None:
    """Check options and variables against the attribute ``recording`` of the run and its arrays."""
    for name, value in planned.recording_attribute.items():
        if before.get(name) != value:
            raise InvalidArgument(
                f"{name}: {planned.path} was recorded with {before.get(name)}, got {value}; resume "
                f"with {name}={before.get(name)}"
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


def _check_change_norms(planned: PlannedRun, recorded: tuple[str, ...], last_step: int) -> None:
    """Check that the last W is known if the change from it is recorded."""
    of_change = [name for name in ("W_step_norm", "W_ulp_l1") if name in recorded]
    if of_change and "W" not in recorded and planned.recording.loop.first_step != last_step:
        raise NothingToResume(
            f"{', '.join(of_change)}: the next row needs W at step {last_step}, which "
            f"{planned.path} lacks; resume from a checkpoint of that step, or record a new run"
        )


def _check_coordinates(planned: PlannedRun, arrays: Any) -> None:
    """Check tokens, given populations, and names of parameters against those of the run."""
    if not np.array_equal(arrays["token"][...], planned.token):
        raise InvalidArgument(
            f"tokens: the given tokens differ from those of {planned.path}; a resumed run keeps "
            "its tokens, so give the same ones"
        )
    names = arrays.array_keys() if planned.populations else ()  # by default it keeps its own
    populations = {name: np.asarray(arrays[name][...]) for name in names
            if name in along_token([name]) and name not in COORDINATES}  # fmt: skip
    odd = sorted(populations.keys() ^ planned.populations.keys()) or [
        name
        for name in populations
        if not np.array_equal(populations[name], planned.populations[name])
    ]
    if odd:
        raise InvalidArgument(
            f"populations: {', '.join(odd)} differ from {planned.path}; a resumed run keeps its "
            "populations, so leave them out"
        )
    stored = tuple(map(str, arrays["parameter"][...])) if "parameter" in arrays else None
    parameters = planned.parameter_names or ()
    if stored not in (None, parameters):
        raise InvalidArgument(
            f"the model has {len(parameters)} parameters, but {planned.path} has {len(stored)} "
            f"({', '.join(stored[:3])}, …), or their names differ; resume with the same model"
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


def _ends_early(planned: PlannedRun, steps: npt.NDArray[Any]) -> NothingToResume:
    reached = f"has the steps {steps[0]} to {steps[-1]}" if steps.size else "has no step"
    return NothingToResume(
        f"{planned.path} {reached}, but the training continues after step "
        f"{planned.recording.loop.first_step}; resume from another checkpoint, or record a new run"
    )


def _changed_attributes(planned: PlannedRun, before: Mapping[str, Any]) -> dict[str, Any]:
    """Return the changed attributes, with the earlier entries where they are lists."""
    step, config = planned.recording.loop.first_step, planned.recording.options.config
    changed: dict[str, Any] = {
        "optimizer": {**before.get("optimizer", {}), "schedule": planned.schedule},
        "provenance": resumed_provenance(before.get("provenance", {}), planned.device, step),
    }
    if config is not None:
        changed |= {"config": dict(config), **segments_attribute(before, dict(config), step)}
    return changed


def _row(array: Any, key: Any) -> torch.Tensor:
    """Return one row of a variable, or a part of it, in its native type."""
    native = native_type(str(array.attrs["native_dtype"]))
    return place_tensor(narrow(np.asarray(array[key]), native), native.name)
