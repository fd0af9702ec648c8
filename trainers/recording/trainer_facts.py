"""Facts about a Trainer, from which recorded steps are trained again when its data set is given."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import inspect
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from transformers import Trainer, TrainerState, TrainingArguments

from trajstore.trainers.recording.data_set_tokens import TOKENS, NotCounted, require_stateless

__all__ = ["class_name", "data_set_identity", "trainer_facts"]

_ARGUMENTS = (
    "average_tokens_across_devices", "bf16", "dataloader_drop_last", "fp16", "full_determinism",
    "gradient_accumulation_steps", "ignore_data_skip", "label_names", "label_smoothing_factor",
    "max_grad_norm", "neftune_noise_alpha", "remove_unused_columns", "seed", "tf32",
    "torch_compile", "torch_compile_backend", "torch_compile_mode", "train_sampling_strategy",
    "use_liger_kernel",
)  # fmt: skip
"""Arguments on which the bits of a step depend."""

_METHODS = (
    "_clip_grad_norm", "_get_num_items_in_batch", "_get_train_sampler", "_inner_training_loop",
    "_prepare_inputs", "_run_epoch", "autocast_smart_context_manager", "compute_loss",
    "compute_loss_context_manager", "get_batch_samples", "get_train_dataloader", "training_step",
)  # fmt: skip
"""Methods of a Trainer on which they depend."""

_EXAMPLES = 1024


def trainer_facts(
    args: TrainingArguments, state: TrainerState, model: Any, data_loader: Any
) -> dict[str, Any]:
    """Return the facts as JSON values. Called in a callback of the Trainer, when it starts.

    Parameters
    ----------
    args : TrainingArguments
    state : TrainerState
    model : Module
    data_loader : DataLoader
        The Trainer's.
    """
    data_set = getattr(data_loader, "dataset", None)
    sampler = getattr(data_loader, "get_sampler", lambda: None)()
    collator = getattr(data_loader, "collate_fn", None)
    kind = "activation" if hasattr(args, "activation_checkpointing") else "gradient"
    names = (*_ARGUMENTS, f"{kind}_checkpointing", f"{kind}_checkpointing_kwargs")
    arguments = {name: _json(getattr(args, name)) for name in names if hasattr(args, name)}
    facts: dict[str, Any] = {
        "arguments": arguments | {"per_device_train_batch_size": state.train_batch_size},
        "processes": args.world_size,
        "collator": class_name(getattr(collator, "data_collator", collator)),
        "order": {"sampler": class_name(sampler), "seed": getattr(sampler, "initial_seed", None)},
        "loss_type": getattr(model, "loss_type", None),
        "attention": getattr(getattr(model, "config", None), "_attn_implementation", None),
        "custom": _custom(_calling_trainer()),
        "data_set": {"class": class_name(data_set)},
    }
    with contextlib.suppress(NotCounted):  # reading it could change the training
        require_stateless(data_set)
        facts["data_set"] |= data_set_identity(data_set)
    return facts


def data_set_identity(data_set: Any) -> dict[str, Any]:
    """Return the number of examples, their columns, and a hash over at most 1,024 of them.

    Parameters
    ----------
    data_set : sequence of mapping
        The hashed examples are spread evenly. Their token ids, attention and labels count.
    """
    size = len(data_set)
    found, columns = hashlib.sha256(f"{size}".encode()), set()
    for number in np.unique(np.linspace(0, max(size - 1, 0), min(size, _EXAMPLES)).round()):
        example = data_set[int(number)]
        for name in TOKENS:
            if isinstance(example, Mapping) and example.get(name) is not None:
                columns.add(name)
                values = torch.as_tensor(example[name], device="cpu").to(torch.int64)
                found.update(f"{name} {tuple(values.shape)}".encode())
                found.update(values.numpy().astype("<i8").tobytes())
    return {"examples": size, "columns": sorted(columns), "sha256": found.hexdigest()}


def class_name(value: Any) -> str:
    """Return the full name of a function, or of the class of another object."""
    if isinstance(value, functools.partial):
        return f"functools.partial({class_name(value.func)})"
    kind = value if inspect.isfunction(value) or inspect.ismethod(value) else type(value)
    return f"{kind.__module__}.{kind.__qualname__}"


def _calling_trainer() -> Trainer | None:
    """Return the Trainer that called the callback, which no argument of a callback contains."""
    frame = inspect.currentframe()
    while frame is not None:
        if isinstance(caller := frame.f_locals.get("self"), Trainer):
            return caller
        frame = frame.f_back
    return None


def _custom(trainer: Trainer | None) -> list[str]:
    """Return the names of what replaces parts of the training step."""
    if trainer is None:
        return ["training loop"]
    replaced = [
        f"{type(trainer).__qualname__}.{name}"
        for name in _METHODS
        if getattr(getattr(trainer, name, None), "__func__", None) is not vars(Trainer).get(name)
    ]
    attributes = ("compute_loss_func", "loss_is_scaled_for_ga")
    return replaced + [name for name in attributes if getattr(trainer, name, None) is not None]


def _json(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(key): _json(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_json(item) for item in value]
    if isinstance(value, bool | int | float) or value is None:
        return value
    return str(getattr(value, "value", value))
