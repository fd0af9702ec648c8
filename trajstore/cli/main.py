"""The command line: each command opens a library object, calls one method, prints the result.

Commands of this package and of others are found through the entry points of the group
``trajstore.commands``.
"""

from __future__ import annotations

import functools
import sys
from importlib.metadata import EntryPoint, entry_points
from typing import Any

import click

from trajstore.errors import TrajstoreError, did_you_mean
from trajstore.installation import __version__

FIRST = """\
First steps:

  trajstore record --preset gatsby --steps 300 -o gatsby.zarr   train a tiny GPT-2 and record it
  trajstore explore gatsby.zarr                                 follow it in a browser
  trajstore summary gatsby.zarr                                 print the main results

To start from a file of your own:

  trajstore import mine.safetensors -o mine.zarr

`trajstore --help` lists all commands. `trajstore COMMAND --help` explains one."""


class _Commands(click.Group):
    """Commands by the names of their entry points; each is imported on first use."""

    @functools.cached_property
    def _entry_points(self) -> dict[str, EntryPoint]:
        installed = entry_points(group="trajstore.commands")
        ours = [point for point in installed if point.module.partition(".")[0] == "trajstore"]
        return {point.name: point for point in (*installed, *ours)}  # ours have precedence

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Names of all commands."""
        return sorted(self._entry_points)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Command of that name; a failed import raises only when the command is called."""
        point = self._entry_points.get(cmd_name)
        if point is None:
            return None
        try:
            command: click.Command = point.load()
        except Exception as error:  # any failure of another package
            if point.module.partition(".")[0] == "trajstore":
                raise
            return _broken(point, error)
        return command

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """The command to run; the error for an unknown name suggests the nearest known one."""
        name = args[0]
        if name not in self._entry_points and not name.startswith("-"):
            raise click.UsageError(
                f"There is no command {name!r}{did_you_mean(name, self._entry_points)}.", ctx
            )
        return super().resolve_command(ctx, args)

    def invoke(self, ctx: click.Context) -> Any:
        """Run a command; an expected error becomes one sentence and an exit code."""
        try:
            return super().invoke(ctx)
        except (TrajstoreError, OSError, MemoryError, KeyboardInterrupt) as error:
            if ctx.params.get("debug"):
                raise
            from trajstore.cli.output import print_error

            sys.exit(print_error(error))


def _broken(point: EntryPoint, error: Exception) -> click.Command:
    """Placeholder for a command of another package that cannot be imported."""
    owner = point.dist.name if point.dist else point.module

    @click.command(
        point.name,
        short_help=f"Cannot be imported from {owner}.",
        context_settings={"ignore_unknown_options": True, "allow_extra_args": True},
    )
    def broken() -> None:
        raise click.ClickException(
            f"the command {point.name} of {owner} cannot be imported: {error}"
        )

    return broken


@click.group(
    cls=_Commands,
    invoke_without_command=True,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
)
@click.version_option(__version__, prog_name="trajstore")
@click.option("--debug", is_flag=True, help="Show tracebacks.")
@click.pass_context
def main(ctx: click.Context, debug: bool) -> None:
    """Record every optimizer step of a training run, and analyze it.

    \b
    Example:
      trajstore record --preset gatsby --steps 300 -o gatsby.zarr
      trajstore summary gatsby.zarr
    """
    if ctx.invoked_subcommand is None:
        click.echo(FIRST)
