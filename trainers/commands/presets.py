"""The command `presets`."""

from __future__ import annotations

import click

from trajstore.cli.output import out
from trajstore.trainers.commands.configuration import preset_names


@click.command()
@click.argument("name", required=False, shell_complete=preset_names)
def presets(name: str | None) -> None:
    """List the presets, or print one as TOML for `record --config`.

    \b
    Example:
      trajstore presets gatsby > mine.toml
    """
    from trajstore import trainers

    if name is not None:
        click.echo(trainers.preset(name).to_toml(), nl=False)
        return
    for key, make in trainers.PRESETS.items():
        out.print(f"{key}  {(make.__doc__ or '').strip()}")
