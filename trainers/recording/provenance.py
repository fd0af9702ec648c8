"""Provenance of a run: root attributes in addition to its configuration."""

from __future__ import annotations

import contextlib
import math
import platform
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import accelerate
import torch
import transformers
import zarr
from torch.optim import Optimizer

from trajstore.strict_json import utc_now
from trajstore.trainers.recording.flat_vectors import type_name
from trajstore.trainers.recording.joined_optimizer import JoinedOptimizer
from trajstore.version import __version__

_NUMERIC = (
    "torch", "transformers", "accelerate", "processor", "processor_name", "cpu_capability",
    "device", "device_name", "threads",
)  # fmt: skip
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
        "processor": platform.machine(),
        "processor_name": processor_name(),
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
        "device": str(device),
        "threads": torch.get_num_threads(),
    }
    if device.type == "cuda":
        facts["device_name"] = torch.cuda.get_device_name(device)
    facts |= origin or {}
    if commit := _git_commit():
        facts["git_commit"] = commit
    return facts


def processor_name() -> str:
    """Return the name of the processor; empty if the system does not tell it."""
    with contextlib.suppress(OSError):  # not Linux
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor()


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


def class_path(kind: type) -> str:
    """Return the full name of a class, as the attribute ``optimizer`` of a run has it."""
    return f"{kind.__module__}.{kind.__qualname__}"


def _rule_attributes(optimizer: Optimizer, group: dict[str, Any]) -> dict[str, Any]:
    hyperparameters = {
        key: _plain(value) for key, value in group.items() if key not in ("params", "param_names")
    }
    tensors = {
        key: type_name(first.dtype)
        for key, value in group.items()
        for first in (value[:1] if isinstance(value, tuple) else [value])
        if isinstance(first, torch.Tensor)
    }
    found = {"class": class_path(type(optimizer)), "hyperparameters": hyperparameters}
    return found | ({"tensors": tensors} if tensors else {})


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
    command = ["git", "rev-parse", "HEAD"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=10)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()
