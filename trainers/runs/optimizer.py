"""The optimizer of a run and the schedule of its learning rate."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch.optim import SGD, Adam, AdamW, Optimizer
from torch.optim.lr_scheduler import LambdaLR
from transformers import get_scheduler
from transformers.trainer_pt_utils import get_parameter_names

from trainers.config import OptimizerConfig, ScheduleConfig

__all__ = ["build_optimizer", "build_schedule"]


def build_optimizer(model: torch.nn.Module, config: OptimizerConfig) -> Optimizer:
    """Optimizer over all parameters, in two groups: with weight decay, and without.

    Biases and layer norms are without, as the Trainer has it; the embedding is with.
    """
    decayed = set(get_parameter_names(model, [torch.nn.LayerNorm], ["bias"]))
    parameters = list(model.named_parameters())
    groups = [
        {
            "params": [p for name, p in parameters if name in decayed],
            "weight_decay": config.weight_decay,
        },
        {"params": [p for name, p in parameters if name not in decayed], "weight_decay": 0.0},
    ]
    if config.name == "sgd":
        return SGD(groups, lr=config.lr, momentum=config.momentum)
    kind = AdamW if config.name == "adamw" else Adam
    return kind(groups, lr=config.lr, betas=config.betas, eps=config.eps)


def build_schedule(optimizer: Optimizer, config: ScheduleConfig, steps: int) -> LambdaLR:
    """Schedule whose decay ends at optimizer step `steps`; afterwards the rate stays."""
    if config.name == "constant":
        name = "constant_with_warmup" if config.warmup_steps else "constant"
    else:
        name = config.name
    schedule: LambdaLR = get_scheduler(
        name, optimizer, num_warmup_steps=config.warmup_steps, num_training_steps=steps
    )
    if config.name == "cosine":  # which would rise again
        schedule.lr_lambdas = [partial(_held, factor, steps) for factor in schedule.lr_lambdas]
    return schedule


def _held(factor: Callable[[int], float], last: int, step: int) -> float:
    return factor(min(step, last))
