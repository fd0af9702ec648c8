"""Titles: names of runs, their common settings, names of tokens."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import xarray as xr

from trajstore.populations import row_vectors
from trajstore.schema import EVALUATION


def run_name(ds: xr.Dataset) -> str:
    """Name of the run's folder, else the first digits of its identity."""
    source = ds.encoding.get("source")
    if source:
        return Path(str(source).rstrip("/")).name
    runs = ds.attrs.get("runs") or [[0, ""]]
    return f"run {runs[-1][1][:8]}".strip()


def run_system(*runs: xr.Dataset) -> str:
    """Corpus, shape of W, optimizer and type, as far as all runs share them."""
    facts = [_facts(run) for run in runs]
    return ", ".join(
        fact for at, fact in enumerate(facts[0]) if fact and all(fact == one[at] for one in facts)
    )


def _facts(ds: xr.Dataset) -> list[str]:
    if EVALUATION in ds.attrs:
        return [ds.attrs[EVALUATION]["function"], "", "", ds.attrs[EVALUATION]["run"]]
    ds = row_vectors(ds)
    config = ds.attrs.get("config") or {}
    sizes = " × ".join(f"{ds.sizes[dim]:,}" for dim in ("token", "hidden") if dim in ds.sizes)
    optimizer = str((ds.attrs.get("optimizer") or {}).get("class", "")).rpartition(".")[2]
    parameter = ds.attrs.get("parameter")
    vectors = ds.attrs.get("vectors", None if parameter else "W")
    shown = " of ".join(filter(None, (vectors, parameter)))
    return [
        str((config.get("data") or {}).get("corpus") or ""),
        f"{shown} {sizes}" if sizes else "",
        optimizer,
        str(ds["W"].attrs.get("native_dtype", "")) if "W" in ds else "",
    ]


def titled_runs(runs: Sequence[xr.Dataset], labels: Sequence[str] | None = None) -> str:
    """Name and settings of a run, or the number of several runs and their common settings."""
    name = f"{len(runs)} runs" if len(runs) > 1 else (labels or [run_name(runs[0])])[0]
    return " · ".join(filter(None, (name, run_system(*runs))))


def token_names(ds: xr.Dataset) -> list[str]:
    """Text of each token, quoted where letters alone would mislead, else its id."""
    if "token_text" not in ds.coords:
        return [str(token) for token in ds["token"].values]
    return [_shown(str(text)) for text in ds["token_text"].values]


def _shown(text: str) -> str:
    plain = text.isascii() and text.isprintable() and text.strip() == text != ""
    return text if plain else ascii(text)
