"""The command as it is started: Ctrl-C is a sentence also while everything is imported."""

from __future__ import annotations

import os
import signal
from types import FrameType

__all__ = ["main", "working"]


def main() -> None:
    """Import the commands, and run the one that is asked for."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, _stop)
    from trajstore.cli.main import main as commands

    commands(prog_name="trajstore")


def working() -> None:
    """Have Ctrl-C raise `KeyboardInterrupt` from now on: there may be something to be tidied."""
    if signal.getsignal(signal.SIGINT) is _stop:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def _stop(number: int, frame: FrameType | None) -> None:
    # An exception in the middle of an import becomes whatever the imported makes of it.
    os.write(2, b"trajstore: stopped by Ctrl-C\n")
    os._exit(128 + number)
