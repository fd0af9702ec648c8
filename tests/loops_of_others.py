"""A plain training loop and what its recording holds, for tests of loops that others wrote."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
from list_recorder import batches  # noqa: E402

from trajstore import open_run  # noqa: E402


def read(tmp_path: Path) -> Any:
    return open_run(tmp_path / "run.zarr").load()


def adamw(model: Any, lr: Any = 0.01, **options: Any) -> Any:
    return torch.optim.AdamW(model.parameters(), lr=lr, **options)


def about(notes: list[str], *words: str) -> bool:
    return any(all(word in note for word in words) for note in notes)


def steps(model: Any, optimizer: Any, count: int = 3, *, lists: Any = None) -> Iterator[Any]:
    """A plain loop; yields after each backward pass. Lists keep gradient, loss and W."""
    for batch in batches(count):
        optimizer.zero_grad()
        output = model(**batch)
        output["loss"].backward()
        yield output
        if lists is not None:
            lists.add(grad=lists.parameter.grad, loss=output["loss"])
        optimizer.step()
        if lists is not None:
            lists.add(W=lists.parameter)


def losses_of(tmp_path: Path) -> list[float]:
    return [float(loss) for loss in read(tmp_path).loss.values[1:]]
