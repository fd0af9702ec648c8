"""The command `presets`."""

from __future__ import annotations

import click

from trajstore.cli.options import JSON
from trajstore.cli.tables import out, print_json
from trajstore.trainers.commands.configuration import preset_names

__all__ = ["presets"]


@click.command()
@click.argument("name", required=False, shell_complete=preset_names)
@JSON
def presets(name: str | None, as_json: bool) -> None:
    """List the presets, or print one as TOML for `record --config`.

    \b
    Example:
      trajstore presets gatsby > mine.toml
    """
    from trajstore import trainers

    if name is not None:
        config = trainers.preset(name)
        if as_json:
            print_json(config.model_dump(mode="json"))
        else:
            click.echo(config.to_toml(), nl=False)
        return
    listed = {key: (make.__doc__ or "").strip() for key, make in trainers.PRESETS.items()}
    if as_json:
        print_json(listed)
    else:
        for key, text in listed.items():
            out.print(f"{key}  {text}")
