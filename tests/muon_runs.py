"""A small GPT that Muon and AdamW train together, in bfloat16, as in modded-nanoGPT."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import pytest

torch = pytest.importorskip("torch")
from list_recorder import VOCAB  # noqa: E402
from torch import nn  # noqa: E402
from torch.nn import functional  # noqa: E402

WIDTH = 8


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH, bias=False)
        self.mlp = nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, x: Any) -> Any:
        q, k, v = self.qkv(self.norm(x)).split(WIDTH, dim=-1)
        x = x + functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return x + self.mlp(functional.relu(x).square())


class SmallGPT(nn.Module):
    """The logits that it returns are those of the next token."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.embedding = nn.Embedding(VOCAB, WIDTH)
        self.blocks = nn.Sequential(Block(), Block())
        self.head = nn.Linear(WIDTH, VOCAB, bias=False)
        self.bfloat16()

    def get_output_embeddings(self) -> Any:
        return self.head

    def forward(self, input_ids: Any, labels: Any) -> Any:
        logits = self.head(self.blocks(self.embedding(input_ids)))
        loss = functional.cross_entropy(logits.flatten(0, 1).float(), labels.flatten())
        return {"loss": loss, "logits": logits}


def muon_and_adamw(model: Any) -> tuple[Any, Any]:
    """Muon for the hidden matrices, AdamW with two groups for embeddings and vectors."""
    hidden = [p for p in model.blocks.parameters() if p.ndim == 2]
    vectors = [p for p in model.parameters() if p.ndim < 2]
    tables = [model.embedding.weight, model.head.weight]
    groups = [{"params": tables, "lr": 0.02}, {"params": vectors, "lr": 0.01}]
    return torch.optim.Muon(hidden, lr=0.05), torch.optim.AdamW(groups)


def train(model: Any, optimizers: Any, data: Iterable[Any], first: int = 0, of: int = 100) -> None:
    """Take steps with cosine rates and clipping, the first after step `first` of `of`."""
    groups = [group for one in optimizers for group in one.param_groups]
    for group in groups:
        group.setdefault("highest", group["lr"])
    for step, batch in enumerate(data, first):
        model(**batch)["loss"].backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        for group in groups:
            group["lr"] = group["highest"] * (1 + math.cos(math.pi * step / of)) / 2
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
