"""The command that follows a run while another process records it: watch."""

from __future__ import annotations

import json
import signal
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

import click
from rich.live import Live

from trajstore.cli.options import RUN, sentences
from trajstore.cli.progress import stopped_by_signals
from trajstore.cli.tables import PlainConsole, json_value, out
from trajstore.cli.watch_view import facts, line, view
from trajstore.errors import RunNotFound

if TYPE_CHECKING:
    from trajstore.watching.run_follower import Look, RunFollower

__all__ = ["watch"]

_TERMINAL_INTERVAL = 1.0
_LINES_INTERVAL = 10.0


@click.command()
@RUN
@click.option(
    "--interval",
    type=click.FloatRange(min=0.1),
    metavar="SECONDS",
    help="From one look to the next; default: 1 on a terminal, 10 elsewhere.",
)
@click.option("--once", is_flag=True, help="Look once, and end.")
@click.option(
    "--json", "as_json", is_flag=True, help="Print the facts of every look as a line of JSON."
)
@sentences
def watch(run: str, interval: float | None, once: bool, as_json: bool) -> None:
    """Follow a run while another process records it: progress, loss, gradients, still tokens.

    A view on a terminal, a line for every look elsewhere. It only reads, and the recording does not
    notice. A run that is not there yet is waited for. Ends with 0 when the run is complete or
    interrupted, and with 1 when the process that recorded it is gone.

    \b
    Example:
      trajstore watch gatsby.zarr
      trajstore watch gatsby.zarr --once
    """
    from trajstore.store.reading.open_group import runs_beside
    from trajstore.watching.run_follower import RunFollower

    follower = RunFollower(run)
    if once:
        look = follower.look()
        if look.standing == "absent":
            raise RunNotFound(f"there is no run at {run}{runs_beside(Path(run))}")
        _print(run, look, as_json=as_json)
    else:
        try:
            with stopped_by_signals():  # which leaves the terminal as it was
                if out.is_terminal and not as_json:
                    look = _live(run, follower, interval or _TERMINAL_INTERVAL)
                else:
                    look = _lines(run, follower, interval or _LINES_INTERVAL, as_json=as_json)
        except KeyboardInterrupt:  # the usual way to stop looking
            sys.exit(128 + signal.SIGINT)
    if look.standing == "abandoned":
        sys.exit(1)


def _live(run: str, follower: RunFollower, interval: float) -> Look:
    """Show the view until the run ends, and leave the last one there."""
    screen = PlainConsole()  # which wraps lines, other than `out`
    with Live(console=screen, auto_refresh=False) as live:
        while True:
            look = follower.look()
            plain = not screen.encoding.startswith("utf")
            live.update(view(run, look, screen.width, plain=plain), refresh=True)
            if _ended(look):
                return look
            time.sleep(interval)  # between two looks, as --interval says


def _lines(run: str, follower: RunFollower, interval: float, *, as_json: bool) -> Look:
    while True:
        look = follower.look()
        _print(run, look, as_json=as_json)
        if _ended(look):
            return look
        time.sleep(interval)  # between two looks, as --interval says


def _print(run: str, look: Look, *, as_json: bool) -> None:
    if as_json:
        click.echo(json.dumps(json_value(facts(run, look))))
    elif out.is_terminal:
        out.print(view(run, look, out.width), soft_wrap=False)
    else:
        click.echo(line(run, look))


def _ended(look: Look) -> bool:
    return look.standing in ("complete", "interrupted", "abandoned")
