"""Settings that a counterfactual may change, and the optimizer, rates and factors that follow."""

from __future__ import annotations

import inspect
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch.optim import Optimizer

from trajstore.errors import ConfigError
from trajstore.provenance import RunAttributes
from trajstore.store.metadata.metadata_form import SEGMENTS, listed_segments
from trajstore.store.reading.run_attributes import attribute
from trajstore.trainers.config import RunConfig, ScheduleConfig, field_name
from trajstore.trainers.recording.gradient import clip_coefficient
from trajstore.trainers.recording.notes import class_path
from trajstore.trainers.replays.findings import CannotReplay
from trajstore.trainers.replays.optimizer_steps import OptimizerSteps, RecordedOptimizer, StepInputs
from trajstore.trainers.replays.recorded_rows import tensor_of
from trajstore.trainers.rounded_optimizer import OPTIMIZERS
from trajstore.trainers.runs.training_setup import build_schedule
from trajstore.values.native_types import as_bits
from trajstore.values.optimizer_rule import numbers_of

CHANGEABLE = (
    "optimizer.name", "optimizer.lr", "optimizer.betas", "optimizer.eps", "optimizer.momentum",
    "optimizer.weight_decay", "optimizer.state_dtype", "optimizer.rounding",
    "schedule.name", "schedule.warmup_steps", "schedule.steps",
    "training.max_grad_norm", "model.dtype",
)  # fmt: skip
"""Fields of a configuration that act on recorded gradients; other fields have no effect."""

_CLASSES = {name: rounded.real_class.__name__ for name, rounded in OPTIMIZERS.items()}
_ROUNDED = {rounded.real_class.__name__: rounded for rounded in OPTIMIZERS.values()}
_ROUNDING_SETTINGS = ("state_dtype", "rounding", "rounding_seed")
_KEPT = ("lr", "initial_lr", "weight_decay", "betas", "eps", "maximize")  # by another class
_HYPERPARAMETERS = ("lr", "betas", "eps", "momentum", "weight_decay")


@dataclass(frozen=True, kw_only=True)
class ChangedSettings:
    """A run's optimizer with some settings changed.

    Attributes
    ----------
    given : dict of str to JSON value
        The changed fields with their values.
    config : dict, optional
        The changed configuration of the run, if the run has one.
    optimizer : dict
        ``class`` and ``hyperparameters``, as in the attribute ``optimizer`` of a run.
    weights_dtype : str
        Type of W and of the gradient.
    keeps_state : bool
        True if the optimizer starts from the recorded state: Adam and AdamW have the same moments.
    kept : frozenset of str
        Numbers of the optimizer, by their names in the rows, that are those of each recorded step.
    """

    given: dict[str, Any]
    config: dict[str, Any] | None
    optimizer: dict[str, Any]
    weights_dtype: str
    keeps_state: bool
    kept: frozenset[str]


