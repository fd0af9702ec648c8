"""The state of a training run: everything that the next optimizer step depends on.

It is copied between two steps to tensors on the CPU and JSON values, and restored in place: the
parameters of model and optimizer remain the same objects.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch

from trajstore.errors import FormatError
from trajstore.trainers.config import RunConfig
from trajstore.trainers.runs.checkpoint import Checkpoint
from trajstore.trainers.runs.training_setup import Training

__all__ = ["model_tensors", "optimizer_values", "restore_random", "restore_state", "take_state"]

Tensors = dict[str, torch.Tensor]


def take_state(training: Training, scaler: Any) -> tuple[dict[str, Any], Tensors]:
    """Return the state of a training run, including random states.

    Parameters
    ----------
    training : Training
    scaler : GradScaler or None
        Scaler of the loop.

    Returns
    -------
    state : dict
        JSON values.
    tensors : dict of str to tensor
        Copies on the CPU; tied weights once.
    """
    optimizer = training.optimizer.state_dict()
    state: dict[str, Any] = {
        "optimizer": {"param_groups": optimizer["param_groups"], "values": {}},
        "schedule": training.schedule.state_dict(),
        "scaler": None if scaler is None else scaler.state_dict(),
        "random": {"python": random.getstate(), "numpy": _numpy_state()},
        "data": None,
    }
    tensors = {name: _copy(tensor) for name, tensor in model_tensors(training.model)}
    for index, values in optimizer["state"].items():
        for key, value in values.items():
            if isinstance(value, torch.Tensor):
                tensors[f"optimizer.{index}.{key}"] = _copy(value)
            else:
                state["optimizer"]["values"].setdefault(str(index), {})[key] = value
    tensors["random.torch"] = torch.get_rng_state()
    if training.device.type == "cuda":
        tensors["random.cuda"] = torch.cuda.get_rng_state(training.device)
    elif training.device.type == "mps":
        tensors["random.mps"] = torch.mps.get_rng_state()
    if training.batches is not None:
        generator, consumed = training.batches.position
        state["data"] = {"consumed": consumed}
        tensors["data.generator"] = generator.clone()
    return state, tensors


def restore_state(training: Training, taken: Checkpoint, scaler: Any) -> None:
    """Restore a state, except the random states.

    If the configuration has another decay of the learning rate than the checkpoint, the next step
    uses the rate of the configuration.

    Parameters
    ----------
    training : Training
        Built from the same configuration.
    taken : Checkpoint
    scaler : GradScaler or None
        Scaler of the loop.

    Raises
    ------
    FormatError
        If the state belongs to another model or optimizer.
    """
    state, tensors = taken.state, taken.tensors
    _restore_model(training.model, tensors)
    groups = [
        {key: tuple(item) if isinstance(item, list) and key != "params" else item
         for key, item in group.items()}
        for group in state["optimizer"]["param_groups"]
    ]  # fmt: skip
    values = optimizer_values(taken)
    training.optimizer.load_state_dict({"state": values, "param_groups": groups})
    schedule = training.schedule
    schedule.load_state_dict(dict(state["schedule"]))
    if RunConfig.of_run(taken.config).decay_steps != training.config.decay_steps:
        groups = training.optimizer.param_groups
        for group, base, factor in zip(groups, schedule.base_lrs, schedule.lr_lambdas, strict=True):
            group["lr"] = base * factor(schedule.last_epoch)
    if scaler is not None and state["scaler"]:
        scaler.load_state_dict(state["scaler"])
    if training.batches is not None:
        training.batches.restore(tensors["data.generator"], state["data"]["consumed"])


def optimizer_values(taken: Checkpoint) -> dict[int, dict[str, Any]]:
    """Return the state of each parameter by its number, as in an optimizer's state dict."""
    values: dict[int, dict[str, Any]] = {
        int(index): dict(entries) for index, entries in taken.state["optimizer"]["values"].items()
    }
    for name, tensor in taken.tensors.items():
        if name.startswith("optimizer."):
            _, index, key = name.split(".", 2)
            values.setdefault(int(index), {})[key] = tensor
    return values


def restore_random(training: Training, taken: Checkpoint) -> None:
    """Restore the random states of torch, its device, NumPy and Python.

    Parameters
    ----------
    training : Training
    taken : Checkpoint
    """
    state, tensors = taken.state, taken.tensors
    version, internal, gauss = state["random"]["python"]
    random.setstate((version, tuple(internal), gauss))
    name, keys, *rest = state["random"]["numpy"]
    np.random.set_state((name, np.array(keys, np.uint32), *rest))
    torch.set_rng_state(tensors["random.torch"])
    if training.device.type == "cuda":
        torch.cuda.set_rng_state(tensors["random.cuda"], training.device)
    elif training.device.type == "mps":
        torch.mps.set_rng_state(tensors["random.mps"])


def _copy(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().to("cpu", copy=True).contiguous()


def model_tensors(model: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield parameters and buffers with their names in a checkpoint."""
    for name, tensor in model.named_parameters():
        yield f"model.{name}", tensor
    for name, buffer in model.named_buffers():
        yield f"buffer.{name}", buffer


@torch.no_grad()
def _restore_model(model: torch.nn.Module, tensors: Tensors) -> None:
    current = dict(model_tensors(model))
    saved = {name for name in tensors if name.startswith(("model.", "buffer."))}
    for name in sorted(saved ^ current.keys()):
        raise FormatError(
            f"the checkpoint belongs to another model: {name} is only in "
            f"{'the checkpoint' if name in saved else 'the model'}; resume with the versions of "
            "torch and transformers that recorded the run"
        )
    for name, tensor in current.items():
        if tensor.shape != tensors[name].shape or tensor.dtype != tensors[name].dtype:
            raise FormatError(
                f"the checkpoint belongs to another model: {name} is {tensors[name].dtype} of "
                f"shape {tuple(tensors[name].shape)} there, expected {tensor.dtype} of shape "
                f"{tuple(tensor.shape)}"
            )
        tensor.copy_(tensors[name])


def _numpy_state() -> list[Any]:
    state: Any = np.random.get_state(legacy=True)
    name, keys, position, has_gauss, gauss = state
    return [name, keys.tolist(), int(position), int(has_gauss), float(gauss)]
