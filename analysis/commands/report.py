"""The command `report`."""

from __future__ import annotations

from pathlib import Path

import click
from rich.text import Text

from trajstore.analysis.commands.step_options import STEPS, STILLNESS, WITHIN
from trajstore.analysis.motion.stillness import MIN_STILL
from trajstore.cli.errors import sentences
from trajstore.cli.options import RUN
from trajstore.cli.progress import AnalysisProgress
from trajstore.cli.tables import out

__all__ = ["report"]


@click.command()
@RUN
@click.option("-o", "--output", type=click.Path(), help="The page; default: RUN.html.")
@STEPS
@WITHIN
@STILLNESS
@click.option("--verify", "check", is_flag=True, help="Verify every stored byte, and say so.")
@click.option("--overwrite", is_flag=True, help="Replace a page that is there.")
@sentences
def report(
    run: str,
    output: str | None,
    steps: str | None,
    within: bool,
    min_still: int | None,
    check: bool,
    overwrite: bool,
) -> None:
    """Write a page about a run: what happened, tables, figures, and how to reproduce it.

    One file of HTML, which asks nothing of the network.

    \b
    Example:
      trajstore report gatsby.zarr
      trajstore report gatsby.zarr --verify -o gatsby.html
    """
    from trajstore.analysis.report import write_report

    stem = Path(run.rstrip("/")).name.removesuffix(".zarr")
    with AnalysisProgress() as progress:
        target = write_report(
            run,
            output or f"{stem}.html",
            steps=steps,
            within=within,
            min_still=min_still or MIN_STILL,
            check=check,
            overwrite=overwrite,
            report=progress.show,
        )
    out.print(Text(f"Wrote {target}."))
