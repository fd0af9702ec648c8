"""Where a run comes from: what the root attributes say besides its configuration."""

from __future__ import annotations

import platform
import subprocess
from collections.abc import Mapping
from typing import Any

import accelerate
import torch
import transformers
import zarr
from torch.optim import Optimizer

from trajstore.version import __version__

__all__ = ["optimizer_attributes", "provenance"]


def provenance(device: torch.device, origin: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Versions, machine and text.

    Parameters
    ----------
    device : torch.device
        That the model is trained on.
    origin : mapping, optional
        What else is known, such as the identities of the text and the tokenizer.
    """
    facts: dict[str, Any] = {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "accelerate": accelerate.__version__,
        "zarr": zarr.__version__,
        "trajstore": __version__,
        "platform": platform.platform(),
        "processor": platform.machine(),
        "device": str(device),
        "threads": torch.get_num_threads(),
    }
    if device.type == "cuda":
        facts["device_name"] = torch.cuda.get_device_name(device)
    facts |= origin or {}
    commit = _git_commit()
    if commit:
        facts["git_commit"] = commit
    return facts


def optimizer_attributes(
    optimizer: Optimizer, group: dict[str, Any], schedule: dict[str, Any]
) -> dict[str, Any]:
    """Class and hyperparameters as the optimizer holds them for the recorded parameter.

    Parameters
    ----------
    optimizer : Optimizer
    group : dict
        Parameter group of the recorded parameter.
    schedule : dict
        How its learning rate changes, and what the loop clips gradients to.
    """
    kind = type(optimizer)
    hyperparameters = {key: _plain(value) for key, value in group.items() if key != "params"}
    return {
        "class": f"{kind.__module__}.{kind.__qualname__}",
        "hyperparameters": hyperparameters,
        "schedule": schedule,
    }


def _plain(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.item() if value.ndim == 0 else value.tolist()
    if isinstance(value, tuple):
        return [_plain(item) for item in value]
    if isinstance(value, bool | int | float | str) or value is None:
        return value
    return str(value)


def _git_commit() -> str | None:
    """Commit of the working directory; None outside a repository, or where there is no git."""
    try:
        done = subprocess.run(
            ["git", "rev-parse", "HEAD"], capture_output=True, text=True, check=False, timeout=10
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None
