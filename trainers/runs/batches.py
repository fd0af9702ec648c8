"""A plain PyTorch training loop."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from accelerate.data_loader import SkipBatchSampler
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import DataLoader, Dataset

from trajstore.trainers.config import RunConfig

__all__ = ["AUTOCAST", "Batches", "build_scaler", "train"]

AUTOCAST = {"bfloat16": torch.bfloat16, "float16": torch.float16}

Batch = dict[str, torch.Tensor]


class Batches:
    """Batches without end, every epoch in another order.

    The examples are shuffled by a generator of their own.

    Parameters
    ----------
    dataset : Dataset of dict of tensors
    batch_size : int
    seed : int
        Of the generator.
    skipped_shuffles : int
        Orders that are drawn and passed over first.
    """

    def __init__(
        self, dataset: Dataset[Batch], batch_size: int, *, seed: int, skipped_shuffles: int = 0
    ) -> None:
        self._generator = torch.Generator().manual_seed(seed)
        self._loader = DataLoader(
            dataset, batch_size=batch_size, shuffle=True, generator=self._generator
        )
        for _ in range(skipped_shuffles):
            next(iter(self._loader))
        self._epoch = self._generator.get_state()
        self._consumed = 0
        self._iterator: Iterator[Batch] = iter(())

    def __iter__(self) -> Iterator[Batch]:
        return self

    def __next__(self) -> Batch:
        batch = next(self._iterator, None)
        if batch is None:
            self._epoch = self._generator.get_state()
            self._consumed = 0
            self._iterator = iter(self._loader)
            batch = next(self._iterator)
        self._consumed += 1
        return batch

    @property
    def position(self) -> tuple[torch.Tensor, int]:
        """State of the generator when the epoch began, and batches taken since."""
        return self._epoch, self._consumed

    def restore(self, epoch: torch.Tensor, consumed: int) -> None:
        """Go on from a position.

        Parameters
        ----------
        epoch : tensor of uint8
        consumed : int
        """
        self._generator.set_state(epoch)
        self._epoch, self._consumed = epoch, consumed
        # As the loader, which draws the order once more, but the examples passed over are not made.
        rest = DataLoader(
            self._loader.dataset,
            batch_sampler=SkipBatchSampler(self._loader.batch_sampler, consumed),
            generator=self._generator,
        )
        self._iterator = iter(rest) if consumed else iter(())


def build_scaler(config: RunConfig, device: torch.device) -> torch.amp.GradScaler | None:
    """Gradient scaler, where gradients of float16 could vanish."""
    if config.training.autocast != "float16":
        return None
    return torch.amp.GradScaler(device.type)


def train(
    model: torch.nn.Module,
    optimizer: Optimizer,
    schedule: LRScheduler,
    batches: Iterator[Batch],
    config: RunConfig,
    device: torch.device,
    scaler: torch.amp.GradScaler | None,
    *,
    first_step: int = 0,
    on_step_end: Callable[[], bool] = lambda: False,
) -> None:
    """Train until the configuration's number of optimizer steps is reached.

    A step whose gradients overflow is skipped, and counts.

    Parameters
    ----------
    model : Module
        Returns its loss when it is given ``labels``.
    optimizer : Optimizer
    schedule : LRScheduler
    batches : iterator of dict of tensors
    config : RunConfig
    device : torch.device
    scaler : GradScaler, optional
    first_step : int
        Steps taken before.
    on_step_end : callable
        Called after each step, when everything is as the next one will find it; training stops
        when it returns True.
    """
    training = config.training
    autocast = torch.autocast(
        device.type,
        AUTOCAST.get(training.autocast, torch.bfloat16),
        enabled=training.autocast != "none",
    )
    model.train()
    for _ in range(first_step, training.steps):
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
        if on_step_end():
            return
