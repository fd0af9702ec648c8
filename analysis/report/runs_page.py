"""Report on several runs: their comparison in tables, sentences and figures."""

from __future__ import annotations

import os
import shlex
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import xarray as xr

from trajstore.analysis.figures import FIGURES, Options
from trajstore.analysis.figures.style import run_system
from trajstore.analysis.motion.unchanged import MIN_UNCHANGED
from trajstore.analysis.report.page import drawn, html_table, summaries, verified, write_page
from trajstore.analysis.results.run_summary import summary
from trajstore.analysis.results.summary_table import summary_table
from trajstore.analysis.scan.scan import rows_of_window
from trajstore.analysis.several.divergence import divergence
from trajstore.errors import InvalidArgument, VariableNotRecorded
from trajstore.store.reading.open_run import open_run
from trajstore.store.reading.open_runs import final_loss, run_table
from trajstore.store.reading.run_info import (
    differing_settings,
    information,
    run_labels,
    run_status,
    short_names,
)
from trajstore.store.storage.remote_path import location
from trajstore.version import __version__

if TYPE_CHECKING:
    from trajstore.exchange.selection import Steps


def write_runs_report(
    runs: Sequence[str],
    path: str | os.PathLike[str],
    *,
    steps: Steps = None,
    within: bool = False,
    min_unchanged: int = MIN_UNCHANGED,
    check: bool = False,
    overwrite: bool = False,
    report: Callable[[int, int], None] | None = None,
) -> Path:
    """Write a report that compares runs: one HTML file that loads nothing from the network.

    Parameters
    ----------
    runs : sequence of str
        At least two. Recordings in progress are fine.
    path, steps, within, min_unchanged, check, overwrite, report
        As for `trajstore.analysis.report.write_report`.

    Raises
    ------
    RunNotFound, FormatError, InvalidArgument, RunExists, MissingExtra
        As `trajstore.analysis.report.write_report`.
    """
    options = Options(steps=steps, within=within, min_unchanged=min_unchanged)
    return write_page(path, lambda: _facts(runs, options, check, report), overwrite=overwrite)


def _facts(
    runs: Sequence[str],
    options: Options,
    check: bool,
    report: Callable[[int, int], None] | None,
) -> dict[str, Any]:
    whole = {run: open_run(run) for run in runs}
    found = {run: information(run) | {"final_loss": final_loss(run)} for run in runs}
    attributes = [ds.attrs for ds in whole.values()]
    labels = dict(zip(runs, run_labels(attributes, runs), strict=True))
    differing = list(short_names(attributes, differing_settings(attributes)).values())
    figures = [figure for figure in FIGURES.values() if figure.overlays]
    pictures, left_out = drawn(list(whole.values()), figures, options, report)
    opened = {
        run: rows_of_window(ds, options.steps) if options.within else ds
        for run, ds in whole.items()
    }
    statuses = Counter(run_status(facts) for facts in found.values())
    checked = {run: verified(location(run), check) for run in runs}
    sentences = {run: facts["verified"] for run, facts in checked.items()}
    if len(set(sentences.values())) == 1:
        sentences = {"": next(iter(sentences.values()))}
    return {
        "name": f"{len(runs)} runs",
        "system": run_system(*opened.values()),
        "span": f"They differ in {', '.join(differing) or 'no setting'}",
        "status": ", ".join(f"{number} {status}" for status, number in statuses.items()),
        "caveats": [],
        "findings": [{"title": "Divergence", "sentences": _apart(opened, labels)}],
        "advice": [],
        "tables": [
            html_table("Runs", *run_table(found)),
            *summaries(
                lambda: [
                    summary_table({name: summary(ds).compute() for name, ds in opened.items()})
                ]
            ),
        ],
        "figures": pictures,
        "left_out": left_out,
        "verified": " ".join(
            f"{run}: {sentence}" if run else sentence for run, sentence in sentences.items()
        ),
        "problems": [
            f"{run}: {problem}" for run, facts in checked.items() for problem in facts["problems"]
        ],
        "commands": "\n".join(f"trajstore report {shlex.quote(run)}" for run in runs),
        "settings": "",
        "made_of": "The report of each run has the commands that reproduce it:",
        "provenance": [],
        "version": __version__,
    }


def _apart(runs: dict[str, xr.Dataset], labels: dict[str, str]) -> list[str]:
    """One sentence for each run after the first."""
    (name, first), *others = runs.items()
    sentences = []
    for run, ds in others:
        try:
            found = divergence(first, ds).sel(population="all").compute()
        except (VariableNotRecorded, InvalidArgument) as error:
            sentences.append(f"{labels[run]}: not compared with {name}: {error}.")
            continue
        begin = int(found["first_difference"])
        if begin < 0:
            sentences.append(f"{labels[run]}: W equals that of {name} at every step, bit for bit.")
            continue
        last = found.isel(step=-1)
        sentences.append(
            f"{labels[run]}: W differs from that of {name} since step {begin:,}. At step "
            f"{int(last['step']):,}, {last['differing'].item():.1%} of its elements differ; the "
            f"distance is {last['distance'].item():.4g} (L2)."
        )
    return sentences
