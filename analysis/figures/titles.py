"""What a figure is called: names of runs, and what was trained."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import xarray as xr

__all__ = ["run_name", "run_system", "titled_runs"]


def run_name(ds: xr.Dataset) -> str:
    """Name of the folder it was opened from, else the beginning of its identity."""
    source = ds.encoding.get("source")
    if source:
        return Path(str(source).rstrip("/")).name
    runs = ds.attrs.get("runs") or [[0, ""]]
    return f"run {runs[-1][1][:8]}".strip()


def run_system(*runs: xr.Dataset) -> str:
    """What was trained: text, tokens × hidden, optimizer and type: what all runs share."""
    facts = [_facts(run) for run in runs]
    return ", ".join(
        fact for at, fact in enumerate(facts[0]) if fact and all(fact == one[at] for one in facts)
    )


def _facts(ds: xr.Dataset) -> list[str]:
    config = ds.attrs.get("config") or {}
    sizes = " × ".join(f"{ds.sizes[dim]:,}" for dim in ("token", "hidden") if dim in ds.sizes)
    optimizer = str((ds.attrs.get("optimizer") or {}).get("class", "")).rpartition(".")[2]
    return [
        str((config.get("data") or {}).get("corpus") or ""),
        f"{sizes} W" if sizes else "",
        optimizer,
        str(ds["W"].attrs.get("native_dtype", "")) if "W" in ds else "",
    ]


def titled_runs(runs: Sequence[xr.Dataset], labels: Sequence[str] | None = None) -> str:
    """Name and system of a run; of several, how many there are, and what they have in common."""
    name = f"{len(runs)} runs" if len(runs) > 1 else (labels or [run_name(runs[0])])[0]
    return " · ".join(filter(None, (name, run_system(*runs))))
