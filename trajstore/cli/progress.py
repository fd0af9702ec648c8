"""Progress bars of the commands on standard error."""

from __future__ import annotations

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

from trajstore.cli.stop_signals import StopRequest, working
from trajstore.cli.tables import err
from trajstore.errors import InvalidArgument, needs_extra


class Bar:
    """A progress bar on a terminal, shown while the ``with`` block runs; elsewhere no output.

    Parameters
    ----------
    *columns : ProgressColumn
    stop : StopRequest, optional
        If a signal has requested a stop, `show` ends the command.
    **options
        Of the bar.
    """

    def __init__(
        self, *columns: ProgressColumn, stop: StopRequest | None = None, **options: Any
    ) -> None:
        self._stop = stop
        self._bar = Progress(*columns, console=err, disable=not err.is_terminal, **options)
        self._task = self._bar.add_task("", total=None, state="")

    def __enter__(self) -> Self:
        working()
        if self._stop is not None:
            self._stop.begin()
        self._bar.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._bar.stop()

    def show(self, done: int, total: int) -> None:
        """Update the bar to `done` of `total`.

        Raises
        ------
        KeyboardInterrupt, SystemExit
            If a signal has requested a stop.
        """
        if self._stop is not None:
            self._stop.check()
        self._bar.update(self._task, completed=done, total=total)


class BytesProgress(Bar):
    """Progress in bytes.

    Parameters
    ----------
    verb : str
        Label of the bar.
    stop : StopRequest, optional
        As of `Bar`.
    """

    def __init__(self, verb: str, stop: StopRequest | None = None) -> None:
        super().__init__(
            TextColumn(verb),
            BarColumn(bar_width=30),
            DownloadColumn(binary_units=True),
            TransferSpeedColumn(),
            TimeRemainingColumn(),
            stop=stop,
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
    stop : StopRequest, optional
        As of `Bar`.
    """

    def __init__(self, verb: str, unit: str = "row", stop: StopRequest | None = None) -> None:
        super().__init__(
            TextColumn(f"{verb} {unit} {{task.completed}}/{{task.total}}"),
            BarColumn(bar_width=30),
            TimeRemainingColumn(),
            stop=stop,
            transient=True,
        )


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
