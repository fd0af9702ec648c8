"""Errors of commands: one sentence on standard error, and an exit code."""

from __future__ import annotations

import signal

from trajstore.cli.tables import err
from trajstore.errors import TrajstoreError

__all__ = ["print_error"]


def print_error(error: BaseException) -> int:
    """Print an expected error as one sentence, and return the exit code of the command."""
    sentence, code = _in_words(error)
    err.print(f"trajstore: {sentence}")
    return code


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
