"""Entry point of the command. Ctrl-C prints one sentence even during imports."""

from __future__ import annotations

from trajstore.cli.lacking_characters import replace_lacking_characters
from trajstore.cli.stop_signals import stop_at_once


def main() -> None:
    """Import the commands and run the one given on the command line."""
    stop_at_once()
    replace_lacking_characters()
    from trajstore.cli.main import main as commands

    commands(prog_name="trajstore")
