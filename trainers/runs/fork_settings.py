"""The settings that may change at a fork, and their effect on the run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from trajstore.errors import ConfigError, InvalidArgument
from trajstore.exchange.export_run import holds_exactly
from trajstore.schema import TIERS, VARIABLES
from trajstore.trainers.config import RunConfig
from trajstore.trainers.runs.run_plan import native_types
from trajstore.values.optimizer_rule import MOMENTS

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
    """Return the configuration of a fork.

    Parameters
    ----------
    recorded : RunConfig
        Configuration of the run to fork.
    settings : sequence of str
        ``section.field=value``.

    Raises
    ------
    ConfigError
        If a field is unknown, a value is impossible, or the field must not change; the message
        lists the fields that may.
    """
    config = recorded.with_values(settings)
    for field in changed_fields(recorded, config):
        if field.partition(".")[0] not in _SECTIONS and field not in _FIELDS:
            raise ConfigError(
                f"{field} cannot change at a fork; fields that may change: "
                f"{', '.join(f'{section}.*' for section in _SECTIONS)}, {', '.join(_FIELDS)}"
            )
    scaled = {recorded.training.autocast, config.training.autocast}
    if len(scaled) > 1 and "float16" in scaled:
        raise ConfigError(
            f"training.autocast = {config.training.autocast!r}: the run was recorded with "
            f"{recorded.training.autocast!r}, and a fork can neither add nor remove a gradient "
            "scaler; only none and bfloat16 are interchangeable"
        )
    return config


def changed_fields(recorded: RunConfig, config: RunConfig) -> dict[str, Any]:
    """Return the changed fields with their new values."""
    before = recorded.flat()
    return {field: value for field, value in config.flat().items() if value != before[field]}


def keeps_state(recorded: RunConfig, config: RunConfig) -> bool:
    """Return True if the optimizer of the fork can use the state."""
    return (recorded.optimizer.name == "sgd") == (config.optimizer.name == "sgd")


def forked_types(held: Mapping[str, str], recorded: RunConfig, config: RunConfig) -> dict[str, str]:
    """Return the native type of each variable of a fork.

    Parameters
    ----------
    held : mapping of str to str
        Native type of each variable of the run to fork.
    recorded, config : RunConfig
        Configurations of that run and of the fork.

    Raises
    ------
    ConfigError
        If the new type of a variable cannot represent its recorded values.
    InvalidArgument
        If the fork would lack a variable that the configuration names.
    """
    before, after = native_types(recorded), native_types(config)
    types = {}
    for name, native in held.items():
        if name not in VARIABLES and not keeps_state(recorded, config):
            continue
        of_other = name == "hyperparameters" and not keeps_state(recorded, config)
        if of_other or (name in MOMENTS and config.optimizer.name == "sgd"):
            if name in set(config.recording.variables) - set(TIERS):
                raise InvalidArgument(
                    f"optimizer.name = {config.optimizer.name!r}: the run records {name} of "
                    f"{recorded.optimizer.name} by name; fork with the same optimizer"
                )
            continue
        if name == "W_ulp_l1" and config.model.dtype != recorded.model.dtype:
            raise ConfigError(
                f"model.dtype = {config.model.dtype!r}: the run records W_ulp_l1 in spacings of "
                f"{recorded.model.dtype}; leave out model.dtype"
            )
        same = before.get(name) == after.get(name)
        types[name] = native if same else after.get(name, native)
        if not holds_exactly(native, types[name]):
            raise ConfigError(
                f"{name} would change from {native} to {types[name]}, which rounds its values; a "
                "fork can only widen types, such as model.dtype=float32"
            )
    return types
