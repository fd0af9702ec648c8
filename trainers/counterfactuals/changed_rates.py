"""Learning rates and clipping factors of each step under changed settings."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from trajstore.errors import ConfigError
from trajstore.store.metadata.metadata_form import SEGMENTS, listed_segments
from trajstore.store.reading.run_info import attribute
from trajstore.trainers.config import RunConfig, ScheduleConfig
from trajstore.trainers.counterfactuals.settings import ChangedSettings
from trajstore.trainers.recording.step_gradients import clip_coefficient
from trajstore.trainers.replays.parameter_placement import tensor_of
from trajstore.trainers.replays.recorded_rows import RecordedRows
from trajstore.trainers.replays.replay_result import CannotReplay
from trajstore.trainers.runs.optimizer import build_schedule
from trajstore.values.native_types import as_bits

Rates = npt.NDArray[np.float64]


def changed_schedule(attributes: Mapping[str, Any], settings: ChangedSettings) -> dict[str, Any]:
    """Return the attribute ``optimizer.schedule`` of a run with the changed fields."""
    recorded = attribute(attributes, "optimizer", "schedule")
    schedule = dict(recorded) if isinstance(recorded, Mapping) else {}
    for name, value in settings.given.items():
        section, _, field = name.partition(".")
        if section == "schedule" or name == "training.max_grad_norm":
            schedule[field] = value
    return schedule


def changed_learning_rates(
    rows: RecordedRows, attributes: Mapping[str, Any], settings: ChangedSettings
) -> Rates:
    """Return the learning rate of the step before each row, (step,).

    The rates are as recorded if neither the rate nor its schedule changes. If the known schedules
    of all segments reproduce the recorded rates, they also give the changed rates. Otherwise the
    recorded rates are multiplied.

    Raises
    ------
    CannotReplay
        If a rate changes and the run does not record the initial rate of the schedule.
    """
    recorded = rows.rates
    reshaped = [name for name in settings.given if name.startswith("schedule.")]
    if not reshaped and "optimizer.lr" not in settings.given:
        return recorded
    base = _base_rate(attributes)
    lr = float(settings.given.get("optimizer.lr", base))
    taken = np.array([rows.steps_taken(max(number - 1, 0)) for number in range(len(rows))])
    taken[0] = max(rows.steps_taken(0) - 1, 0)
    if reshaped:
        schedule = _schedule(changed_schedule(attributes, settings))
        return _scheduled(lr, schedule, taken, recorded)
    scaled: Rates = recorded * (lr / base)
    as_recorded, changed = np.full_like(recorded, np.nan), scaled.copy()
    for first, schedule in _recorded_schedules(attributes):
        after = np.asarray(rows.steps) > first
        as_recorded[after] = _scheduled(base, schedule, taken, recorded)[after]
        changed[after] = _scheduled(lr, schedule, taken, recorded)[after]
    return changed if np.array_equal(as_recorded, recorded, equal_nan=True) else scaled


def changed_clip_coefs(rows: RecordedRows, settings: ChangedSettings) -> list[npt.NDArray[Any]]:
    """Return the bits of the factor by which clipping multiplies each row's gradient.

    Raises
    ------
    CannotReplay
        If clipping changes and the norm of all gradients is not recorded.
    """
    if "training.max_grad_norm" not in settings.given:
        return rows.clip_coefs
    if "grad_norm" not in rows:
        raise CannotReplay(
            "clipping needs the norm of all gradients, but grad_norm was not recorded; record any "
            "tier, such as variables='matrix'"
        )
    norm, factor = rows.natives["grad_norm"], rows.natives["clip_coef"]
    largest = float(settings.given["training.max_grad_norm"])
    found = []
    for number in range(len(rows)):
        coefficient = clip_coefficient(tensor_of(rows.scalar("grad_norm", number), norm), largest)
        if rows.steps[number] == 0:
            coefficient = torch.full_like(coefficient, float("nan"))
        found.append(as_bits(coefficient.to(getattr(torch, factor.name)), factor, "clip_coef"))
    return found


def _base_rate(attributes: Mapping[str, Any]) -> float:
    """Return the rate that a schedule multiplies."""
    hyperparameters = attribute(attributes, "optimizer", "hyperparameters") or {}
    config = attribute(attributes, "config", "optimizer", "lr")
    for value in (hyperparameters.get("initial_lr"), config, hyperparameters.get("lr")):
        if isinstance(value, int | float) and value > 0:
            return float(value)
    raise CannotReplay(
        "the run does not record the initial learning rate of its schedule (initial_lr of the "
        "optimizer); leave out optimizer.lr and schedule"
    )


def _recorded_schedules(attributes: Mapping[str, Any]) -> list[tuple[int, ScheduleConfig]]:
    """Return the schedule of each segment of a run and the step before it; none if unknown."""
    if SEGMENTS in attributes:
        configs = [(e["step"], RunConfig.parse(e["config"])) for e in listed_segments(attributes)]
        return [
            (step, config.schedule.model_copy(update={"steps": config.decay_steps}))
            for step, config in configs
        ]
    schedule = attribute(attributes, "optimizer", "schedule")
    try:
        return [(0, _schedule(schedule if isinstance(schedule, Mapping) else {}))]
    except ConfigError:
        return []


def _schedule(values: Mapping[str, Any]) -> ScheduleConfig:
    """Return the schedule of the values of an attribute.

    Raises
    ------
    ConfigError
        If a configuration cannot express it, or the end of its decay is not known.
    """
    named = {key: values[key] for key in ("name", "warmup_steps", "steps") if key in values}
    if "name" not in named:
        raise ConfigError(
            "the run does not record its schedule; set schedule.name, and schedule.steps if the "
            "rate decays"
        )
    schedule = RunConfig.parse({"schedule": named}).schedule
    if schedule.name != "constant" and schedule.steps is None:
        raise ConfigError(
            f"schedule.steps is missing; set the step at which the {schedule.name} decay ends"
        )
    return schedule


def _scheduled(
    lr: float, schedule: ScheduleConfig, taken: npt.NDArray[np.int64], recorded: Rates
) -> Rates:
    """Return the rates of a schedule after given numbers of steps; NaN where none is recorded."""
    optimizer = torch.optim.SGD([torch.zeros(1, device="cpu")], lr=lr)
    built = build_schedule(optimizer, schedule, schedule.steps or 1)
    factor = built.lr_lambdas[0]
    rates = np.array([lr * factor(int(steps)) for steps in taken])
    return np.where(np.isnan(recorded), np.nan, rates)
