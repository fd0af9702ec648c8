"""Server of the page: it listens on one address, and accepts only its own pages."""

from __future__ import annotations

import asyncio
import signal
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from typing import Any

from trajstore.analysis.exploring.page import LiveRun, Page
from trajstore.analysis.exploring.plots import MANY
from trajstore.analysis.figures.style import run_name
from trajstore.errors import InvalidArgument, MissingExtra

_ANY = "0.0.0.0"
_NEEDED = ("bokeh", "datashader", "holoviews", "pandas", "panel")
_LOOPBACK = ("127.0.0.1", "localhost")


def check_panel() -> None:
    """Check the packages of the extra.

    Raises
    ------
    MissingExtra
        Without Panel, HoloViews, Datashader, Bokeh or pandas.
    """
    if any(find_spec(name) is None for name in _NEEDED):
        raise MissingExtra("explore", "explore")


def free_port(host: str, port: int) -> int:
    """That port, or a free one for 0.

    Raises
    ------
    InvalidArgument
        If the address is not available.
    """
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, family=socket.AF_INET, type=socket.SOCK_STREAM
        )[0]
        with socket.socket(family, kind, protocol) as tried:
            tried.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            tried.bind(address)
            return int(tried.getsockname()[1])
    except OSError as error:
        raise InvalidArgument(
            f"cannot listen on {host!r}, port {port}: {error.strerror or error}; choose a --host "
            "of this machine (IPv4), or --port 0 for a free one"
        ) from error


@contextmanager
def serving(live: LiveRun, host: str, port: int) -> Iterator[Callable[[], int]]:
    """A listening server, and a function that serves until a signal and returns its number.

    Parameters
    ----------
    live : LiveRun
    host : str
    port : int
        Not 0.
    """
    import holoviews as hv
    import panel as pn

    pn.extension("tabulator")
    hv.extension("bokeh")
    hv.renderer("bokeh").webgl = False  # much slower without a graphics card
    before = signal.getsignal(signal.SIGINT)  # Panel replaces it
    server = pn.io.server.get_server(
        lambda: Page(live).view(),
        port=port,
        address=host,
        websocket_origin=[f"{name}:{port}" for name in _names(host)],
        title=run_name(live.state.ds),
        start=False,
        warm=live.state.tokens.ids.size > MANY,  # the first use compiles Datashader
        show=False,
    )
    signal.signal(signal.SIGINT, before)
    server.start()
    try:
        yield lambda: _until_signal(server.io_loop)
    finally:
        server.stop()


def _until_signal(loop: Any) -> int:
    """Run a tornado loop until Ctrl-C or SIGTERM; stop between two callbacks."""
    came: list[int] = []

    def stop(number: int) -> None:
        came.append(number)
        loop.stop()

    loop.asyncio_loop.set_exception_handler(_report_error)
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.asyncio_loop.add_signal_handler(number, stop, number)
    try:
        loop.start()
    finally:
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.asyncio_loop.remove_signal_handler(number)
    return came[0]


def _report_error(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
    """Report an error, except a browser that closed its connection."""
    from tornado.websocket import WebSocketClosedError

    if not isinstance(context.get("exception"), WebSocketClosedError):
        loop.default_exception_handler(context)


def address(host: str, port: int) -> str:
    """Address of the page."""
    return f"http://{socket.gethostname() if host == _ANY else host}:{port}/"


def _names(host: str) -> list[str]:
    """Host names that pages may use: all names of this machine if it listens on all."""
    if host in _LOOPBACK:
        return [*_LOOPBACK]
    if host != _ANY:
        return [host]
    hostname = socket.gethostname()
    addresses = socket.getaddrinfo(hostname, None, family=socket.AF_INET)
    return sorted(
        {*_LOOPBACK, hostname, socket.getfqdn(), *(str(entry[4][0]) for entry in addresses)}
    )
