"""A training run from its configuration: model, optimizer, schedule, examples, and the loop."""

from __future__ import annotations

import contextlib
import random
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_model
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import Dataset
from transformers import (
    GPT2LMHeadModel,
    PrinterCallback,
    Trainer,
    TrainerCallback,
    TrainerControl,
    TrainerState,
    TrainingArguments,
)
from transformers.trainer import TRAINER_STATE_NAME
from transformers.utils import SAFE_WEIGHTS_NAME

from trajstore.errors import ConfigError
from trajstore.trainers.config import RunConfig
from trajstore.trainers.products import choose_products, float32_products
from trajstore.trainers.recording.examples import EXAMPLE_INDEX
from trajstore.trainers.runs.batches import Batches
from trajstore.trainers.runs.model import build_model, initialize
from trajstore.trainers.runs.optimizer import build_optimizer, build_schedule
from trajstore.trainers.texts.corpus import Corpus


class ExampleDataset(Dataset[dict[str, torch.Tensor]]):
    """Every window of a text, with its labels.

    GPT-2's loss shifts labels by one. So labels equal to the inputs train on the next token, and
    labels one ahead on the token after next.

    Parameters
    ----------
    ids : tensor of int64
    context : int
        Tokens of one example.
    target_offset : {1, 2}
    with_index : bool
        Add the index of each example, which the recorder removes from the model's inputs.
    """

    def __init__(
        self, ids: torch.Tensor, context: int, target_offset: int, *, with_index: bool = False
    ) -> None:
        self._ids = ids
        self._context = context
        self._shift = target_offset - 1
        self._with_index = with_index

    def __len__(self) -> int:
        return len(self._ids) - self._context - self._shift + 1

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        end = index + self._context
        example = {
            "input_ids": self._ids[index:end],
            "labels": self._ids[index + self._shift : end + self._shift],
        }
        return example | (
            {EXAMPLE_INDEX: torch.tensor(index, device="cpu")} if self._with_index else {}
        )


