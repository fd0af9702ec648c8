"""The command line: each command opens a library object, calls one method, prints the result."""

from __future__ import annotations

import click

from trajstore.cli.exchange_commands import export, import_, upgrade
from trajstore.cli.figure_commands import plot, report
from trajstore.cli.inspect_commands import analyze, compare, info, summary
from trajstore.cli.integrity_commands import repair, verify
from trajstore.cli.record_commands import fetch, plan, presets, record
from trajstore.cli.what_if_commands import what_if
from trajstore.version import __version__

__all__ = ["main"]


@click.group(context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
@click.version_option(__version__, prog_name="trajstore")
@click.option("--debug", is_flag=True, help="Show tracebacks.")
def main(debug: bool) -> None:
    """Record every optimizer step of a training run, and look into it.

    \b
    Example:
      trajstore record --preset gatsby --steps 300 -o gatsby.zarr
      trajstore summary gatsby.zarr
    """


for command in (
    record,
    what_if,
    plan,
    fetch,
    presets,
    info,
    summary,
    analyze,
    plot,
    report,
    export,
    import_,
    upgrade,
    compare,
    verify,
    repair,
):
    main.add_command(command)
