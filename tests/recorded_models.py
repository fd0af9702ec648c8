"""Tiny runs of the tier everything, with copies that torch itself made of each step."""

from __future__ import annotations

import copy
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
from transformers import GPT2Config, GPT2LMHeadModel  # noqa: E402

from trajstore.trainers import capture  # noqa: E402

STEPS = 6


@dataclass(kw_only=True)
class Recorded:
    """A run, and the state dicts of model and optimizer after each step."""

    path: Path
    model: Any
    optimizer: Any
    models: list[dict[str, Any]] = field(default_factory=list)
    optimizers: list[dict[str, Any]] = field(default_factory=list)

    def keep(self) -> None:
        self.models.append(copy.deepcopy(self.model.state_dict()))
        self.optimizers.append(copy.deepcopy(self.optimizer.state_dict()))


class OwnModel(torch.nn.Module):
    """Buffers that change, a parameter without gradient in odd steps, and one not trained."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.embedding = torch.nn.Embedding(11, 4)
        self.normalization = torch.nn.BatchNorm1d(4)
        self.dropout = torch.nn.Dropout(dropout)
        self.sometimes = torch.nn.Linear(4, 4)
        self.fixed = torch.nn.Linear(4, 4).requires_grad_(False)
        self.head = torch.nn.Linear(4, 11, bias=False)

    def forward(self, ids: Any, *, whole: bool = True) -> Any:
        hidden = self.normalization(self.fixed(self.embedding(ids)).flatten(0, 1))
        return self.head(self.dropout(torch.tanh(self.sometimes(hidden)) if whole else hidden))


def gpt2() -> Any:
    """GPT-2 in bfloat16 with tied embeddings, without dropout."""
    config = GPT2Config(
        vocab_size=128, n_positions=8, n_embd=8, n_layer=2, n_head=2, bos_token_id=None,
        eos_token_id=None, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,
    )  # fmt: skip
    return GPT2LMHeadModel(config).to(torch.bfloat16)


def record_gpt2(folder: Path, **options: Any) -> Recorded:
    """Train with two groups of AdamW, whose rate falls."""
    torch.manual_seed(3)
    model = gpt2()
    parts = (
        [p for p in model.parameters() if p.ndim > 1],
        [p for p in model.parameters() if p.ndim < 2],
    )
    groups = [{"params": parts[0], "weight_decay": 0.1}, {"params": parts[1], "lr": 0.02}]
    optimizer = torch.optim.AdamW(groups, lr=0.01, betas=(0.8, 0.9), weight_decay=0.0)
    recorded = Recorded(path=folder / "gpt2.zarr", model=model, optimizer=optimizer)
    chosen = {"variables": "everything", "origin": {"tokenizer": {"name": "ascii"}}, **options}
    with capture(model, optimizer, recorded.path, **chosen):
        recorded.keep()
        for _ in range(STEPS):
            ids = torch.randint(0, 128, (2, 8))
            model(ids, labels=ids).loss.backward()
            for group in optimizer.param_groups:
                group["lr"] *= 0.9
            optimizer.step()
            optimizer.zero_grad()
            recorded.keep()
    return recorded


def record_own(folder: Path) -> Recorded:
    """Train a model that is not one of transformers."""
    torch.manual_seed(4)
    model = OwnModel()
    optimizer = torch.optim.Adam([p for p in model.parameters() if p.requires_grad], lr=0.01)
    recorded = Recorded(path=folder / "own.zarr", model=model, optimizer=optimizer)
    with capture(
        model, optimizer, recorded.path, variables="everything", parameter="embedding.weight"
    ) as recorder:
        recorded.keep()
        for step in range(STEPS):
            ids = torch.randint(0, 11, (2, 5))
            logits = model(ids, whole=step % 2 == 0)
            loss = torch.nn.functional.cross_entropy(logits, ids.flatten())
            loss.backward()
            recorder.observe(loss=loss)
            optimizer.step()
            optimizer.zero_grad()
            recorded.keep()
    return recorded


def same(value: Any, other: Any) -> bool:
    """True if two nested values are the same, tensors bit for bit."""
    if isinstance(value, torch.Tensor):
        bits = [t.contiguous().view(-1).view(torch.uint8) for t in (value.detach(), other.detach())]
        return value.dtype == other.dtype and value.shape == other.shape and torch.equal(*bits)
    if isinstance(value, dict):
        return value.keys() == other.keys() and all(same(value[key], other[key]) for key in value)
    if isinstance(value, list | tuple):
        return (
            type(value) is type(other) and len(value) == len(other) and all(map(same, value, other))
        )
    return bool(value == other)
