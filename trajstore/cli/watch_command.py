"""The command `watch`, which follows runs while other processes record them."""

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

from trajstore.cli.options import RUNS
from trajstore.cli.progress import stopped_by_signals
from trajstore.cli.tables import PlainConsole, json_value, out
from trajstore.cli.watch_view import facts, line, overview, view
from trajstore.errors import RunNotFound

if TYPE_CHECKING:
    from trajstore.watching.followed_runs import FollowedRuns
    from trajstore.watching.run_follower import Look

_TERMINAL_INTERVAL = 1.0
_LINES_INTERVAL = 10.0


@click.command()
@RUNS
@click.option(
    "--interval",
    type=click.FloatRange(min=0.1),
    metavar="SECONDS",
    help="Seconds between two updates; default: 1 on a terminal, 10 elsewhere.",
)
@click.option("--once", is_flag=True, help="Print the current state and exit.")
@click.option("--json", "as_json", is_flag=True, help="Print every update as a line of JSON.")
def watch(runs: tuple[str, ...], interval: float | None, once: bool, as_json: bool) -> None:
    """Follow a run during recording: progress, loss, gradients, unchanged tokens.

    Prints a view on a terminal, otherwise one line per update. For several runs or the folder of a
    sweep, prints one line per run. Reads only, and does not slow the recording. Waits for a run
    that does not exist yet. Exits with 0 when all runs are complete or interrupted, and with 1 if
    a recording process died.

    \b
    Example:
      trajstore watch gatsby.zarr
      trajstore watch gatsby.zarr --once
      trajstore watch runs/
    """
    from trajstore.store.reading.open_group import similar_runs
    from trajstore.watching.followed_runs import FollowedRuns

    followed = FollowedRuns(runs)
    if once:
        looks = followed.look()
        for run, look in looks.items():
            if look.status == "absent" and len(looks) == 1:
                raise RunNotFound(f"there is no run at {run}{similar_runs(Path(run))}")
        _print(looks, as_json=as_json)
    else:
        try:
            with stopped_by_signals():  # restores the terminal
                if out.is_terminal and not as_json:
                    looks = _live(followed, interval or _TERMINAL_INTERVAL)
                else:
                    looks = _lines(followed, interval or _LINES_INTERVAL, as_json=as_json)
        except KeyboardInterrupt:  # the usual way to end `watch`
            sys.exit(128 + signal.SIGINT)
    if any(look.status == "abandoned" for look in looks.values()):
        sys.exit(1)


def _live(followed: FollowedRuns, interval: float) -> dict[str, Look]:
    """Update the view until all runs end; the last view stays on the terminal."""
    screen = PlainConsole()  # wraps lines, unlike `out`
    with Live(console=screen, auto_refresh=False) as live:
        while True:
            looks = followed.look()
            live.update(_view(looks, screen.width), refresh=True)
            if all(map(_ended, looks.values())):
                return looks
            time.sleep(interval)  # --interval


def _lines(followed: FollowedRuns, interval: float, *, as_json: bool) -> dict[str, Look]:
    ended: set[str] = set()  # printed for the last time
    while True:
        looks = followed.look()
        _print({run: look for run, look in looks.items() if run not in ended}, as_json=as_json)
        ended = {run for run, look in looks.items() if _ended(look)}
        if len(ended) == len(looks):
            return looks
        time.sleep(interval)  # --interval


def _print(looks: dict[str, Look], *, as_json: bool) -> None:
    if out.is_terminal and not as_json:
        out.print(_view(looks, out.width), soft_wrap=False)
        return
    for run, look in looks.items():
        click.echo(json.dumps(json_value(facts(run, look))) if as_json else line(run, look))


def _view(looks: dict[str, Look], width: int) -> RenderableType:
    if len(looks) > 1:
        return overview(looks, width)
    ((run, look),) = looks.items()
    return view(run, look, width)


def _ended(look: Look) -> bool:
    return look.status in ("complete", "interrupted", "abandoned")
