"""What one would type next: on arriving, and when a recording is done or was interrupted."""

from __future__ import annotations

import shlex
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from trajstore.byte_sizes import format_bytes
from trajstore.cli.tables import err, out

if TYPE_CHECKING:
    from trajstore.store.remote_path import RunPath

__all__ = ["FIRST", "print_interrupted", "print_recorded"]

FIRST = """\
Type first:

  trajstore record --preset gatsby --steps 300 -o gatsby.zarr   train a tiny GPT-2, and record it
  trajstore watch gatsby.zarr                                   look on, from another terminal
  trajstore summary gatsby.zarr                                 see what happened

Or, with a file that you have:

  trajstore import mine.safetensors -o mine.zarr

`trajstore --help` lists all commands, `trajstore COMMAND --help` explains one."""


def print_recorded(
    path: RunPath, facts: dict[str, Any], seconds: float | None, rate: float | None
) -> None:
    """Print what was recorded, how long that took, and three commands to go on with.

    Parameters
    ----------
    path : path-like
        Of the run, as it was named.
    facts : dict
        Of `trajstore.store.run_info.information`.
    seconds, rate : float or None
        That it took, and steps a second; None where nothing was trained, or a single step.
    """
    took = "" if seconds is None else f" in {timedelta(seconds=round(seconds))}"
    if rate is not None:
        took += f" ({rate:.3g} steps a second)"
    out.print(
        f"Recorded {facts['committed_rows']} rows to {path}{took}: "
        f"{format_bytes(facts['bytes_native'])} in {format_bytes(facts['bytes_on_disk'])} "
        f"on disk (ratio {facts['ratio']:.2f})."
    )
    run = shlex.quote(str(path))
    said = {
        f"trajstore summary {run}": "gradients, displacement, loss",
        f"trajstore analyze {run} freeze": "when each token stopped moving",
        f"trajstore verify {run}": "every byte, against its checksum",
    }
    longest = max(map(len, said))
    out.print("Go on with:")
    for command, what in said.items():
        out.print(f"  {command:<{longest}}   {what}")


def print_interrupted(path: RunPath, facts: dict[str, Any], *, fsync: bool) -> None:
    """Print, on standard error, how far it came, and the command that goes on."""
    again = f"trajstore record --resume -o {shlex.quote(str(path))}{' --fsync' * fsync}"
    err.print(
        f"Interrupted after step {facts['steps']['last']}; "
        f"{facts['committed_rows']} rows are whole. Go on with: {again}"
    )
