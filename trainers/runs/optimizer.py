"""The optimizer of a run and the schedule of its learning rate."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch.optim import SGD, Optimizer
from torch.optim.lr_scheduler import LambdaLR
from transformers import get_scheduler
from transformers.trainer_pt_utils import get_parameter_names

from trajstore.trainers.config import RunConfig, ScheduleConfig
from trajstore.trainers.rounded_optimizer import OPTIMIZERS


def build_optimizer(model: torch.nn.Module, config: RunConfig) -> Optimizer:
    """Build the optimizer of all parameters, in two groups: with and without weight decay.

    Biases and layer norms have no weight decay, as in the Trainer; the embedding has. It is the
    class of `torch.optim`, unless the state has another type or rounding is stochastic.
    """
    wanted = config.optimizer
    decayed = set(get_parameter_names(model, [torch.nn.LayerNorm], ["bias"]))
    parameters = list(model.named_parameters())
    groups = [
        {
            "params": [p for name, p in parameters if name in decayed],
            "weight_decay": wanted.weight_decay,
        },
        {"params": [p for name, p in parameters if name not in decayed], "weight_decay": 0.0},
    ]
    settings: dict[str, Any] = {"lr": wanted.lr}
    if wanted.name == "sgd":
        settings["momentum"] = wanted.momentum
    else:
        settings |= {"betas": wanted.betas, "eps": wanted.eps}
    rounded = OPTIMIZERS[wanted.name]
    state_dtype = wanted.state_dtype or config.model.dtype
    if state_dtype == config.model.dtype and wanted.rounding == "nearest":
        return rounded.real_class(groups, **settings)  # type: ignore[no-any-return]
    return rounded(
        groups,
        **settings,
        state_dtype=state_dtype,
        rounding=wanted.rounding,
        rounding_seed=config.training.seed,
    )


def build_schedule(optimizer: Optimizer, config: ScheduleConfig, steps: int) -> LambdaLR:
    """Build a schedule whose decay ends at optimizer step `steps`; then the rate is constant."""
    if config.name == "constant":
        name = "constant_with_warmup" if config.warmup_steps else "constant"
    else:
        name = config.name
    schedule: LambdaLR = get_scheduler(
        name, optimizer, num_warmup_steps=config.warmup_steps, num_training_steps=steps
    )
    if config.name == "cosine":  # the rate would rise again
        schedule.lr_lambdas = [partial(_clamped, factor, steps) for factor in schedule.lr_lambdas]
    return schedule


def learning_rate(config: RunConfig) -> Callable[[int], float]:
    """Return the learning rate as a function of the steps taken before."""
    optimizer = SGD([torch.zeros(1, device="cpu")], lr=config.optimizer.lr)
    schedule = build_schedule(optimizer, config.schedule, config.decay_steps)
    base, factor = schedule.base_lrs[0], schedule.lr_lambdas[0]
    return lambda step: float(base * factor(step))


def _clamped(factor: Callable[[int], float], last: int, step: int) -> float:
    return factor(min(step, last))
