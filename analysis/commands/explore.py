"""The command `explore`, which shows a run in a browser."""

from __future__ import annotations

import signal
import sys
import webbrowser

import click

from trajstore.cli.options import RUN
from trajstore.cli.output import AnalysisProgress, out


@click.command()
@RUN
@click.option(
    "--host",
    default="127.0.0.1",
    show_default=True,
    help="Address to listen on. The default allows connections from this machine only.",
)
@click.option(
    "--port",
    type=click.IntRange(0, 65535),
    default=5006,
    show_default=True,
    help="Port to listen on; 0 selects a free port.",
)
@click.option("--open", "browse", is_flag=True, help="Open the page in a browser.")
def explore(run: str, host: str, port: int, browse: bool) -> None:
    """Show a run in a browser: token positions per step, heatmap, curves, single tokens.

    Reads the run and serves its page until Ctrl-C. Works during recording: new rows appear
    automatically. The page loads nothing from the network.

    \b
    Example:
      trajstore explore gatsby.zarr
      trajstore explore gatsby.zarr --port 0 --open
    """
    from trajstore.analysis.exploring.live_run import LiveRun
    from trajstore.analysis.exploring.server import address, check_panel, free_port, serving

    check_panel()
    port = free_port(host, port)
    with AnalysisProgress() as progress:
        live = LiveRun(run, progress.show)
    with live, serving(live, host, port) as serve:
        out.print(f"Serving {run} at {address(host, port)} until Ctrl-C.")
        if browse:
            webbrowser.open(address(host, port))
        number = serve()
    if number == signal.SIGINT:
        raise KeyboardInterrupt
    sys.exit(128 + number)
