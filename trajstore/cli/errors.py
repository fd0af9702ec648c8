"""Errors of commands: one sentence on standard error, and an exit code."""

from __future__ import annotations

import signal

from trajstore.cli.tables import err, in_options
from trajstore.errors import TrajstoreError


def print_error(error: BaseException) -> int:
    """Print an expected error as one sentence, and return the exit code of the command."""
    sentence, code = "stopped by Ctrl-C", 128 + signal.SIGINT
    if isinstance(error, TrajstoreError):
        sentence, code = in_options(str(error)), error.exit_code
    elif isinstance(error, OSError):
        where = f" {error.filename}" if error.filename else ""
        reason = error.strerror or error
        sentence, code = f"the operating system reported an error{where}: {reason}", 1
    elif isinstance(error, MemoryError):
        sentence, code = f"out of memory: {error}" if str(error) else "out of memory", 1
    err.print(f"trajstore: {sentence}")
    return code
