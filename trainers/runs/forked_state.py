"""The state of a training as the training of a fork takes it up: cast, with other settings."""

from __future__ import annotations

from typing import Any

import torch

from trajstore.trainers.recording.parameters import group_of
from trajstore.trainers.recording.provenance import optimizer_attributes
from trajstore.trainers.rounded_optimizer import RoundedSGD
from trajstore.trainers.runs.checkpoint import Checkpoint
from trajstore.trainers.runs.training_setup import Training
from trajstore.trainers.runs.training_state import model_tensors, optimizer_values, take_state

__all__ = ["ForkedState"]


class ForkedState:
    """A training put to a checkpoint of another with other settings.

    Weights are cast to the type that the training has; state of the optimizer to whatever type the
    optimizer loads it in. Hyperparameters and the schedule are those of the training; the schedule
    is at the checkpoint's step. Random states and the place in the data are the checkpoint's.

    Parameters
    ----------
    training : Training
        As it was built; it is changed.
    taken : Checkpoint
        Of a model with the same parameters.
    keep_state : bool
        Whether the optimizer goes on with the state that there is; if not, it starts anew.
    """

    def __init__(self, training: Training, taken: Checkpoint, *, keep_state: bool) -> None:
        self._training = training
        self._taken = taken
        self._load_weights()
        self._load_optimizer(keep_state)
        self._load_schedule()
        self._count_steps()

    def checkpoint(self, run: str, config: dict[str, Any]) -> Checkpoint:
        """Checkpoint of the fork.

        Parameters
        ----------
        run : str
            When the run of the fork was created.
        config : dict
            Its configuration.
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

    def optimizer_attributes(self, parameter: str) -> dict[str, Any]:
        """Class and hyperparameters of the optimizer, as a run's attributes say them.

        Parameters
        ----------
        parameter : str
            Name of the recorded one.
        """
        tensor = dict(self._training.model.named_parameters())[parameter]
        optimizer, schedule = self._training.optimizer, self._training.schedule
        group = group_of(optimizer, tensor, parameter)
        factor = schedule.lr_lambdas[0]  # that of every group
        # The rate of the first step, as in a run that begins with these settings.
        return optimizer_attributes(optimizer, group | {"lr": group["initial_lr"] * factor(0)}, {})

    @torch.no_grad()
    def _load_weights(self) -> None:
        for name, tensor in model_tensors(self._training.model):
            tensor.copy_(self._taken.tensors[name])

    def _load_optimizer(self, keep_state: bool) -> None:
        if not keep_state:
            return
        optimizer = self._training.optimizer
        # Which type a state is loaded in is for the optimizer to say.
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

    def _count_steps(self) -> None:
        """Have SGD that rounds at random draw the numbers of the steps that are to come.

        SGD keeps no count, and what a run was before may have had none, or an old one; replaying
        its rows counts from the start. The schedule has not counted the steps that were skipped.
        """
        optimizer = self._training.optimizer
        if not isinstance(optimizer, RoundedSGD):
            return
        taken = float(self._training.schedule.last_epoch)
        for group in optimizer.param_groups:
            if group["rounding"] == "stochastic":
                for parameter in group["params"]:
                    optimizer.state[parameter]["step"] = torch.tensor(taken)
