"""The state of a training run from a row that holds everything, in place of a checkpoint file."""

from __future__ import annotations

from collections.abc import Collection, Mapping

import numpy as np

from trajstore.store.reading.open_group import open_group
from trajstore.store.storage.remote_path import Location
from trajstore.trainers.config import RunConfig
from trajstore.trainers.runs.checkpoint import Checkpoint
from trajstore.trainers.runs.forked_state import count_steps
from trajstore.trainers.runs.resume_checks import recorded_config
from trajstore.trainers.runs.training_setup import Training, build_training
from trajstore.trainers.runs.training_state import take_state
from trajstore.trainers.step_models.recorded_parameters import RunParameters
from trajstore.trainers.step_models.restore import restore_from
from trajstore.trainers.texts.corpus import Corpus

__all__ = ["holds_state", "row_checkpoint", "rows_hold_state"]

_MOMENTS = ("exp_avg", "exp_avg_sq", "params_exp_avg", "params_exp_avg_sq", "params_count")


def rows_hold_state(config: RunConfig, variables: Collection[str]) -> bool:
    """Return True if each row holds the whole state of a training run.

    Rows lack the momentum of SGD, and the growth of a gradient scaler.

    Parameters
    ----------
    config : RunConfig
    variables : collection of str
        Recorded variables.
    """
    if "params" not in variables:
        return False
    sgd = config.optimizer.name == "sgd"
    if config.training.autocast == "float16" or (sgd and config.optimizer.momentum):
        return False
    return {"W", "params_lr", *(() if sgd else _MOMENTS)} <= set(variables)


def holds_state(run: Location, config: RunConfig) -> bool:
    """Return True if each row of an existing run holds the whole state, as `rows_hold_state`."""
    group = open_group(run)
    return "parameters" in group.attrs and rows_hold_state(config, tuple(group.array_keys()))


def row_checkpoint(
    run: Location, step: int, text: Corpus, *, sources: Mapping[str, str]
) -> Checkpoint:
    """Return the state of a training run after a step, from its row.

    The models have no dropout, so no result depends on the random states, which are new. The order
    of the examples follows from the configuration.

    Parameters
    ----------
    run : Path or RemotePath
        A run for which `holds_state` is true.
    step : int
    text : Corpus
        Text of the run.
    sources : mapping of str to str
        Given paths of the text and the tokenizer.

    Raises
    ------
    StepNotFound
        If the run does not hold the step.
    InvalidArgument
        If the configuration gives other parameters than those of the run.
    """
    config = recorded_config(run, after=step)
    stored = RunParameters(run)
    training = build_training(config, text)
    _restore(training, stored, step)
    state, tensors = take_state(training, None)
    every = config.recording.every
    regular = (stored.steps % every == 0) | (np.arange(stored.steps.size) == 0)
    return Checkpoint(
        run=str(stored.attributes["created"]),
        name=run.name,
        step=step,
        rows=int(np.count_nonzero(regular & (stored.steps <= step))),
        config=config.model_dump(mode="json"),
        sources=dict(sources),
        state=state,
        tensors=tensors,
    )


def _restore(training: Training, stored: RunParameters, step: int) -> None:
    """Set model, optimizer, schedule and position in the data to those after a step."""
    optimizer, schedule = training.optimizer, training.schedule
    restore_from(stored, training.model, optimizer, step=step)
    count_steps(optimizer, float(step))
    rates = [
        base * factor(step)
        for base, factor in zip(schedule.base_lrs, schedule.lr_lambdas, strict=True)
    ]
    for group, rate in zip(optimizer.param_groups, rates, strict=True):
        group["lr"] = rate
    reached = {"last_epoch": step, "_step_count": step + 1, "_last_lr": rates}
    schedule.load_state_dict(schedule.state_dict() | reached)
    if training.batches is not None:
        training.batches.skip(step * training.config.training.accumulation)
