"""A plain training loop and what its recording holds, for tests of loops that others wrote."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

import pytest

torch = pytest.importorskip("torch")
from list_recorder import batches  # noqa: E402


def adamw(model: Any, lr: Any = 0.01, **options: Any) -> Any:
    return torch.optim.AdamW(model.parameters(), lr=lr, **options)


def steps(
    model: Any,
    optimizer: Any,
    count: int = 3,
    *,
    lists: Any = None,
    loss: Callable[[Any], Any] = lambda output: output["loss"],
) -> Iterator[Any]:
    """A plain loop; yields after each backward pass. Lists keep gradient, loss and W."""
    for batch in batches(count):
        optimizer.zero_grad()
        output = model(**batch)
        loss(output).backward()
        yield output
        if lists is not None:
            lists.add(grad=lists.parameter.grad, loss=output["loss"])
        optimizer.step()
        if lists is not None:
            lists.add(W=lists.parameter)


def take_steps(model: Any, optimizer: Any, count: int = 3, *, lists: Any = None) -> None:
    deque(steps(model, optimizer, count, lists=lists), maxlen=0)
