"""A table of several runs: their facts, and the settings in which they differ."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from trajstore.arguments import format_bytes
from trajstore.store.reading.open_run import open_run
from trajstore.store.reading.run_info import run_status
from trajstore.store.reading.run_settings import (
    SEED,
    differing_settings,
    setting_text,
    settings,
    short_names,
)
from trajstore.store.storage.remote_path import RunPath

_MOST = 4  # columns of settings


def final_loss(run: RunPath) -> float | None:
    """Loss of the last row; None if there is none, or if it is not finite.

    Raises
    ------
    RunNotFound, FormatError
        If there is no run at the path.
    """
    ds = open_run(run, chunks=None)
    if "loss" not in ds or not ds.sizes["step"]:
        return None
    loss = float(ds["loss"][-1])
    return loss if math.isfinite(loss) else None


def run_table(found: Mapping[str, Mapping[str, Any]]) -> tuple[list[str], list[list[str]]]:
    """Columns and rows of a table of runs.

    Parameters
    ----------
    found : mapping
        For the name of each run, `trajstore.store.reading.run_info.information` and
        ``final_loss``.

    Returns
    -------
    columns : list of str
        Run, status, rows, last step, seed, up to four settings that differ, loss, size on disk.
    rows : list of list of str
    """
    runs = list(found.values())
    differing = differing_settings(runs)
    shown = [name for name in differing if name != SEED][:_MOST]
    values = {name: [setting_text(value) for value in differing[name]] for name in shown}
    seeds = [settings(run).get(SEED) for run in runs]
    titles = list(short_names(runs, shown).values())
    rows = [
        [
            name,
            run_status(facts),
            f"{facts['committed_rows']:,}",
            f"{facts['steps']['last']:,}" if facts["steps"] else "",
            "" if seed is None else str(seed),
            *(values[setting][at] for setting in shown),
            "" if facts["final_loss"] is None else f"{facts['final_loss']:.4f}",
            format_bytes(facts["bytes_on_disk"]),
        ]
        for at, ((name, facts), seed) in enumerate(zip(found.items(), seeds, strict=True))
    ]
    return ["run", "status", "rows", "last step", "seed", *titles, "final loss", "on disk"], rows
