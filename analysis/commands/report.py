"""The command `report`."""

from __future__ import annotations

from typing import Any

import click

from trajstore.analysis.commands.step_options import OF_WHOLE_RUN, UNCHANGED, WITHIN
from trajstore.cli.options import RUNS, SELECT, file_stem, without_none
from trajstore.cli.output import AnalysisProgress, out


@click.command()
@RUNS
@click.option(
    "-o",
    "--output",
    type=click.Path(),
    help="File to write; default: RUN.html, or runs.html for several runs.",
)
@SELECT("step", note=OF_WHOLE_RUN)
@WITHIN
@UNCHANGED
@click.option(
    "--verify", "check", is_flag=True, help="Verify every stored byte and report the result."
)
@click.option("--overwrite", is_flag=True, help="Replace an existing page.")
def report(
    runs: tuple[str, ...], output: str | None, selected: dict[str, Any], **options: Any
) -> None:
    """Write an HTML report on a run: main results, tables, figures, and how to reproduce it.

    The report is a single file that loads nothing from the network. For several runs or a
    folder of runs, it compares them.

    \b
    Example:
      trajstore report gatsby.zarr
      trajstore report gatsby.zarr --verify -o gatsby.html
      trajstore report runs/
    """
    from trajstore.analysis.report import write_report, write_runs_report
    from trajstore.store.reading.open_runs import run_paths

    paths = run_paths(runs)
    target = output or f"{file_stem(runs, paths)}.html"
    with AnalysisProgress() as progress:
        how = without_none(options) | selected | {"report": progress.show}
        if len(paths) == 1:
            written = write_report(paths[0], target, **how)
        else:
            written = write_runs_report(paths, target, **how)
    out.print(f"Wrote {written}.")
