"""The state of a recorded step, set in an existing model and its optimizer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch.optim import Optimizer

from trajstore.arguments import checks_types
from trajstore.errors import InvalidArgument
from trajstore.store.reading.run_info import attribute
from trajstore.store.storage.remote_path import RunPath
from trajstore.trainers.recording.device_to_host import type_name
from trajstore.trainers.recording.kept_state import set_random_state
from trajstore.trainers.recording.notes import group_attributes
from trajstore.trainers.recording.parameters import JoinedOptimizer, find_group
from trajstore.trainers.step_models.optimizer_state import state_of
from trajstore.trainers.step_models.recorded_parameters import RunParameters
from trajstore.trainers.step_models.step_model import StepModel
from trajstore.values.optimizer_rule import with_numbers


@checks_types
def restore(
    run: RunPath,
    model: torch.nn.Module,
    optimizer: Optimizer | Sequence[Optimizer],
    *,
    step: int | None = None,
) -> int:
    """Set a model and its optimizer to the state after a recorded step.

    Weights, recorded buffers, and all that the optimizer keeps get the recorded bits. The learning
    rates, and the hyperparameters of the group of the recorded matrix, become those that the next
    step used; after the last step of the run they stay as they are. Set a schedule to the step
    before. If the model draws random numbers, the generators of the CPU and of its device get
    their states before the first forward pass of the next step. The order of the data is that of
    the caller.

    Parameters
    ----------
    run : path-like or str
        A run that was recorded with ``variables="everything"``.
    model : Module
        The model of the recording, not wrapped.
    optimizer : Optimizer, or sequence of Optimizer
        Class and parameter groups of each are those of the recording, with the same parameters.
    step : int, optional
        Default: the last step; if the run has ``random_state``, the one before. The random state
        after the last step is not recorded, so that step has to be repeated.

    Returns
    -------
    int
        The step, for ``capture(..., resume=True, first_step=step)``.

    Raises
    ------
    RunNotFound
        If there is no run.
    VariableNotRecorded
        If the run does not hold all parameters or the whole state of the optimizer.
    StepNotFound
        If the run does not hold the step.
    InvalidArgument
        If model or optimizer have other parameters than the run, the optimizer is of another class,
        or the random state after the step is not recorded.

    Examples
    --------
    >>> from trajstore.trainers import capture
    >>> model = torch.nn.Sequential(torch.nn.Embedding(5, 3), torch.nn.Linear(3, 5))
    >>> optimizer = torch.optim.AdamW(model.parameters())
    >>> options = {"parameter": "0.weight", "variables": "everything"}
    >>> with capture(model, optimizer, "run.zarr", **options) as run:
    ...     for _ in range(3):
    ...         loss = model(torch.arange(5)).square().sum()
    ...         loss.backward()
    ...         run.observe(loss=loss)
    ...         optimizer.step()
    ...         optimizer.zero_grad()
    >>> trained = model[1].bias.tolist()
    >>> torch.nn.init.zeros_(model[1].bias).tolist()
    [0.0, 0.0, 0.0, 0.0, 0.0]
    >>> restore("run.zarr", model, optimizer), model[1].bias.tolist() == trained
    (3, True)
    """
    stored = RunParameters(run)
    draws = "random_state" in stored
    if step is None:
        step = _last_step(stored, draws=draws)
    elif draws and stored.number(step) not in _followed(stored):
        raise InvalidArgument(
            f"{stored.run} does not hold step {step + 1}, whose row has the random state after "
            f"step {step}; restore step {_last_step(stored, draws=True)}, or one before it"
        )
    states = state_of(stored, step)
    _check_types(stored, model)
    joined = JoinedOptimizer(optimizer)
    _check_classes(stored, joined)
    tensors = StepModel(stored, lambda: model)
    trained = {one: p for one, p in tensors.parameters if find_group(joined, p) is not None}
    for one in states.keys() - trained.keys():
        raise InvalidArgument(
            f"{one.name} is not in the optimizer, but that of {stored.run} trained it; build the "
            "optimizer with the recorded parameters"
        )
    tensors.copy(stored.row(step, tensors.variables))
    of_tensors: dict[torch.Tensor, dict[str, Any]] = {
        trained[one]: values for one, values in states.items()
    }
    for member in joined.members:
        groups, order = member.state_dict()["param_groups"], joined.parameters(member)
        state = {n: of_tensors[p] for n, p in enumerate(order) if p in of_tensors}
        member.load_state_dict({"state": state, "param_groups": groups})
    for parameter, values in of_tensors.items():
        kept = joined.state[parameter]
        for name, value in values.items():
            if isinstance(value, torch.Tensor) and kept[name].dtype != value.dtype:
                # torch has converted it to the type of the parameter.
                kept[name] = value.to(kept[name].device)
    if stored.number(step) in _followed(stored):
        used = stored.settings(step + 1)
        for one, parameter in trained.items():
            if one.group is not None:
                _set_numbers(find_group(joined, parameter) or {}, used[one.group])
    if draws:
        set_generators(model, stored.value("random_state", step + 1))
    return step


def _set_numbers(group: dict[str, Any], numbers: Mapping[str, float]) -> None:
    """Set settings of a parameter group; a tensor, which a program may hold, in place."""
    for key, value in with_numbers(group, numbers).items():
        if isinstance(held := group[key], torch.Tensor):
            held.fill_(value)
        else:
            group[key] = value


def _followed(stored: RunParameters) -> npt.NDArray[Any]:
    """Return the rows whose next row is that of the next step."""
    return np.flatnonzero(np.diff(stored.steps) == 1)


def _last_step(stored: RunParameters, *, draws: bool) -> int:
    """Return the last step that can be restored."""
    rows = _followed(stored) if draws else np.arange(len(stored.steps))
    if not len(rows):
        raise InvalidArgument(
            f"{stored.run} has no step that can be restored, because the random state after a step "
            "is in the row of the next one; record every step"
        )
    return int(stored.steps[rows[-1]])


def _check_types(stored: RunParameters, model: torch.nn.Module) -> None:
    """Check that the parameters have the recorded types, before anything changes."""
    recorded = {one.name: one.native.name for one in stored.parameters}
    for name, tensor in model.named_parameters():
        kind = type_name(tensor.dtype)
        if recorded.get(name, kind) != kind:
            raise InvalidArgument(
                f"{name} is {kind} in the model and {recorded[name]} in {stored.run}; build the "
                "model in the recorded types"
            )


def _check_classes(stored: RunParameters, joined: JoinedOptimizer) -> None:
    """Check that the optimizers are of the recorded classes, whose state they get."""
    recorded, own = (
        sorted({entry["class"].rpartition(".")[2] for entry in groups})
        for groups in (
            attribute(stored.attributes, "optimizer", "groups"),
            group_attributes(joined),
        )
    )
    if own != recorded:
        raise InvalidArgument(
            f"the optimizer is {' and '.join(own)}, and that of {stored.run} was "
            f"{' and '.join(recorded)}; build the optimizer of the recording"
        )


def set_generators(model: torch.nn.Module, values: npt.NDArray[Any]) -> None:
    """Set the random generators of a model's device to a row of ``random_state``."""
    device = next(model.parameters()).device
    set_random_state(device, torch.from_numpy(values).to(torch.uint8))
