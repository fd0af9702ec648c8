"""Small trainings by a Trainer of Hugging Face on the CPU, which writes no files of its own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from trainings import HIDDEN, VOCAB, batches
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    Trainer,
    TrainerCallback,
    TrainingArguments,
)


def examples(count: int) -> list[dict[str, Any]]:
    return [{name: values[0] for name, values in row.items()} for row in batches(count)]


def tiny_gpt2(kind: Any = GPT2LMHeadModel, **config: Any) -> Any:
    """A model that is in training mode, with dropout as by default."""
    sizes = {"vocab_size": VOCAB, "n_positions": 8, "n_embd": HIDDEN, "n_layer": 1, "n_head": 1}
    model = kind(GPT2Config(**sizes, bos_token_id=None, eos_token_id=None, **config)).train()
    model.loss_type = "ForCausalLM"
    return model


def trainer_of(
    model: Any,
    folder: Path,
    *callbacks: TrainerCallback,
    kind: Any = Trainer,
    data: Any = None,
    loss: Any = None,
    **arguments: Any,
) -> Any:
    """A Trainer that has not started, with AdamW and 11 examples by default."""
    quiet = {
        "max_steps": 4, "per_device_train_batch_size": 3, "learning_rate": 0.01, "use_cpu": True,
        "save_strategy": "no", "report_to": "none", "disable_tqdm": True, "optim": "adamw_torch",
        "logging_strategy": "no", "dataloader_pin_memory": False,
    }  # fmt: skip
    return kind(
        model=model,
        args=TrainingArguments(str(folder / "out"), **quiet | arguments),
        train_dataset=examples(11) if data is None else data,
        compute_loss_func=loss,
        callbacks=list(callbacks),
    )


class FailAfter(TrainerCallback):  # type: ignore[misc]
    """Fails after a step, as a user interrupts a training."""

    def __init__(self, step: int) -> None:
        self.step = step

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == self.step:
            raise KeyboardInterrupt
