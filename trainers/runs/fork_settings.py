"""What may change where a training is forked, and what that makes of the run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from trajstore.errors import ConfigError, InvalidArgument
from trajstore.schema import TIERS
from trajstore.store.writing.branched_run import holds_exactly
from trajstore.trainers.config import RunConfig
from trajstore.trainers.recording.parameter_rows import MOMENTS
from trajstore.trainers.runs.run_plan import native_types

__all__ = ["changed_fields", "forked_config", "forked_types", "keeps_state"]

_SECTIONS = ("optimizer", "schedule")
_FIELDS = (
    "training.steps",
    "training.max_grad_norm",
    "training.autocast",
    "training.device",
    "model.dtype",
    "recording.memory",
    "recording.commit_every",
    "recording.checkpoint_every",
)


def forked_config(recorded: RunConfig, settings: Sequence[str]) -> RunConfig:
    """Configuration of a fork.

    Parameters
    ----------
    recorded : RunConfig
        Of the run that is forked.
    settings : sequence of str
        ``section.field=value``.

    Raises
    ------
    ConfigError
        If a field is unknown, a value impossible, or the field must stay as it is; the message says
        which may change.
    """
    config = recorded.with_values(settings)
    for field in changed_fields(recorded, config):
        if field.partition(".")[0] not in _SECTIONS and field not in _FIELDS:
            raise ConfigError(
                f"{field} cannot change at a fork; what can: "
                f"{', '.join(f'{section}.*' for section in _SECTIONS)}, {', '.join(_FIELDS)}"
            )
    scaled = {recorded.training.autocast, config.training.autocast}
    if len(scaled) > 1 and "float16" in scaled:
        raise ConfigError(
            f"training.autocast = {config.training.autocast!r}: the run was recorded with "
            f"{recorded.training.autocast!r}, and a gradient scaler can neither come nor go at a "
            "fork; none and bfloat16 can take each other's place"
        )
    return config


def changed_fields(recorded: RunConfig, config: RunConfig) -> dict[str, Any]:
    """Fields whose values are others now, with these."""
    before = recorded.flat()
    return {field: value for field, value in config.flat().items() if value != before[field]}


def keeps_state(recorded: RunConfig, config: RunConfig) -> bool:
    """Whether the optimizer's state means the same to the optimizer of the fork."""
    return (recorded.optimizer.name == "sgd") == (config.optimizer.name == "sgd")


def forked_types(held: Mapping[str, str], recorded: RunConfig, config: RunConfig) -> dict[str, str]:
    """Native type of each variable that a fork holds.

    Parameters
    ----------
    held : mapping of str to str
        Native type of each variable of the run that is forked.
    recorded, config : RunConfig
        Of that run, and of the fork.

    Raises
    ------
    ConfigError
        If a variable would get a type that does not hold the values that it has until there.
    InvalidArgument
        If a variable that the configuration names would not be there any more.
    """
    before, after = native_types(recorded), native_types(config)
    types = {}
    for name, native in held.items():
        if name in MOMENTS and config.optimizer.name == "sgd":
            if name in set(config.recording.record) - set(TIERS):
                raise InvalidArgument(
                    f"optimizer.name = 'sgd': the run records {name} by name, and sgd has none; "
                    "fork with adam or adamw"
                )
            continue
        if name == "W_ulp_l1" and config.model.dtype != recorded.model.dtype:
            raise ConfigError(
                f"model.dtype = {config.model.dtype!r}: the run records W_ulp_l1, which counts in "
                f"spacings of {recorded.model.dtype}; such a run keeps its type"
            )
        same = before.get(name) == after.get(name)
        types[name] = native if same else after.get(name, native)
        if not holds_exactly(native, types[name]):
            raise ConfigError(
                f"{name} would be {types[name]} and is {native} until there, which would have to "
                "be rounded; at a fork types can only become wider, such as model.dtype=float32"
            )
    return types
