"""Timing of contenders in one process: alternating rounds, medians, ratios."""

from __future__ import annotations

import json
import mmap
import os
import platform
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np


@dataclass(frozen=True, kw_only=True)
class Measured:
    """The rounds of one contender.

    Attributes
    ----------
    seconds : list of float
        Wall time of each round.
    work : float
        Amount of work of a round, such as bytes or steps.
    facts : dict
        Other results of its last round.
    """

    seconds: list[float]
    work: float
    facts: dict[str, Any]

    @property
    def rate(self) -> float:
        """Work per second in the median round."""
        return self.work / statistics.median(self.seconds)


def alternate(
    contenders: Mapping[str, Callable[[], tuple[float, dict[str, Any]]]],
    rounds: int,
    *,
    memory: int = 0,
    after: Callable[[str], None] | None = None,
) -> dict[str, Measured]:
    """Run every contender once per round, in turn.

    Parameters
    ----------
    contenders : mapping of str to callable
        Each returns its amount of work and facts to report.
    rounds : int
    memory : int
        Bytes that a contender takes, including page cache; see `back_memory`.
    after : callable, optional
        Called with the name of each contender after its time is taken.
    """
    seconds: dict[str, list[float]] = {name: [] for name in contenders}
    last: dict[str, tuple[float, dict[str, Any]]] = {}
    for _ in range(rounds):
        for name, contender in contenders.items():
            back_memory(memory)
            start = time.perf_counter()
            last[name] = contender()
            seconds[name].append(time.perf_counter() - start)
            if after is not None:
                after(name)
    return {
        name: Measured(seconds=seconds[name], work=last[name][0], facts=last[name][1])
        for name in contenders
    }


def back_memory(size: int) -> None:
    """Touch memory and release it.

    A virtual machine returns memory that is unused for seconds, and the next user waits for the
    host: touching 5 GB took 0.5 s, and 12 s after they had been returned. Without this call, chance
    decides between contenders that write to the page cache.
    """
    np.empty(size, np.uint8)[:: mmap.PAGESIZE] = 1


def resident(field: str) -> int:
    """Return the memory of this process in bytes: VmRSS is current, VmHWM is the maximum.

    ``getrusage`` is not used, because its maximum is inherited from the parent process.
    """
    with open("/proc/self/status") as file:
        line = next(line for line in file if line.startswith(field))
    return int(line.split()[1]) * 1024


def machine() -> dict[str, Any]:
    """Return facts on which the figures depend."""
    processor = platform.processor() or platform.machine()
    info = Path("/proc/cpuinfo")
    if info.exists():
        names = [line for line in info.read_text().splitlines() if line.startswith("model name")]
        processor = names[0].partition(":")[2].strip() if names else processor
    return {
        "processor": processor,
        "cores": len(os.sched_getaffinity(0)),
        "load_before": os.getloadavg()[0],
        "python": platform.python_version(),
        **{name: version(name) for name in ("numpy", "numcodecs", "zarr", "xarray", "h5py")},
    }


def cache() -> Path:
    """Return the folder for histories and scratch files, outside the repository."""
    folder = os.environ.get("TRAJSTORE_BENCHMARKS")
    path = Path(folder) if folder else Path.home() / ".cache" / "trajstore-benchmarks"
    path.mkdir(parents=True, exist_ok=True)
    return path


def table(title: str, columns: list[str], rows: list[list[str]]) -> str:
    """Return a Markdown table."""
    lines = [f"## {title}", "", "| " + " | ".join(columns) + " |"]
    lines.append("|" + " --- |" * len(columns))
    lines += ["| " + " | ".join(row) + " |" for row in rows]
    return "\n".join(lines) + "\n"


def save(name: str, text: str, results: Mapping[str, Any]) -> None:
    """Print the table, and store it and the figures as JSON in the cache."""
    print(text, flush=True)
    stem = cache() / name
    stem.with_suffix(".md").write_text(text)
    stem.with_suffix(".json").write_text(json.dumps(results, indent=1))
