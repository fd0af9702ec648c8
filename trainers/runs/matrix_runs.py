"""The runs of one training: one, or with untied weights one of each matrix."""

from __future__ import annotations

from trajstore.errors import InvalidArgument
from trajstore.schema import EVERYTHING, resolve_variables
from trajstore.store.storage.remote_path import Location, RunPath, location
from trajstore.trainers.config import RunConfig
from trajstore.trainers.recording.planned_run import run_path

UNTIED = ("lm_head.weight", "transformer.wte.weight")
"""Recorded parameters of a model with untied weights. The first run has the checkpoints."""


def matrices(config: RunConfig) -> tuple[str, ...] | None:
    """Return the parameters to record; None for the only matrix.

    Raises
    ------
    InvalidArgument
        If a variable with the state of the whole model is recorded with two matrices.
    """
    if config.model.tied:
        return None
    whole = sorted({*EVERYTHING}.intersection(resolve_variables(config.recording.variables)))
    if whole:
        raise InvalidArgument(
            "the tier everything is recorded with one matrix, but model.tied = false records two; "
            f"remove 'everything' or {whole[0]!r} from recording.variables"
        )
    return UNTIED


def planned_runs(path: RunPath, config: RunConfig) -> tuple[Location, ...]:
    """Return the paths of the runs that a training records under a name."""
    place = location(path)
    return (place,) if config.model.tied else tuple(run_path(place, name) for name in UNTIED)


def existing_runs(path: RunPath) -> tuple[Location, ...]:
    """Return the paths of the runs that a training has recorded under a name; none without any."""
    place = location(path)
    if place.exists():
        return (place,)
    return tuple(run for name in UNTIED if (run := run_path(place, name)).exists())


def shared_path(run: Location, config: RunConfig) -> Location:
    """Return the name that a run shares with the other run of its training.

    Raises
    ------
    InvalidArgument
        If the run was renamed, so that the other one is unknown.
    """
    if config.model.tied:
        return run
    for ending in (f".{name}.zarr" for name in UNTIED):
        if run.name.endswith(ending):
            return run.with_name(f"{run.name.removesuffix(ending)}.zarr")
    raise InvalidArgument(
        f"{run} is one of the two runs of a training with model.tied = false, but has another "
        f"name; rename both to {' and '.join(f'NAME.{name}.zarr' for name in UNTIED)}"
    )