def changed_settings(
    attributes: Mapping[str, Any],
    weights_dtype: str,
    assignments: Sequence[str],
    *,
    seed: int | None = None,
) -> ChangedSettings:
    """Return the settings of a run with some of them changed.

    Parameters
    ----------
    attributes : mapping
        Attributes of the root of the run.
    weights_dtype : str
        Native type of its W.
    assignments : sequence of str
        ``section.field=value`` as for a recording, of `CHANGEABLE`; ``rounding`` is short for
        ``optimizer.rounding``.
    seed : int, optional
        Seed of stochastic rounding; default: 0.

    Raises
    ------
    ConfigError
        If a field does not exist, may not change here, or has an impossible value, or if the
        optimizer lacks the setting.
    """
    described = RunAttributes.of(attributes).optimizer
    recorded, before = described.hyperparameters, described.rule
    base = _base_config(attributes, before)
    full = [re.sub(r"^\s*rounding\s*=", "optimizer.rounding=", given) for given in assignments]
    changed = base.with_values(full)
    values = changed.model_dump(mode="json")
    given = {name: attribute(values, *name.split(".")) for name in map(field_name, full)}
    for name in given:
        if name not in CHANGEABLE:
            raise ConfigError(
                f"what-if cannot change {name}; choose from {', '.join(CHANGEABLE)}, or train with "
                f"another {name} in a fork of the run (trajstore fork)"
            )
    name = _CLASSES[given["optimizer.name"]] if "optimizer.name" in given else before
    real: type[Optimizer] = getattr(torch.optim, name)
    hyperparameters = _hyperparameters(recorded, given, real, same_class=name == before)
    dtype = given.get("model.dtype", weights_dtype)
    state_dtype = given.get("optimizer.state_dtype") or recorded.get("state_dtype") or dtype
    rounding = given.get("optimizer.rounding", recorded.get("rounding", "nearest"))
    retyped = {"model.dtype", "optimizer.state_dtype", "optimizer.rounding"} & given.keys()
    is_rounded = described.name != before and not retyped
    if seed is not None and rounding != "stochastic":
        raise ConfigError(
            f"got seed {seed}, but only stochastic rounding is random; leave out the seed, or set "
            "optimizer.rounding=stochastic"
        )
    if state_dtype != dtype or rounding != "nearest" or is_rounded:
        if name not in _ROUNDED:
            raise ConfigError(
                f"{name} keeps its state in the type of the weights and rounds to nearest; only "
                f"{', '.join(_ROUNDED)} take optimizer.state_dtype or optimizer.rounding: leave "
                "them out, or set optimizer.name"
            )
        kept = recorded.get("rounding_seed", 0) if seed is None else seed
        hyperparameters |= {
            "state_dtype": state_dtype, "rounding": rounding, "rounding_seed": kept,
            "foreach": None, "fused": None,
        }  # fmt: skip
        real = _ROUNDED[name]
    return ChangedSettings(
        given=given,
        config=_changed_config(attributes.get("config"), given),
        optimizer={"class": class_path(real), "hyperparameters": hyperparameters},
        weights_dtype=dtype,
        keeps_state=name == before or {name, before} <= {"Adam", "AdamW"},
        kept=frozenset(
            numbers_of(
                item
                for item in recorded.items()
                if f"optimizer.{item[0]}" not in given
                and item[0] not in _ROUNDING_SETTINGS
                and (name == before or item[0] in _KEPT)
            )
        ),
    )


def _base_config(attributes: Mapping[str, Any], optimizer: str) -> RunConfig:
    """Return the configuration of the run, or a default with the run's kind of optimizer."""
    config = attributes.get("config")
    if config:
        return RunConfig.parse(config)
    name = next((key for key, value in _CLASSES.items() if value == optimizer), None)
    return RunConfig().with_values([] if name is None else [f"optimizer.name={name}"])


def _changed_config(
    recorded: Mapping[str, Any] | None, given: Mapping[str, Any]
) -> dict[str, Any] | None:
    """Return the recorded configuration with the given fields changed."""
    if not recorded:
        return None
    config = {section: dict(fields) for section, fields in recorded.items()}
    for name, value in given.items():
        section, _, field = name.partition(".")
        config.setdefault(section, {})[field] = value
    return config


def _hyperparameters(
    recorded: Mapping[str, Any],
    given: Mapping[str, Any],
    real: type[Optimizer],
    *,
    same_class: bool,
) -> dict[str, Any]:
    """Return the hyperparameters of the optimizer, without those of rounding."""
    values = {key: value for key, value in recorded.items() if key not in _ROUNDING_SETTINGS}
    accepted = inspect.signature(real).parameters
    if not same_class:
        # Flags such as decoupled_weight_decay distinguish the classes, so they are not kept.
        kept = {k: v for k, v in values.items() if k in _KEPT}
        kept = {k: v for k, v in kept.items() if k in accepted or k == "initial_lr"}
        defaults = {key: parameter.default for key, parameter in accepted.items()}
        values = {k: v for k, v in defaults.items() if v is not inspect.Parameter.empty} | kept
        values = {k: list(v) if isinstance(v, tuple) else v for k, v in values.items()}
    for field in _HYPERPARAMETERS:
        if f"optimizer.{field}" in given and field not in accepted:
            raise ConfigError(
                f"optimizer.{field}: {real.__name__} has no {field}; leave it out, or set "
                "optimizer.name"
            )
        if f"optimizer.{field}" in given:
            values[field] = given[f"optimizer.{field}"]
    if "optimizer.lr" in given and "initial_lr" in values:
        values["initial_lr"] = given["optimizer.lr"]
    return values


Array = npt.NDArray[Any]
Rates = npt.NDArray[np.float64]


