"""A plain PyTorch training loop."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import DataLoader, Dataset

from trainers.config import RunConfig

__all__ = ["AUTOCAST", "build_scaler", "train"]

AUTOCAST = {"bfloat16": torch.bfloat16, "float16": torch.float16}


def build_scaler(config: RunConfig, device: torch.device) -> torch.amp.GradScaler | None:
    """Gradient scaler, where gradients of float16 could vanish."""
    if config.training.autocast != "float16":
        return None
    return torch.amp.GradScaler(device.type)


def train(
    model: torch.nn.Module,
    optimizer: Optimizer,
    schedule: LRScheduler,
    dataset: Dataset[dict[str, torch.Tensor]],
    config: RunConfig,
    device: torch.device,
    scaler: torch.amp.GradScaler | None,
) -> None:
    """Train for as many optimizer steps as the configuration says.

    The examples are shuffled by a generator of their own, seeded with ``training.seed``; every
    epoch is another order. A step whose gradients overflow is skipped, and counts.

    Parameters
    ----------
    model : Module
        Returns its loss when it is given ``labels``.
    optimizer : Optimizer
    schedule : LRScheduler
    dataset : Dataset of dict of tensors
    config : RunConfig
    device : torch.device
    scaler : GradScaler, optional
    """
    training = config.training
    loader = DataLoader(
        dataset,
        batch_size=training.batch_size,
        shuffle=True,
        generator=torch.Generator().manual_seed(training.seed),
    )
    for _ in range(config.data.skipped_shuffles):
        next(iter(loader))
    batches = _endless(loader)
    autocast = torch.autocast(
        device.type,
        AUTOCAST.get(training.autocast, torch.bfloat16),
        enabled=training.autocast != "none",
    )
    model.train()
    for _ in range(training.steps):
        optimizer.zero_grad()
        for _ in range(training.accumulation):
            batch = {name: values.to(device) for name, values in next(batches).items()}
            with autocast:
                loss = model(**batch).loss / training.accumulation
            (loss if scaler is None else scaler.scale(loss)).backward()
        if scaler is not None:
            scaler.unscale_(optimizer)
        if training.max_grad_norm:
            torch.nn.utils.clip_grad_norm_(model.parameters(), training.max_grad_norm)
        if scaler is None:
            optimizer.step()
            schedule.step()
        else:
            scale = scaler.get_scale()
            scaler.step(optimizer)
            scaler.update()
            if scaler.get_scale() >= scale:  # it falls when a step was skipped
                schedule.step()


def _endless(loader: DataLoader[Any]) -> Iterator[dict[str, torch.Tensor]]:
    while True:
        yield from loader
