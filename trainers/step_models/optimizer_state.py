"""The state dict of the optimizer after a recorded step."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch

from trajstore.argument_types import checks_types
from trajstore.errors import VariableNotRecorded
from trajstore.store.reading.run_settings import attribute
from trajstore.store.storage.remote_path import RunPath
from trajstore.trainers.replays.parameter_placement import tensor_of
from trajstore.trainers.step_models.recorded_parameters import RunParameters, StoredParameter

__all__ = ["optimizer_state_at", "state_of"]

_MOMENTS = ("exp_avg", "exp_avg_sq")


@checks_types
def optimizer_state_at(run: RunPath, step: int) -> dict[str, Any]:
    """Return the optimizer's state after a step, as `load_state_dict` takes it.

    Moments and step counts have the recorded bits. The learning rate of a group is the one that
    the step used; at step 0 it is the initial one. Load it into an optimizer of the same class with
    the same parameter groups.

    Parameters
    ----------
    run : path-like or str
        A run that was recorded with ``variables="everything"``, with Adam, AdamW, or SGD without
        momentum.
    step : int
        A recorded step; 0 is the initial state.

    Returns
    -------
    dict
        With ``state`` and ``param_groups``. A parameter without a gradient so far has no state.

    Raises
    ------
    RunNotFound
        If there is no run.
    VariableNotRecorded
        If the run does not hold all parameters or the whole state of the optimizer.
    StepNotFound
        If the run does not hold the step.

    Examples
    --------
    >>> from trajstore.trainers import preset, record
    >>> config = preset("gatsby").with_values(
    ...     ["training.steps=3", "training.batch_size=4", 'recording.variables=["everything"]']
    ... )
    >>> state = optimizer_state_at(record(config, "run.zarr"), 3)
    >>> decays = [group["weight_decay"] for group in state["param_groups"]]
    >>> state["state"][0]["step"].item(), decays
    (3.0, [0.01, 0.0])
    """
    stored = RunParameters(run)
    states = state_of(stored, step)
    groups = attribute(stored.attributes, "optimizer", "groups")
    order = sorted(
        (one for one in stored.parameters if one.group is not None),
        key=lambda one: (one.group or 0, one.position),
    )
    lengths = [sum(one.group == number for one in order) for number in range(len(groups))]
    return {
        "state": {number: states[one] for number, one in enumerate(order) if one in states},
        "param_groups": _groups(stored, step, groups, lengths),
    }


def _check_state(stored: RunParameters) -> None:
    """Check that the run holds the whole state of its optimizer.

    Raises
    ------
    VariableNotRecorded
        If it does not.
    """
    groups = attribute(stored.attributes, "optimizer", "groups")
    kind = str(attribute(stored.attributes, "optimizer", "class"))
    name = kind.rpartition(".")[2].removeprefix("Rounded")
    missing: list[str] = []
    if not isinstance(groups, list):
        missing = ["parameter groups"]
    elif name in ("Adam", "AdamW"):
        missing = [one for one in stored.variables("exp_avg") if one not in stored]
        if any(group["hyperparameters"].get("amsgrad") for group in groups):
            missing.append("max_exp_avg_sq")
    elif name == "SGD":
        if any(group["hyperparameters"].get("momentum") for group in groups):
            missing = ["momentum_buffer"]
    else:
        missing = ["state"]
    if missing:
        raise VariableNotRecorded(
            f"{stored.run} does not hold the {', '.join(missing)} of its optimizer {kind}; the "
            "whole state is recorded for Adam, AdamW, and SGD without momentum"
        )


def state_of(stored: RunParameters, step: int) -> dict[StoredParameter, dict[str, torch.Tensor]]:
    """Return the optimizer's state of each parameter that has one after a step.

    Raises
    ------
    VariableNotRecorded, StepNotFound
        As `optimizer_state_at`.
    """
    stored.number(step)
    _check_state(stored)
    if not all(name in stored for name in stored.variables("exp_avg")):
        return {}
    row = stored.row(step, [name for kind in _MOMENTS for name in stored.variables(kind)])
    states = {}
    for one, count in zip(stored.parameters, stored.value("params_count", step), strict=True):
        if not count:
            continue
        states[one] = {"step": torch.tensor(float(count), dtype=torch.float32)}
        for kind in _MOMENTS:
            states[one][kind] = tensor_of(one.bits(row, kind), one.natives[kind])
    return states


def _groups(
    stored: RunParameters, step: int, groups: list[Mapping[str, Any]], lengths: list[int]
) -> list[dict[str, Any]]:
    """Return the parameter groups with the rates of a step."""
    rates = stored.value("params_lr", step).tolist()
    found, first = [], 0
    for group, rate, length in zip(groups, rates, lengths, strict=True):
        settings = group["hyperparameters"].items()
        values = {key: tuple(v) if isinstance(v, list) else v for key, v in settings}
        if not math.isnan(rate):  # NaN at step 0, which took no step
            values["lr"] = rate
        found.append({**values, "params": list(range(first, first + length))})
        first += length
    return found
