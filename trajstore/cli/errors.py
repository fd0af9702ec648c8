"""Errors of commands: one sentence on standard error, and an exit code."""

from __future__ import annotations

import functools
import signal
import sys
from collections.abc import Callable
from typing import ParamSpec

import click
from rich.text import Text

from trajstore.cli.tables import err
from trajstore.errors import TrajstoreError

__all__ = ["sentences"]

P = ParamSpec("P")


def sentences(command: Callable[P, None]) -> Callable[P, None]:
    """Print expected errors as one sentence, and exit with their code."""

    @functools.wraps(command)
    def wrapped(*args: P.args, **kwargs: P.kwargs) -> None:
        try:
            command(*args, **kwargs)
        except (TrajstoreError, OSError, MemoryError, KeyboardInterrupt) as error:
            if click.get_current_context().find_root().params["debug"]:
                raise
            sentence, code = _in_words(error)
            err.print(Text(f"trajstore: {sentence}"))
            sys.exit(code)

    return wrapped


def _in_words(error: BaseException) -> tuple[str, int]:
    """Sentence and exit code of an error."""
    if isinstance(error, TrajstoreError):
        return str(error), error.exit_code
    if isinstance(error, OSError):
        where = f" {error.filename}" if error.filename else ""
        return f"the operating system reported an error{where}: {error.strerror or error}", 1
    if isinstance(error, MemoryError):
        return f"out of memory: {error}" if str(error) else "out of memory", 1
    return "stopped by Ctrl-C", 128 + signal.SIGINT
