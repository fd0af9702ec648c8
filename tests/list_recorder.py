"""A tiny model, a plain loop, and a second recorder that keeps plain lists, to compare with."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import xarray as xr

torch = pytest.importorskip("torch")
from trajstore.trainers import capture  # noqa: E402

VOCAB, HIDDEN, BATCH, CONTEXT = 17, 8, 3, 5


class TinyModel(torch.nn.Module):
    """A language model with tied embeddings that returns its loss and logits."""

    def __init__(self, dtype: Any = torch.float32) -> None:
        super().__init__()
        self.embedding = torch.nn.Embedding(VOCAB, HIDDEN)
        self.mix = torch.nn.Linear(HIDDEN, HIDDEN)
        self.head = torch.nn.Linear(HIDDEN, VOCAB, bias=False)
        self.head.weight = self.embedding.weight
        self.to(dtype)

    def get_output_embeddings(self) -> Any:
        return self.head

    def forward(self, input_ids: Any, labels: Any = None) -> dict[str, Any]:
        logits = self.head(torch.tanh(self.mix(self.embedding(input_ids))))
        if labels is None:
            return {"logits": logits}
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1).float(), labels.flatten())
        return {"loss": loss, "logits": logits}


def batches(count: int, seed: int = 0) -> list[dict[str, Any]]:
    """Batches of ids below 13: the last four tokens are dead."""
    generator = torch.Generator().manual_seed(seed)
    made = []
    for _ in range(count):
        ids = torch.randint(0, 13, (BATCH, CONTEXT + 1), generator=generator)
        made.append({"input_ids": ids[:, :-1], "labels": ids[:, 1:]})
    return made


def adamw(model: Any, lr: Any = 0.01, **options: Any) -> Any:
    return torch.optim.AdamW(model.parameters(), lr=lr, **options)


def steps(
    model: Any,
    optimizer: Any,
    count: int = 3,
    *,
    lists: Any = None,
    clip: float = 0,
    seed: int = 0,
    accumulate: int = 1,
    after: Callable[[Any, int], None] = lambda model, number: None,
) -> Iterator[Any]:
    """A plain loop; yields the output of the model before each step, when it has clipped.

    Lists keep what each step got and did. `after` may change the model between the steps.
    """
    for number in range(count):
        optimizer.zero_grad()
        for batch in batches(accumulate, seed + number):
            output = model(**batch)
            (output["loss"] / accumulate if accumulate > 1 else output["loss"]).backward()
        if lists is not None:
            lists.add(grad=lists.parameter.grad, loss=output["loss"])
            lists.add(logits=output["logits"][0, -1])
        if clip:
            norm = torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
            if lists is not None:
                lists.add(grad_norm=norm)
        yield output
        optimizer.step()
        if lists is not None:
            lists.after_step(optimizer)
        after(model, number)


def take_steps(model: Any, optimizer: Any, count: int = 3, **options: Any) -> None:
    deque(steps(model, optimizer, count, **options), maxlen=0)


OF_A_LOOP = ("clip", "seed", "accumulate", "after")


def trained(model: Any, optimizer: Any, path: Path, count: int = 3, **options: Any) -> Lists:
    """A plain loop with both recorders; takes the options of `steps` and of `capture`."""
    of_loop = {name: options.pop(name) for name in OF_A_LOOP if name in options}
    lists = Lists(model.embedding.weight)
    with capture(model, optimizer, path, **{"fsync": False} | options):
        take_steps(model, optimizer, count, lists=lists, **of_loop)
    return lists


class Lists:
    """The dumb recorder: clones of everything, in lists."""

    def __init__(self, parameter: Any) -> None:
        self.parameter = parameter
        nan = torch.full_like(parameter, float("nan"))
        self.rows: dict[str, list[Any]] = {"W": [parameter.detach().clone()], "grad": [nan]}

    def add(self, **values: Any) -> None:
        for name, value in values.items():
            dtype = torch.float64 if isinstance(value, float) else None
            kept = torch.as_tensor(value, dtype=dtype).detach().clone()
            self.rows.setdefault(name, []).append(kept)

    def after_step(self, optimizer: Any) -> None:
        self.add(W=self.parameter)
        for name in ("exp_avg", "exp_avg_sq"):
            state = optimizer.state.get(self.parameter, {})
            if name in state:
                self.rows.setdefault(name, [torch.zeros_like(self.parameter)])
                self.add(**{name: state[name]})

    def agree_with(self, path: Path) -> xr.Dataset:
        """Compare every row that was kept, bit for bit."""
        ds = xr.open_zarr(path, chunks=None)
        for name, rows in self.rows.items():
            wide = torch.float64 if rows[-1].dtype == torch.float64 else torch.float32
            kept = torch.stack([row.to(wide) for row in rows]).numpy()
            stored = ds[name].values[-len(rows) :]
            unsigned = f"u{kept.itemsize}"
            both_nan = np.isnan(kept) & np.isnan(stored)
            same = (kept.view(unsigned) == stored.view(unsigned)) | both_nan
            assert kept.shape == stored.shape, name
            assert same.all(), f"{name} differs in rows {np.unique(np.nonzero(~same)[0])}"
            assert ds[name].attrs["native_dtype"] == str(rows[-1].dtype).removeprefix("torch.")
        return ds
