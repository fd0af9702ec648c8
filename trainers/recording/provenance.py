"""Provenance of a run: root attributes in addition to its configuration."""

from __future__ import annotations

import math
import platform
import subprocess
from collections.abc import Mapping
from typing import Any

import accelerate
import torch
import transformers
import zarr
from torch.optim import Optimizer

from trajstore.strict_json import utc_now
from trajstore.trainers.recording.joined_optimizer import JoinedOptimizer
from trajstore.version import __version__

_NUMERIC = ("torch", "transformers", "accelerate", "processor", "device", "device_name", "threads")
"""Facts on which the bits of a training run depend."""


def provenance(device: torch.device, origin: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Return versions, machine and text.

    Parameters
    ----------
    device : torch.device
        Device of the training.
    origin : mapping, optional
        Further facts, such as the identities of the text and the tokenizer.
    """
    facts: dict[str, Any] = {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "accelerate": accelerate.__version__,
        "zarr": zarr.__version__,
        "trajstore": __version__,
        "platform": platform.platform(),
        "processor": processor(),
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


def processor() -> str:
    """Return the architecture, and the instructions that torch uses, on which rounding depends."""
    return f"{platform.machine()}, {torch.backends.cpu.get_cpu_capability()}"


def changed_provenance(before: Mapping[str, Any], device: torch.device) -> dict[str, Any]:
    """Return the changed facts on which the bits of a training run depend."""
    now = provenance(device)
    return {name: now.get(name) for name in _NUMERIC if before.get(name) != now.get(name)}


def resumed_provenance(
    before: Mapping[str, Any], device: torch.device, step: int
) -> dict[str, Any]:
    """Return the provenance of a resumed run, with an entry for the resumption.

    Parameters
    ----------
    before : mapping
        Provenance of the run so far.
    device : torch.device
    step : int
        Step after which the run resumes.
    """
    entry = {"step": step, "time": utc_now(), **changed_provenance(before, device)}
    return {**before, "resumed": [*before.get("resumed", []), entry]}


def optimizer_attributes(
    optimizer: Optimizer, group: dict[str, Any], schedule: dict[str, Any]
) -> dict[str, Any]:
    """Return the class and the hyperparameters of the optimizer for the recorded parameter.

    Parameters
    ----------
    optimizer : Optimizer
    group : dict
        Parameter group of the recorded parameter.
    schedule : dict
        Change of its learning rate, and the norm to which the loop clips gradients.
    """
    return {**_rule_attributes(optimizer, group), "schedule": schedule}


def group_attributes(optimizer: JoinedOptimizer) -> list[dict[str, Any]]:
    """Return class and hyperparameters of each parameter group; of several optimizers the name."""
    return [
        _rule_attributes(member, group)
        | ({"name": optimizer.named([member])} if len(optimizer.members) > 1 else {})
        for member in optimizer.members
        for group in member.param_groups
    ]


def _rule_attributes(optimizer: Optimizer, group: dict[str, Any]) -> dict[str, Any]:
    kind = type(optimizer)
    hyperparameters = {
        key: _plain(value) for key, value in group.items() if key not in ("params", "param_names")
    }
    return {
        "class": f"{kind.__module__}.{kind.__qualname__}",
        "hyperparameters": hyperparameters,
    }


def _plain(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return _plain(value.tolist())
    if isinstance(value, tuple | list):
        return [_plain(item) for item in value]
    is_json = not isinstance(value, float) or math.isfinite(value)
    if is_json and (isinstance(value, bool | int | float | str) or value is None):
        return value
    return str(value)


def _git_commit() -> str | None:
    """Return the commit of the working directory; None without a repository or git."""
    try:
        done = subprocess.run(
            ["git", "rev-parse", "HEAD"], capture_output=True, text=True, check=False, timeout=10
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None
