"""Small trainings: of presets, and by a Trainer of Hugging Face on the CPU."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import xarray as xr
from safetensors import safe_open
from safetensors.torch import load_file
from trainings import HIDDEN, VOCAB, batches, same
from transformers import GPT2Config, GPT2LMHeadModel

from trajstore.store.storage.remote_path import checkpoint_folder
from trajstore.trainers import RunConfig, preset

Straight = Callable[[RunConfig], Path]
BLOCK = 4
TEXT = b"It was a bright cold day in April. " * 2
"""54 examples of 16 tokens: 6 batches of 9."""


def small_config(variant: Sequence[str], *assignments: str, steps: int) -> RunConfig:
    """A preset and what is changed of it, so small that a step takes milliseconds."""
    named, *changes = variant
    small = (
        "model.context=16", "model.hidden=8", "model.layers=1", "training.batch_size=9",
        "training.device=cpu", f"training.steps={steps}", f"recording.block_rows={BLOCK}",
    )  # fmt: skip
    return preset(named).with_values([*small, *changes, *assignments])


def stop_after(step: int) -> Callable[[], bool]:
    """Ask to stop when so many steps have been taken."""
    steps = iter(range(1, step + 1))
    return lambda: next(steps) == step


def checkpoints(run: Path) -> list[int]:
    """Steps of those beside a run."""
    files = checkpoint_folder(run).glob("step-*.safetensors")
    return sorted(int(file.stem.removeprefix("step-")) for file in files)


def last_checkpoint(run: Path) -> Any:
    """The fields and tensors of the newest one beside a run, read as its format is described."""
    file = max(checkpoint_folder(run).iterdir())
    with safe_open(file, "pt") as opened:
        fields = json.loads(opened.metadata()["trajstore"])
    return SimpleNamespace(**fields | {"tensors": load_file(file)})


def same_checkpoints(one: Path, other: Path) -> None:
    """The newest checkpoints of two runs hold the same state."""
    a, b = last_checkpoint(one), last_checkpoint(other)
    assert (a.step, a.rows, a.counters) == (b.step, b.rows, b.counters)
    assert same(a.tensors, b.tensors)


def same_values(
    one: Path,
    other: Path,
    *,
    first: int | None = None,
    until: int | None = None,
    token: Any = slice(None),
) -> xr.Dataset:
    """The second run, all of whose variables are, bit for bit, those of the first.

    Also of some steps alone, or of some tokens of the first one.
    """
    a, b = (
        xr.open_zarr(path, chunks=None).sel(step=slice(first, until)).load()
        for path in (one, other)
    )
    a = a.isel(token=token)
    assert until in (None, b.step.values[-1])
    assert list(a.variables) == list(b.variables)
    for name in a.variables:
        assert a[name].attrs.get("native_dtype") == b[name].attrs.get("native_dtype"), name
        one_has, other_has = a[name].values, b[name].values
        if a[name].dtype.kind in "OUT":
            assert one_has.tolist() == other_has.tolist(), name
        else:
            assert one_has.tobytes() == other_has.tobytes(), name
    return b


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
    *callbacks: Any,
    kind: Any = None,
    data: Any = None,
    loss: Any = None,
    **arguments: Any,
) -> Any:
    """A Trainer that has not started, writes no files, with AdamW and 11 examples by default."""
    from transformers import Trainer, TrainingArguments  # takes long

    quiet = {
        "max_steps": 4, "per_device_train_batch_size": 3, "learning_rate": 0.01, "use_cpu": True,
        "save_strategy": "no", "report_to": "none", "disable_tqdm": True, "optim": "adamw_torch",
        "logging_strategy": "no", "dataloader_pin_memory": False,
    }  # fmt: skip
    return (kind or Trainer)(
        model=model,
        args=TrainingArguments(str(folder / "out"), **quiet | arguments),
        train_dataset=examples(11) if data is None else data,
        compute_loss_func=loss,
        callbacks=list(callbacks),
    )
