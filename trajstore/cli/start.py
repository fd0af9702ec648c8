"""The command as it is started: Ctrl-C is a sentence also while everything is imported."""

from __future__ import annotations

from trajstore.cli.stop_signals import stop_at_once

__all__ = ["main"]


def main() -> None:
    """Import the commands, and run the one that is asked for."""
    stop_at_once()
    from trajstore.cli.main import main as commands

    commands(prog_name="trajstore")