@dataclass(frozen=True, kw_only=True, eq=False)
class Training:
    """A seeded training with all its parts.

    Attributes
    ----------
    config : RunConfig
    device : torch.device
    model : GPT2LMHeadModel
        Model on the device.
    optimizer : Optimizer
    schedule : LambdaLR
    scaler : GradScaler or None
        Scaler of the plain loop; the Trainer has its own.
    dataset : ExampleDataset
    batches : Batches or None
        Batches of the plain loop; the Trainer has its own.
    """

    config: RunConfig
    device: torch.device
    model: GPT2LMHeadModel
    optimizer: Optimizer
    schedule: LambdaLR
    scaler: torch.amp.GradScaler | None
    dataset: ExampleDataset
    batches: Batches | None

    def run(
        self,
        callbacks: Sequence[TrainerCallback] = (),
        *,
        first_step: int = 0,
        on_begin: Callable[[Any], None] = lambda scaler: None,
        on_step_end: Callable[[Any], bool] = lambda scaler: False,
    ) -> None:
        """Train until the configuration's number of steps is reached.

        Parameters
        ----------
        callbacks : sequence of TrainerCallback
            For the Trainer; the plain loop ignores them.
        first_step : int
            Steps taken before. The Trainer then starts at this position of the data.
        on_begin : callable
            For the Trainer: called with its gradient scaler, or None, before the first step, after
            accelerate has moved the model and before the other callbacks.
        on_step_end : callable
            Called with the gradient scaler, or None, after each step, when everything is ready for
            the next one; training stops if it returns True.
        """
        with contextlib.ExitStack() as stack:
            stack.enter_context(float32_products(self.config.training.products == "float32"))
            if self.batches is not None:
                self._run_plain(self.batches, first_step, on_step_end)
                return
            scratch = stack.enter_context(tempfile.TemporaryDirectory(prefix="trajstore-"))
            trainer = Trainer(
                model=self.model,
                args=_training_arguments(self.config, self.device, scratch),
                train_dataset=self.dataset,
                optimizers=(self.optimizer, self.schedule),
                callbacks=[_Steps(on_begin, on_step_end), *callbacks],
            )
            _train_after(trainer, first_step, scratch)

    def _run_plain(
        self, batches: Batches, first_step: int, on_step_end: Callable[[Any], bool]
    ) -> None:
        """Train in a plain PyTorch loop. A step with a gradient overflow is skipped but counts."""
        training, model, scaler = self.config.training, self.model, self.scaler
        optimizer, device = self.optimizer, self.device
        autocast = torch.autocast(
            device.type,
            getattr(torch, training.autocast, torch.bfloat16),
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
                self.schedule.step()
            else:
                scale = scaler.get_scale()
                scaler.step(optimizer)
                scaler.update()
                if scaler.get_scale() >= scale:  # it is smaller after a skipped step
                    self.schedule.step()
            if on_step_end(scaler):
                return


class _Steps(TrainerCallback):
    """Passes the begin and the steps of a Trainer's training on; precedes all other callbacks."""

    def __init__(self, on_begin: Callable[[Any], None], on_step_end: Callable[[Any], bool]) -> None:
        self._on_begin = on_begin
        self._on_step_end = on_step_end

    def on_train_begin(self, *_: Any, optimizer: Any, **kwargs: Any) -> None:
        self._on_begin(getattr(optimizer, "scaler", None))

    def on_step_end(
        self, args: Any, state: Any, control: TrainerControl, *, optimizer: Any, **kwargs: Any
    ) -> None:
        if self._on_step_end(getattr(optimizer, "scaler", None)):
            control.should_training_stop = True


def build_training(config: RunConfig, text: Corpus) -> Training:
    """Seed, and build the model, its optimizer and its examples.

    Raises
    ------
    ConfigError
        If the device is missing, or cannot run the configuration.
    """
    device = find_device(config.training.device)
    plain = config.training.loop == "plain"
    if config.training.autocast == "float16" and not plain and device.type != "cuda":
        raise ConfigError(
            f"training.autocast = 'float16': the Trainer scales gradients on CUDA only, but this "
            f"run is on {device.type}; set training.loop=plain or training.autocast=bfloat16"
        )
    # The Trainer also seeds Python's generator; checkpoints always store its state.
    random.seed(config.training.seed)
    torch.manual_seed(config.training.seed)
    np.random.seed(config.training.seed)
    model = build_model(config.model)
    initialize(model, config.initialization, config.training.seed)
    model.to(device)
    optimizer = build_optimizer(model, config)
    ids = torch.from_numpy(text.ids)
    dataset = ExampleDataset(
        ids, config.model.context, config.data.target_offset, with_index=config.records_batch
    )
    batches = scaler = None
    if plain:
        if config.training.autocast == "float16":  # its gradients may be rounded to 0
            scaler = torch.amp.GradScaler(device.type)
        batches = Batches(
            dataset,
            config.training.batch_size,
            seed=config.training.seed,
            skipped_shuffles=config.data.skipped_shuffles,
        )
    return Training(
        config=config,
        device=device,
        model=model,
        optimizer=optimizer,
        schedule=build_schedule(optimizer, config.schedule, config.decay_steps),
        scaler=scaler,
        dataset=dataset,
        batches=batches,
    )


def with_products(config: RunConfig) -> tuple[RunConfig, str | None]:
    """Return a configuration that says how its products are computed, and why if it was open."""
    training = config.training
    if training.products != "auto":
        return config, None
    names = {config.model.dtype, training.autocast} - {"none"}
    kinds = {getattr(torch, name) for name in names}
    chosen, why = choose_products(kinds, find_device(training.device))
    note = f"Products of matrices: {chosen}, because {why}"
    return config.with_values([f"training.products={chosen}"]), note


def find_device(wanted: str) -> torch.device:
    """Return a device by name; ``auto`` selects the first available of cuda, mps and cpu.

    Raises
    ------
    ConfigError
        If the device is not available.
    """
    usable = {
        "cpu": True,
        "cuda": torch.cuda.is_available(),
        "mps": torch.backends.mps.is_available(),
    }
    if wanted == "auto":
        return torch.device(next((name for name in ("cuda", "mps") if usable[name]), "cpu"))
    if not usable[wanted]:
        available = ", ".join(name for name, yes in usable.items() if yes)
        raise ConfigError(
            f"training.device = {wanted!r}: torch finds no such device on this machine; available: "
            f"{available}"
        )
    return torch.device(wanted)


def _train_after(trainer: Trainer, first_step: int, scratch: str) -> None:
    """Train with a Trainer from a position of its data. Its callbacks restore the state.

    Parameters
    ----------
    trainer : Trainer
    first_step : int
        Steps taken before.
    scratch : str
        Existing folder for temporary files.
    """
    trainer.remove_callback(PrinterCallback)
    if not first_step:
        trainer.train()
        return
    # The Trainer needs a checkpoint: the step, which gives the position in the data, and weights.
    taken = Path(scratch) / f"checkpoint-{first_step}"
    taken.mkdir()
    save_model(trainer.model, str(taken / SAFE_WEIGHTS_NAME))
    size = trainer.args.per_device_train_batch_size
    state = TrainerState(global_step=first_step, train_batch_size=size)
    state.save_to_json(str(taken / TRAINER_STATE_NAME))
    trainer.train(resume_from_checkpoint=str(taken))


def _training_arguments(config: RunConfig, device: torch.device, scratch: str) -> TrainingArguments:
    training = config.training
    return TrainingArguments(
        output_dir=scratch,
        max_steps=training.steps,
        per_device_train_batch_size=training.batch_size,
        gradient_accumulation_steps=training.accumulation,
        max_grad_norm=training.max_grad_norm,
        # The optimizer and its schedule are given; these values are only for the Trainer's report.
        learning_rate=config.optimizer.lr,
        lr_scheduler_type=config.schedule.name,
        warmup_steps=config.schedule.warmup_steps,
        bf16=training.autocast == "bfloat16",
        fp16=training.autocast == "float16",
        use_cpu=device.type == "cpu",
        seed=training.seed,
        remove_unused_columns=not config.records_batch,  # the recorder removes the indices
        # The Trainer only trains.
        dataloader_num_workers=0,
        dataloader_pin_memory=False,
        save_strategy="no",
        logging_strategy="no",
        report_to="none",
        disable_tqdm=True,
        log_level="error",
    )
