"""`record`: from a configuration to a recorded run."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils.data import Dataset
from transformers import Trainer, TrainingArguments
from transformers.trainer_callback import PrinterCallback

from trainers.attachment import capture
from trainers.callback import TrajectoryCallback
from trainers.config import RunConfig
from trainers.corpus import Corpus, load_corpus
from trainers.loop import build_scaler, train
from trainers.model import build_model, initialise
from trainers.optimizer import build_optimizer, build_schedule
from trainers.recorder import Recorder
from trainers.tokens import read_tokens, select_tokens
from trajstore.errors import ConfigError
from trajstore.writer import check_target

__all__ = ["ExampleDataset", "record"]


class ExampleDataset(Dataset[dict[str, torch.Tensor]]):
    """Every window of a text, with its labels.

    GPT-2's loss shifts labels by one itself, so labels that equal the inputs train on the next
    token, and labels one ahead on the token after next.

    Parameters
    ----------
    ids : tensor of int64
    context : int
        Tokens of one example.
    target_offset : {1, 2}
    """

    def __init__(self, ids: torch.Tensor, context: int, target_offset: int) -> None:
        self._ids = ids
        self._context = context
        self._shift = target_offset - 1

    def __len__(self) -> int:
        return len(self._ids) - self._context - self._shift + 1

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        end = index + self._context
        return {
            "input_ids": self._ids[index:end],
            "labels": self._ids[index + self._shift : end + self._shift],
        }


def record(
    config: RunConfig,
    path: str | os.PathLike[str],
    *,
    corpus: str | os.PathLike[str] | None = None,
    tokenizer: str | os.PathLike[str] | None = None,
    overwrite: bool = False,
    on_corpus: Callable[[Corpus], None] | None = None,
    on_step: Callable[[Recorder], None] | None = None,
) -> Path:
    """Train and record a run.

    Parameters
    ----------
    config : RunConfig
    path : path-like
        Where the run will be, by custom ``NAME.zarr``.
    corpus, tokenizer : path-like, optional
        In place of those that the configuration names, which are taken from the cache where they
        have been fetched, and else embedded.
    overwrite : bool
        Replace a run that is there.
    on_corpus, on_step : callable, optional
        Called with the `Corpus` when it is loaded, and with the `Recorder` after every step.

    Returns
    -------
    Path
        Of the run, complete. When training fails, what is whole is committed as ``interrupted``.

    Raises
    ------
    RunExists
        If something is at `path`.
    CorpusError
        If the text cannot be trained on; nothing has been made.
    ConfigError
        If the device is not there.

    Examples
    --------
    >>> from trainers import PRESETS
    >>> config = PRESETS["gatsby"]().with_values(["training.steps=200"])
    >>> record(config, "gatsby.zarr")                                # doctest: +SKIP
    """
    target = check_target(path, overwrite=overwrite)
    device = _device(config.training.device)
    text = load_corpus(config, corpus=corpus, tokenizer=tokenizer)
    if on_corpus is not None:
        on_corpus(text)
    counts = text.counts()
    recording = config.recording
    tokens: Any = recording.tokens
    if tokens not in ("all", "dead", "live"):
        tokens = read_tokens(tokens)
    # Before anything is built: an impossible choice should not cost a minute.
    select_tokens(tokens, config.model.vocab_size, counts == 0)
    torch.manual_seed(config.training.seed)
    np.random.seed(config.training.seed)
    model = build_model(config.model)
    initialise(model, config.initialisation, config.training.seed)
    model.to(device)
    optimizer = build_optimizer(model, config.optimizer)
    schedule = build_schedule(optimizer, config.schedule, config.training.steps)
    dataset = ExampleDataset(
        torch.from_numpy(text.ids), config.model.context, config.data.target_offset
    )
    options: dict[str, Any] = {
        "record": recording.record,
        "every": recording.every,
        "tokens": tokens,
        "logits_mode": recording.logits_mode,
        "is_dead": counts == 0,
        "token_count": counts,
        "token_text": text.token_text,
        "config": config.model_dump(mode="json"),
        "origin": text.provenance(),
        "memory": recording.memory,
        "block_rows": recording.block_rows,
        "overwrite": overwrite,
        "on_step": on_step,
    }
    if config.training.loop == "plain":
        scaler = build_scaler(config, device)
        clipped_to = config.training.max_grad_norm
        with capture(model, optimizer, target, scaler=scaler, max_grad_norm=clipped_to, **options):
            train(model, optimizer, schedule, dataset, config, device, scaler)
        return target
    callback = TrajectoryCallback(target, **options)
    with tempfile.TemporaryDirectory(prefix="trajstore-") as scratch:
        trainer = Trainer(
            model=model,
            args=_training_arguments(config, device, scratch),
            train_dataset=dataset,
            optimizers=(optimizer, schedule),
            callbacks=[callback],
        )
        trainer.remove_callback(PrinterCallback)
        try:
            trainer.train()
        finally:
            callback.close()
    return target


def _device(wanted: str) -> torch.device:
    there = {
        "cpu": True,
        "cuda": torch.cuda.is_available(),
        "mps": torch.backends.mps.is_available(),
    }
    if wanted == "auto":
        return torch.device(next((name for name in ("cuda", "mps") if there[name]), "cpu"))
    if not there[wanted]:
        available = ", ".join(name for name, yes in there.items() if yes)
        raise ConfigError(
            f"training.device = {wanted!r}: this machine has none that torch can use; "
            f"available: {available}"
        )
    return torch.device(wanted)


def _training_arguments(config: RunConfig, device: torch.device, scratch: str) -> TrainingArguments:
    training = config.training
    if training.autocast == "float16" and device.type != "cuda":
        raise ConfigError(
            f"training.autocast = 'float16': the Trainer scales gradients on CUDA only, and this "
            f"run is on {device.type}; set training.loop=plain or training.autocast=bfloat16"
        )
    return TrainingArguments(
        output_dir=scratch,
        max_steps=training.steps,
        per_device_train_batch_size=training.batch_size,
        gradient_accumulation_steps=training.accumulation,
        max_grad_norm=training.max_grad_norm,
        # The optimizer and its schedule are built by us; this is what the Trainer tells of them.
        learning_rate=config.optimizer.lr,
        lr_scheduler_type=config.schedule.name,
        warmup_steps=config.schedule.warmup_steps,
        bf16=training.autocast == "bfloat16",
        fp16=training.autocast == "float16",
        use_cpu=device.type == "cpu",
        seed=training.seed,
        dataloader_num_workers=0,
        dataloader_pin_memory=False,
        save_strategy="no",
        logging_strategy="no",
        report_to="none",
        disable_tqdm=True,
        log_level="error",
    )