def changed_schedule(attributes: Mapping[str, Any], settings: ChangedSettings) -> dict[str, Any]:
    """Return the attribute ``optimizer.schedule`` of a run with the changed fields."""
    schedule = {**RunAttributes.of(attributes).optimizer.schedule}
    for name, value in settings.given.items():
        section, _, field = name.partition(".")
        if section == "schedule" or name == "training.max_grad_norm":
            schedule[field] = value
    return schedule


def changed_inputs(
    steps: OptimizerSteps, optimizer: RecordedOptimizer, settings: ChangedSettings, first: int
) -> StepInputs:
    """Return what each step after a row uses; that row has what the run recorded.

    Parameters
    ----------
    steps : OptimizerSteps
        As recorded.
    optimizer : RecordedOptimizer
        With the changed settings.
    settings : ChangedSettings
    first : int

    Raises
    ------
    CannotReplay
        If the rate changes and the run does not record the initial rate of the schedule, or if
        clipping changes and the norm of all gradients is not recorded.
    """
    recorded, numbers = steps.inputs, optimizer.numbers
    # In the order of the run, with which the new one is compared.
    names = [n for n in dict.fromkeys([*recorded.numbers[first], *numbers]) if n in numbers]
    changed = [
        {n: row[n] if n in row and n in settings.kept else numbers[n] for n in names}
        for row in recorded.numbers
    ]
    changed[first] = {name: recorded.numbers[first].get(name, math.nan) for name in names}
    lr = _changed_rates(steps, settings).copy()
    lr[first] = recorded.lr[first]
    clip_coef = _changed_clip_coefs(steps, settings).copy()
    clip_coef[first] = recorded.clip_coef[first]
    return StepInputs(lr=lr, clip_coef=clip_coef, numbers=changed)


def _changed_rates(steps: OptimizerSteps, settings: ChangedSettings) -> Rates:
    """Return the learning rate of the step before each row, (step,).

    The rates are as recorded if neither the rate nor its schedule changes. If the known schedules
    of all segments reproduce the recorded rates, they also give the changed rates. Otherwise the
    recorded rates are multiplied.
    """
    recorded, rows, attributes = steps.inputs.lr, steps.rows, steps.attributes
    reshaped = any(name.startswith("schedule.") for name in settings.given)
    if not reshaped and "optimizer.lr" not in settings.given:
        return recorded
    base = _base_rate(attributes)
    lr = float(settings.given.get("optimizer.lr", base))
    counts = np.concatenate([np.maximum(rows.taken[:1] - 1, 0), rows.taken[:-1]]).astype(int)
    schedules = (
        [(0, _schedule(changed_schedule(attributes, settings)))]
        if reshaped
        else _recorded_schedules(attributes)
    )

    def scheduled(rate: float) -> Rates:
        rates = np.full_like(recorded, np.nan)
        for after, schedule in schedules:
            optimizer = torch.optim.SGD([torch.zeros(1, device="cpu")], lr=rate)
            factor = build_schedule(optimizer, schedule, schedule.steps or 1).lr_lambdas[0]
            later = rows.steps > after
            rates[later] = [rate * factor(count) for count in counts[later].tolist()]
        return np.where(np.isnan(recorded), np.nan, rates)

    if reshaped or np.array_equal(scheduled(base), recorded, equal_nan=True):
        return scheduled(lr)
    return recorded * (lr / base)


def _changed_clip_coefs(steps: OptimizerSteps, settings: ChangedSettings) -> Array:
    """Return the bits of the factor by which clipping multiplies each row's gradient."""
    if "training.max_grad_norm" not in settings.given:
        return steps.inputs.clip_coef
    if "grad_norm" not in steps.rows:
        raise CannotReplay(
            "clipping needs the norm of all gradients, but grad_norm was not recorded; record "
            "any tier, such as variables='matrix'"
        )
    norms, natives = steps.rows.scalars("grad_norm"), steps.rows.natives
    largest = float(settings.given["training.max_grad_norm"])
    factors = clip_coefficient(tensor_of(norms, natives["grad_norm"]), largest)
    factor = natives["clip_coef"]
    return as_bits(factors.to(getattr(torch, factor.name)), factor, "clip_coef")


def _base_rate(attributes: Mapping[str, Any]) -> float:
    """Return the rate that a schedule multiplies."""
    hyperparameters = RunAttributes.of(attributes).optimizer.hyperparameters
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
    try:
        return [(0, _schedule(RunAttributes.of(attributes).optimizer.schedule))]
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
