"""The state dict of the optimizer after a recorded step."""

from __future__ import annotations

from typing import Any

import torch

from trajstore.arguments import checks_types
from trajstore.errors import VariableNotRecorded
from trajstore.schema import KEPT, OPTIMIZER_STATE, kept_as
from trajstore.store.reading.run_info import attribute
from trajstore.store.storage.remote_path import RunPath
from trajstore.trainers.recording.kept_state import ADAM_STATE
from trajstore.trainers.replays.parameter_placement import tensor_of
from trajstore.trainers.step_models.recorded_parameters import (
    RunParameters,
    StoredParameter,
    variable_of,
)
from trajstore.values.optimizer_rule import ADAM, with_numbers


@checks_types
def optimizer_state_at(run: RunPath, step: int) -> dict[str, Any] | list[dict[str, Any]]:
    """Return the optimizer's state after a step, as `load_state_dict` takes it.

    Tensors and numbers have the recorded bits and types. The learning rate of a group is the one
    that the step used, and so are the hyperparameters of the group of W; at step 0, and in other
    groups, they are the initial ones. Load it into an optimizer of the same class with the same
    parameter groups.

    Parameters
    ----------
    run : path-like or str
        A run that was recorded with ``variables="everything"``, with any optimizer that keeps
        tensors of its parameters' shapes and numbers only.
    step : int
        A recorded step; 0 is the initial state.

    Returns
    -------
    dict, or list of dict
        With ``state`` and ``param_groups``. A parameter without a gradient so far has no state. Of
        several optimizers, a list in the order in which `capture` got them.

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
    found = state_dicts_at(run, step)
    return found[0] if len(found) == 1 else found


def state_dicts_at(run: RunPath, step: int) -> list[dict[str, Any]]:
    """Return the state dict of each optimizer of a run, as `optimizer_state_at`."""
    stored = RunParameters(run)
    states = state_of(stored, step)
    groups = attribute(stored.attributes, "optimizer", "groups")
    found: dict[str | None, dict[str, Any]] = {}
    for number, (group, used) in enumerate(zip(groups, stored.settings(step), strict=True)):
        made = found.setdefault(group.get("name"), {"state": {}, "param_groups": []})
        own = [one for one in stored.parameters if one.group == number]
        own.sort(key=lambda one: one.position)
        first = sum(len(each["params"]) for each in made["param_groups"])
        numbers = range(first, first + len(own))
        made["state"] |= {
            n: states[one] for n, one in zip(numbers, own, strict=True) if one in states
        }
        settings = with_numbers(group["hyperparameters"], used).items()
        values = {key: tuple(v) if isinstance(v, list) else v for key, v in settings}
        made["param_groups"].append({**values, "params": [*numbers]})
    return [*found.values()]


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
    kept = stored.attributes.get(OPTIMIZER_STATE)
    if not isinstance(groups, list):
        missing = ["parameter groups"]
    elif kept is not None:
        whole = KEPT.name in stored
        missing = [one["name"] for one in kept if one["of"] == "other" or not whole]
    elif name in ADAM:
        trained = [one for one in stored.parameters if one.group is not None and one.requires_grad]
        wanted = dict.fromkeys(variable_of(one.variable, "exp_avg") for one in trained)
        missing = [one for one in wanted if one not in stored]
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
            "tier everything holds what an optimizer keeps as numbers, and in its parameters' shape"
        )


def state_of(stored: RunParameters, step: int) -> dict[StoredParameter, dict[str, Any]]:
    """Return the optimizer's state of each parameter that has one after a step.

    Raises
    ------
    VariableNotRecorded, StepNotFound
        As `optimizer_state_at`.
    """
    stored.number(step)
    _check_state(stored)
    entries = stored.attributes.get(OPTIMIZER_STATE)
    if entries is not None:
        marks = stored.value(KEPT.name, step)
    elif "exp_avg" in stored:
        entries, marks = ADAM_STATE, (stored.value("params_count", step) > 0) * 7
    else:
        return {}
    names = {entry["name"]: kept_as(entry["name"], entry["of"])[-1] for entry in entries}
    vectors = [entry["name"] for entry in entries if entry["of"] == "element"]
    row = stored.row(step, [v for one in vectors for v in stored.variables(one) if v in stored])
    numbers = {
        name: stored.value(variable, step)
        for name, variable in names.items()
        if name not in vectors and variable in stored
    }
    states: dict[StoredParameter, dict[str, Any]] = {}
    for number, one in enumerate(stored.parameters):
        held = [entry for bit, entry in enumerate(entries) if int(marks[number]) >> bit & 1]
        for entry in held:
            name, values = entry["name"], states.setdefault(one, {})
            variable = variable_of(one.variable, name) if name in vectors else names[name]
            if variable not in stored:
                raise VariableNotRecorded(f"{stored.run} does not hold {variable} of {one.name}")
            if name in vectors:
                values[name] = tensor_of(one.bits(row, name), one.natives[name])
            else:
                values[name] = _number(numbers[name][number], entry["type"])
    return states


def _number(value: float, kind: str) -> Any:
    """Return a number in the type in which the optimizer keeps it."""
    python = {"bool": bool, "int": int, "float": float}.get(kind)
    if python is not None:
        return python(value)
    return torch.tensor(value, dtype=getattr(torch, kind), device="cpu")
