"""The command that follows runs while other processes record them: watch."""

from __future__ import annotations

import json
import signal
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

import click
from rich.console import RenderableType
from rich.live import Live

from trajstore.cli.errors import sentences
from trajstore.cli.options import RUNS
from trajstore.cli.progress import stopped_by_signals
from trajstore.cli.tables import PlainConsole, json_value, out
from trajstore.cli.watch_view import facts, line, overview, view
from trajstore.errors import RunNotFound

if TYPE_CHECKING:
    from trajstore.watching.followed_runs import FollowedRuns
    from trajstore.watching.run_follower import Look

__all__ = ["watch"]

_TERMINAL_INTERVAL = 1.0
_LINES_INTERVAL = 10.0


@click.command()
@RUNS
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
def watch(runs: tuple[str, ...], interval: float | None, once: bool, as_json: bool) -> None:
    """Follow a run while another process records it: progress, loss, gradients, still tokens.

    A view on a terminal, a line for every look elsewhere; of several runs, or of the folder of a
    sweep, a line for each. It only reads, and the recording does not notice. A run that is not
    there yet is waited for. Ends with 0 when all runs are complete or interrupted, and with 1 when
    the process that recorded one is gone.

    \b
    Example:
      trajstore watch gatsby.zarr
      trajstore watch gatsby.zarr --once
      trajstore watch runs/
    """
    from trajstore.store.reading.open_group import runs_beside
    from trajstore.watching.followed_runs import FollowedRuns

    followed = FollowedRuns(runs)
    if once:
        looks = followed.look()
        for run, look in looks.items():
            if look.standing == "absent" and len(looks) == 1:
                raise RunNotFound(f"there is no run at {run}{runs_beside(Path(run))}")
        _print(looks, as_json=as_json)
    else:
        try:
            with stopped_by_signals():  # which leaves the terminal as it was
                if out.is_terminal and not as_json:
                    looks = _live(followed, interval or _TERMINAL_INTERVAL)
                else:
                    looks = _lines(followed, interval or _LINES_INTERVAL, as_json=as_json)
        except KeyboardInterrupt:  # the usual way to stop looking
            sys.exit(128 + signal.SIGINT)
    if any(look.standing == "abandoned" for look in looks.values()):
        sys.exit(1)


def _live(followed: FollowedRuns, interval: float) -> dict[str, Look]:
    """Show the view until all runs end, and leave the last one there."""
    screen = PlainConsole()  # which wraps lines, other than `out`
    with Live(console=screen, auto_refresh=False) as live:
        while True:
            looks = followed.look()
            plain = not screen.encoding.startswith("utf")
            live.update(_view(looks, screen.width, plain=plain), refresh=True)
            if all(map(_ended, looks.values())):
                return looks
            time.sleep(interval)  # between two looks, as --interval says


def _lines(followed: FollowedRuns, interval: float, *, as_json: bool) -> dict[str, Look]:
    ended: set[str] = set()  # and printed: they stay as they are
    while True:
        looks = followed.look()
        _print({run: look for run, look in looks.items() if run not in ended}, as_json=as_json)
        ended = {run for run, look in looks.items() if _ended(look)}
        if len(ended) == len(looks):
            return looks
        time.sleep(interval)  # between two looks, as --interval says


def _print(looks: dict[str, Look], *, as_json: bool) -> None:
    if out.is_terminal and not as_json:
        out.print(_view(looks, out.width), soft_wrap=False)
        return
    for run, look in looks.items():
        click.echo(json.dumps(json_value(facts(run, look))) if as_json else line(run, look))


def _view(looks: dict[str, Look], width: int, *, plain: bool = False) -> RenderableType:
    if len(looks) > 1:
        return overview(looks, width)
    ((run, look),) = looks.items()
    return view(run, look, width, plain=plain)


def _ended(look: Look) -> bool:
    return look.standing in ("complete", "interrupted", "abandoned")
