"""The device of a replay, compared with the device of the recording."""

from __future__ import annotations

import platform
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from trajstore.store.metadata.metadata_form import recorded_facts, resumed_after
from trajstore.trainers.recording.notes import processor_name

_CAPABILITY = "cpu_capability"


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


def replay_device(
    attributes: Mapping[str, Any], step: int = 0, *, products: bool = False
) -> ReplayDevice:
    """Return the device to replay a run on: the kind that recorded it, else the CPU.

    Parameters
    ----------
    attributes : mapping
        Attributes of the root of the run.
    step : int
        Step before the replayed ones; a resumed run may have been recorded on several devices.
    products : bool
        True if products of matrices are computed, too. Their bits depend on the very processor;
        those of other operations only on its vector instructions.

    Raises
    ------
    FormatError
        If ``provenance.resumed`` is not a list of objects with a step.
    """
    facts = recorded_facts(attributes, step)
    recorded = str(facts.get("device", "an unknown device"))
    kind = recorded.partition(":")[0]
    if kind == "cuda" and torch.cuda.is_available():
        here = torch.cuda.get_device_name()
        exact = here == facts.get("device_name")
        device = torch.device("cuda")
    elif kind == "mps" and torch.backends.mps.is_available():
        here, exact, device = "mps", True, torch.device("mps")
    else:
        now = {"processor": platform.machine()}
        now[_CAPABILITY] = torch.backends.cpu.get_cpu_capability()
        if products:
            now["processor_name"] = processor_name()
        held = {name: facts.get(name, value) for name, value in now.items()}
        here, device = f"cpu ({_listed(now)})", torch.device("cpu")
        exact = kind == "cpu" and held == now
        if kind == "cpu":
            recorded = f"cpu ({_listed(held)})"
    detail = facts.get("device_name")
    recorded_on = f"{recorded} ({detail})" if detail else recorded
    replayed_on = f"cuda ({here})" if device.type == "cuda" else here
    version = facts.get("torch", torch.__version__)
    notes = []
    if not exact:
        notes.append(
            f"recorded on {recorded_on}, replayed on {replayed_on}: different values are counted "
            "but are no errors"
        )
        if device.type == kind == "cpu" and held | {_CAPABILITY: now[_CAPABILITY]} == now:
            notes.append(
                f"to compare every bit on a processor that has {held[_CAPABILITY]}, too, set "
                f"ATEN_CPU_CAPABILITY={str(held[_CAPABILITY]).lower()}"
            )
    if version != torch.__version__:
        notes.append(
            f"recorded with torch {version}, replayed with {torch.__version__}, which may round "
            "differently: different values are counted but are no errors"
        )
    count = facts.get("threads")
    return ReplayDevice(
        device=device,
        exact=exact and version == torch.__version__,
        recorded_on=recorded_on,
        replayed_on=replayed_on,
        threads=count if isinstance(count, int) and device.type == "cpu" and count > 0 else None,
        notes=tuple(notes),
    )


def replay_devices(
    attributes: Mapping[str, Any], steps: npt.NDArray[Any], *, products: bool = False
) -> list[ReplayDevice]:
    """Return the device to replay each row of a run on, (step,).

    Parameters
    ----------
    attributes : mapping
        Attributes of the root of the run.
    steps : ndarray of int, (step,)
        Steps of its rows.
    products : bool
        See `replay_device`.

    Raises
    ------
    FormatError
        See `replay_device`.
    """
    begins = [0, *resumed_after(attributes)]
    devices = [replay_device(attributes, step, products=products) for step in begins]
    return [devices[max(at - 1, 0)] for at in np.searchsorted(begins, steps).tolist()]


def _listed(facts: Mapping[str, Any]) -> str:
    return ", ".join(str(value) for value in facts.values() if value)
