"""Errors of commands: one sentence on standard error, and an exit code."""

from __future__ import annotations

import re
import signal

from trajstore.cli.tables import err
from trajstore.errors import TrajstoreError

__all__ = ["in_options", "print_error"]


def print_error(error: BaseException) -> int:
    """Print an expected error as one sentence, and return the exit code of the command."""
    sentence, code = _in_words(error)
    err.print(f"trajstore: {sentence}")
    return code


def in_options(sentence: str) -> str:
    """Name options as the command does: errors name the keywords of Python.

    >>> in_options("choose another path, or replace it with overwrite=True")
    'choose another path, or replace it with --overwrite'
    """
    sentence = re.sub(r"\btraining\.steps=(\d+)\b", r"--steps \1", sentence)
    return re.sub(r"\b(overwrite|resume)=True\b", r"--\1", sentence)


def _in_words(error: BaseException) -> tuple[str, int]:
    """Sentence and exit code of an error."""
    if isinstance(error, TrajstoreError):
        return in_options(str(error)), error.exit_code
    if isinstance(error, OSError):
        where = f" {error.filename}" if error.filename else ""
        return f"the operating system reported an error{where}: {error.strerror or error}", 1
    if isinstance(error, MemoryError):
        return f"out of memory: {error}" if str(error) else "out of memory", 1
    return "stopped by Ctrl-C", 128 + signal.SIGINT
