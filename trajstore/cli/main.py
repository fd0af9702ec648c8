"""The command line: each command opens a library object, calls one method, prints the result."""

from __future__ import annotations

import click

from trajstore.cli.annotate_command import annotate
from trajstore.cli.exchange_commands import export, import_, upgrade
from trajstore.cli.explore_command import explore
from trajstore.cli.figure_commands import plot, report
from trajstore.cli.inspect_commands import analyze, compare, info, summary
from trajstore.cli.integrity_commands import repair, verify
from trajstore.cli.next_commands import FIRST
from trajstore.cli.record_commands import fetch, plan, presets, record
from trajstore.cli.sweep_command import sweep
from trajstore.cli.watch_command import watch
from trajstore.cli.what_if_commands import what_if
from trajstore.nearest_name import did_you_mean
from trajstore.version import __version__

__all__ = ["main"]


class _Commands(click.Group):
    """The commands, of which a mistyped name is told the nearest."""

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        name = args[0]
        if self.get_command(ctx, name) is None and not name.startswith("-"):
            raise click.UsageError(
                f"There is no command {name!r}{did_you_mean(name, self.commands)}.", ctx
            )
        return super().resolve_command(ctx, args)


@click.group(
    cls=_Commands,
    invoke_without_command=True,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
)
@click.version_option(__version__, prog_name="trajstore")
@click.option("--debug", is_flag=True, help="Show tracebacks.")
@click.pass_context
def main(ctx: click.Context, debug: bool) -> None:
    """Record every optimizer step of a training run, and look into it.

    \b
    Example:
      trajstore record --preset gatsby --steps 300 -o gatsby.zarr
      trajstore summary gatsby.zarr
    """
    if ctx.invoked_subcommand is None:
        click.echo(FIRST)


for command in (
    record,
    sweep,
    what_if,
    plan,
    fetch,
    presets,
    watch,
    info,
    summary,
    analyze,
    plot,
    report,
    explore,
    export,
    import_,
    upgrade,
    annotate,
    compare,
    verify,
    repair,
):
    main.add_command(command)
