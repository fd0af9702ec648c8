"""The state of a fork: the source's state, converted to the types and settings of the fork."""

from __future__ import annotations

from typing import Any

import torch
from torch.optim import Optimizer

from trajstore.trainers.recording.parameters import find_group
from trajstore.trainers.recording.provenance import group_attributes, optimizer_attributes
from trajstore.trainers.rounded_optimizer import RoundedSGD
from trajstore.trainers.runs.checkpoint import Checkpoint
from trajstore.trainers.runs.training_setup import Training
from trajstore.trainers.runs.training_state import model_tensors, optimizer_values, take_state

__all__ = ["ForkedState", "count_steps"]


class ForkedState:
    """A training run with the state of another training run's checkpoint and with other settings.

    Weights are converted to the type of the training, and the optimizer's state to the type that
    the optimizer loads. Hyperparameters and the schedule belong to the training; the schedule is at
    the checkpoint's step. Random states and the position in the data come from the checkpoint.

    Parameters
    ----------
    training : Training
        A new training; it is changed.
    taken : Checkpoint
        Checkpoint of a model with the same parameters.
    keep_state : bool
        If True, the optimizer keeps the checkpoint's state; otherwise it starts without state.
    """

    def __init__(self, training: Training, taken: Checkpoint, *, keep_state: bool) -> None:
        self._training = training
        self._taken = taken
        self._load_weights()
        self._load_optimizer(keep_state)
        self._load_schedule()
        # The schedule does not count skipped steps.
        count_steps(training.optimizer, float(training.schedule.last_epoch))

    def checkpoint(self, run: str, config: dict[str, Any]) -> Checkpoint:
        """Return the checkpoint of the fork.

        Parameters
        ----------
        run : str
            Creation time of the fork.
        config : dict
            Configuration of the fork.
        """
        taken = self._taken
        state, tensors = take_state(self._training, None)
        kept = ("random.", "data.")
        tensors = {key: value for key, value in tensors.items() if not key.startswith(kept)}
        tensors |= {key: value for key, value in taken.tensors.items() if key.startswith(kept)}
        state |= {key: taken.state[key] for key in ("scaler", "random", "data")}
        return Checkpoint(
            run=run,
            step=taken.step,
            rows=taken.rows,
            config=config,
            sources=taken.sources,
            state=state,
            tensors=tensors,
        )

    def optimizer_attributes(self, parameter: str, *, groups: bool) -> dict[str, Any]:
        """Return the class and hyperparameters of the optimizer for the attributes of a run.

        Parameters
        ----------
        parameter : str
            Name of the recorded parameter.
        groups : bool
            Add all parameter groups, for a run with everything.
        """
        tensor = dict(self._training.model.named_parameters())[parameter]
        optimizer, schedule = self._training.optimizer, self._training.schedule
        group = find_group(optimizer, tensor)
        assert group is not None  # it trains the whole model
        factor = schedule.lr_lambdas[0]  # that of every group
        # The rate of the first step, as in a new run with these settings.
        first = {"lr": group["initial_lr"] * factor(0)}
        found = optimizer_attributes(optimizer, group | first, {})
        if groups:
            found["groups"] = [
                {**one, "hyperparameters": one["hyperparameters"] | first}
                for one in group_attributes(optimizer)
            ]
        return found

    @torch.no_grad()
    def _load_weights(self) -> None:
        for name, tensor in model_tensors(self._training.model):
            tensor.copy_(self._taken.tensors[name])

    def _load_optimizer(self, keep_state: bool) -> None:
        if not keep_state:
            return
        optimizer = self._training.optimizer
        # The optimizer decides to which type a state is converted.
        groups = optimizer.state_dict()["param_groups"]
        values = optimizer_values(self._taken)
        optimizer.load_state_dict({"state": values, "param_groups": groups})

    def _load_schedule(self) -> None:
        schedule, before = self._training.schedule, self._taken.state["schedule"]
        reached = {key: before[key] for key in ("last_epoch", "_step_count") if key in before}
        schedule.load_state_dict(schedule.state_dict() | reached)
        rates = [
            base * factor(schedule.last_epoch)
            for base, factor in zip(schedule.base_lrs, schedule.lr_lambdas, strict=True)
        ]
        for group, rate in zip(self._training.optimizer.param_groups, rates, strict=True):
            group["lr"] = rate
        schedule.load_state_dict(schedule.state_dict() | {"_last_lr": rates})


def count_steps(optimizer: Optimizer, taken: float) -> None:
    """Set the step count of SGD with stochastic rounding, on which its numbers depend.

    SGD keeps no count, and a run or the source of a fork may have none or an old one. A replay
    counts from the first row.

    Parameters
    ----------
    optimizer : Optimizer
        Others stay unchanged.
    taken : float
        Steps taken.
    """
    if not isinstance(optimizer, RoundedSGD):
        return
    for group in optimizer.param_groups:
        if group["rounding"] == "stochastic":
            for parameter in group["params"]:
                optimizer.state[parameter]["step"] = torch.tensor(taken)
