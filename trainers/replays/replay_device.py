"""The device of a replay, compared with the device of the recording."""

from __future__ import annotations

import platform
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from trajstore.trainers.recording.provenance import processor


@dataclass(frozen=True, kw_only=True)
class ReplayDevice:
    """Device of a replay, compared with the device of the recording.

    Attributes
    ----------
    device : torch.device
        Device to replay on.
    exact : bool
        True if both devices are of the same kind, so that every bit has to agree. Processors are
        if torch uses the same instructions on both.
    recorded_on, replayed_on : str
    threads : int, optional
        Threads of torch; None if irrelevant or unknown.
    notes : tuple of str
        Other reasons for different values.
    """

    device: torch.device
    exact: bool
    recorded_on: str
    replayed_on: str
    threads: int | None
    notes: tuple[str, ...]


def replay_device(attributes: Mapping[str, Any]) -> ReplayDevice:
    """Return the device to replay a run on: the kind that recorded it, else the CPU.

    Parameters
    ----------
    attributes : mapping
        Attributes of the root of the run.
    """
    provenance = attributes.get("provenance")
    facts = provenance if isinstance(provenance, Mapping) else {}
    recorded = str(facts.get("device", "an unknown device"))
    kind = recorded.partition(":")[0]
    trained_on = facts.get("processor", processor())
    if kind == "cuda" and torch.cuda.is_available():
        here = torch.cuda.get_device_name()
        exact = here == facts.get("device_name")
        device = torch.device("cuda")
    elif kind == "mps" and torch.backends.mps.is_available():
        here, exact, device = "mps", True, torch.device("mps")
    else:
        here, device = f"cpu ({processor()})", torch.device("cpu")
        # Trainings of trajstore 0.3 recorded the architecture only.
        exact = kind == "cpu" and trained_on in (processor(), platform.machine())
    detail = facts.get("device_name") or (trained_on if kind == "cpu" else None)
    recorded_on = f"{recorded} ({detail})" if detail else recorded
    replayed_on = f"cuda ({here})" if device.type == "cuda" else here
    notes = []
    if not exact:
        notes.append(
            f"recorded on {recorded_on}, replayed on {replayed_on}: different values are counted "
            "but are no errors"
        )
    if facts.get("torch", torch.__version__) != torch.__version__:
        notes.append(
            f"recorded with torch {facts['torch']}, replayed with {torch.__version__}, which may "
            "round differently"
        )
    count = facts.get("threads")
    return ReplayDevice(
        device=device,
        exact=exact,
        recorded_on=recorded_on,
        replayed_on=replayed_on,
        threads=count if isinstance(count, int) and device.type == "cpu" and count > 0 else None,
        notes=tuple(notes),
    )
