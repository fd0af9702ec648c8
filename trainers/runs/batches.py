"""Shuffled batches for the plain PyTorch loop."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from accelerate.data_loader import SkipBatchSampler
from torch.utils.data import DataLoader, Dataset

Batch = dict[str, torch.Tensor]


class Batches:
    """Endless batches, with a new order in each epoch.

    A separate generator shuffles the examples.

    Parameters
    ----------
    dataset : Dataset of dict of tensors
    batch_size : int
    seed : int
        Seed of the generator.
    skipped_shuffles : int
        Number of orders to discard at the start.
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
        self._iterator: Iterator[Batch] = iter(())

    def __iter__(self) -> Iterator[Batch]:
        return self

    def __next__(self) -> Batch:
        batch = next(self._iterator, None)
        if batch is None:
            self._iterator = iter(self._loader)
            batch = next(self._iterator)
        return batch

    def skip(self, batches: int) -> None:
        """Skip the first batches, without loading their examples."""
        order: DataLoader[int] = DataLoader(
            range(len(self._loader.dataset)),  # type: ignore[arg-type]
            batch_sampler=self._loader.batch_sampler,
            generator=self._generator,
            collate_fn=len,
        )
        while batches > len(order):  # the end of an epoch belongs to it, as in `__next__`
            batches -= sum(1 for _ in order)
        # Like the loader, which draws the order, but without loading the skipped examples.
        rest = DataLoader(
            self._loader.dataset,
            batch_sampler=SkipBatchSampler(self._loader.batch_sampler, batches),
            generator=self._generator,
        )
        self._iterator = iter(rest) if batches else iter(())
