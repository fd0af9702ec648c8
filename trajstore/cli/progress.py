"""Progress bars of the commands on standard error, and clean stops by signals."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Self

from rich.progress import (
    BarColumn,
    DownloadColumn,
    Progress,
    ProgressColumn,
    TextColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)

from trajstore.cli.stop_signals import working
from trajstore.cli.tables import err
from trajstore.errors import InvalidArgument
from trajstore.extras import needs_extra


class Bar:
    """A progress bar on a terminal, shown while the ``with`` block runs; elsewhere no output."""

    def __init__(self, *columns: ProgressColumn, **options: Any) -> None:
        self._bar = Progress(*columns, console=err, disable=not err.is_terminal, **options)
        self._task = self._bar.add_task("", total=None, state="")

    def __enter__(self) -> Self:
        working()
        self._bar.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._bar.stop()

    def show(self, done: int, total: int) -> None:
        """Update the bar to `done` of `total`."""
        self._bar.update(self._task, completed=done, total=total)


class BytesProgress(Bar):
    """Progress in bytes.

    Parameters
    ----------
    verb : str
        Label of the bar.
    """

    def __init__(self, verb: str) -> None:
        super().__init__(
            TextColumn(verb),
            BarColumn(bar_width=30),
            DownloadColumn(binary_units=True),
            TransferSpeedColumn(),
            TimeRemainingColumn(),
            transient=True,
        )


class StepsProgress(Bar):
    """Progress in rows of a run, or in frames of a film.

    Parameters
    ----------
    verb : str
        Label of the bar.
    unit : str
        What it counts.
    """

    def __init__(self, verb: str, unit: str = "row") -> None:
        super().__init__(
            TextColumn(f"{verb} {unit} {{task.completed}}/{{task.total}}"),
            BarColumn(bar_width=30),
            TimeRemainingColumn(),
            transient=True,
        )


@contextmanager
def stopped_by_signals() -> Iterator[None]:
    """Let SIGTERM end a command like Ctrl-C, so that it removes its unfinished output."""

    def stop(number: int, frame: object) -> None:
        raise SystemExit(128 + number)

    working()
    before = signal.signal(signal.SIGTERM, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


class AnalysisProgress(Bar):
    """Progress of a computation in tasks.

    Parameters
    ----------
    address : str, optional
        Address of a dask scheduler. Default: compute in the threads of this process.

    Raises
    ------
    MissingExtra
        If `address` is given and dask.distributed is not installed.
    InvalidArgument
        If no scheduler answers at `address`.
    """

    def __init__(self, address: str | None = None) -> None:
        self._client = _client(address) if address else None
        super().__init__(
            TextColumn("{task.completed}/{task.total} tasks"),
            BarColumn(bar_width=20),
            TimeRemainingColumn(),
        )

    def __exit__(self, *error: object) -> None:
        super().__exit__(*error)
        if self._client is not None:
            self._client.close()


def _client(address: str) -> Any:
    with needs_extra("computing on a cluster", "cluster"):
        from distributed import Client
    try:
        return Client(address, timeout=10)
    except (OSError, ValueError) as error:
        raise InvalidArgument(f"no dask scheduler answers at {address}: {error}") from error
