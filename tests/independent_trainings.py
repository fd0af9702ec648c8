"""Training programs of plain torch and transformers, which import nothing of trajstore.

``python independent_trainings.py FOLDER TOTAL STEP...`` trains TOTAL steps of each case on the
token ids ``FOLDER/ids.npy``, and saves the state dicts of model and optimizer after each STEP as
``FOLDER/CASE-STEP.pt``. The presets have small batches.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    Trainer,
    TrainerCallback,
    TrainingArguments,
    set_seed,
)

CONTEXT = 128
BATCH = 2


class Windows(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
    """Every window of a text, with labels one token later. GPT-2 shifts them by one more."""

    def __init__(self, ids: Any) -> None:
        self.ids = torch.from_numpy(ids)

    def __len__(self) -> int:
        return len(self.ids) - CONTEXT

    def __getitem__(self, first: int) -> dict[str, torch.Tensor]:
        ids = self.ids[first : first + CONTEXT + 1]
        return {"input_ids": ids[:-1], "labels": ids[1:]}


class Every(TrainerCallback):
    """Calls a function after each step of the optimizer, before the rate changes."""

    def __init__(self, function: Callable[[int, Any, Any], None]) -> None:
        self.function = function

    def on_optimizer_step(
        self, args: Any, state: Any, control: Any, *, model: Any, optimizer: Any, **rest: Any
    ) -> None:
        self.function(state.global_step + 1, model, optimizer)


def gpt2() -> Any:
    """GPT-2 with two layers."""
    config = GPT2Config(
        vocab_size=128, n_positions=CONTEXT, n_embd=64, n_layer=2, n_head=2, use_cache=False,
        resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, bos_token_id=None, eos_token_id=None,
    )  # fmt: skip
    model = GPT2LMHeadModel(config)
    model.loss_type = "ForCausalLM"
    return model


def groups(model: Any, decay: float) -> list[dict[str, Any]]:
    """Two groups: biases and layer norms have no decay."""
    named = list(model.named_parameters())
    plain = {name for name, _ in named if "ln_" in name or "bias" in name}
    return [
        {"params": [p for name, p in named if name not in plain], "weight_decay": decay},
        {"params": [p for name, p in named if name in plain], "weight_decay": 0.0},
    ]


def gatsby(ids: Any, total: int, then: Callable[..., None]) -> None:
    """The preset gatsby: AdamW; all tokens start at one point."""
    set_seed(42)
    model = gpt2().to(torch.bfloat16)
    point = torch.randn(64)
    noise = torch.randn(128, 64) * 1e-5
    with torch.no_grad():
        model.transformer.wte.weight.copy_(point / point.norm() + noise)
    optimizer = torch.optim.AdamW(groups(model, 0.01), lr=1e-3, betas=(0.9, 0.999), eps=1e-8)
    schedule = LambdaLR(optimizer, lambda step: max(0.0, float(total - step) / max(1, total)))
    chosen = TrainingArguments(
        "unused", max_steps=total, use_cpu=True, save_strategy="no", logging_strategy="no",
        report_to="none", disable_tqdm=True, dataloader_pin_memory=False, bf16=True, seed=42,
        per_device_train_batch_size=BATCH,
    )  # fmt: skip
    trainer = Trainer(
        model, chosen, train_dataset=Windows(ids), optimizers=(optimizer, schedule),
        callbacks=[Every(then)],
    )  # fmt: skip
    trainer.train()


def gatsby_adam(ids: Any, total: int, then: Callable[..., None]) -> None:
    """The preset gatsby-adam: Adam in a plain loop, after one batch that is not used."""
    set_seed(42)
    model = gpt2().to(torch.bfloat16).train()
    optimizer = torch.optim.Adam(groups(model, 0.0), lr=1e-3, betas=(0.9, 0.999), eps=1e-8)
    LambdaLR(optimizer, lambda step: 1.0)  # which adds the initial rate to the groups
    order = torch.Generator().manual_seed(42)
    loader = DataLoader(Windows(ids), batch_size=BATCH, shuffle=True, generator=order)
    next(iter(loader))
    for step, batch in zip(range(1, total + 1), loader, strict=False):
        optimizer.zero_grad()
        model(**batch).loss.backward()
        optimizer.step()
        then(step, model, optimizer)


CASES: dict[str, Callable[..., None]] = {"gatsby": gatsby, "gatsby-adam": gatsby_adam}


def main(folder: str, total: str, *steps: str) -> None:
    """Train each case, and save the states after some steps."""
    for case, train in CASES.items():

        def save(step: int, model: Any, optimizer: Any, case: str = case) -> None:
            if str(step) in steps:
                states = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
                torch.save(states, f"{folder}/{case}-{step}.pt")

        train(np.load(f"{folder}/ids.npy"), int(total), save)
    assert not any(name.partition(".")[0] == "trajstore" for name in sys.modules)


if __name__ == "__main__":
    main(*sys.argv[1:])
