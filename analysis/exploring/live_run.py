"""A run that may still be recorded, with its history in memory, kept up to date."""

from __future__ import annotations

import os
import threading
import time
from dataclasses import dataclass, replace

import xarray as xr

from trajstore.analysis.exploring.run_history import RunHistory, prepare
from trajstore.analysis.exploring.tokens import TokenList
from trajstore.analysis.scan.block_tasks import Report
from trajstore.errors import TrajstoreError
from trajstore.store.reading.open_run import open_run
from trajstore.store.storage.lock import is_written_to
from trajstore.store.storage.remote_path import location

_SECONDS = 2.0


@dataclass(frozen=True, kw_only=True)
class Seen:
    """A consistent state of a run at one moment.

    Attributes
    ----------
    history : RunHistory
    tokens : TokenList
    ds : Dataset
        Opened without dask, for single tokens.
    standing : str
        ``recording``, ``interrupted`` or ``complete``; ``abandoned`` if the run is marked
        ``recording``, but its process died.
    trouble : str
        Why no newer state can be read; otherwise empty.
    """

    history: RunHistory
    tokens: TokenList
    ds: xr.Dataset
    standing: str
    trouble: str = ""


class LiveRun:
    """Reads a run, and reads it again in a thread when it has grown.

    Reading takes at most a tenth of the time.

    Parameters
    ----------
    path : path-like
        A local run.
    report : callable, optional
        Called with the number of finished tasks of the first reading, and of all tasks.

    Attributes
    ----------
    seen : Seen
        The newest state; replaced as a whole.

    Raises
    ------
    RunNotFound, FormatError
        If there is no run.
    VariableNotRecorded, InvalidArgument
        As `trajstore.analysis.exploring.run_history.prepare`; for an address.
    """

    def __init__(self, path: str | os.PathLike[str], report: Report | None = None) -> None:
        self._path = path
        self.seen = self._whole(*self._look(), report)
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._follow, name="explore", daemon=True)

    def __enter__(self) -> LiveRun:
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._stop.set()
        self._thread.join()

    def look(self) -> None:
        """Read the run again, if it has changed.

        Raises
        ------
        TrajstoreError, OSError
            If the run cannot be read now; the earlier state stays.
        """
        ds, status = self._look()
        seen = self.seen
        if ds.attrs != seen.ds.attrs:
            self.seen = self._whole(ds, status)
        elif status != seen.standing or seen.trouble:
            self.seen = replace(seen, standing=status, trouble="")

    def _look(self) -> tuple[xr.Dataset, str]:
        """Open the run, and return it with its state."""
        # Read the lock first: a writer marks the end in the root before it releases the lock.
        written_to = is_written_to(location(self._path))
        ds = open_run(self._path, chunks=None)
        status = str(ds.attrs.get("status", "complete"))
        return ds, "abandoned" if status == "recording" and written_to is False else status

    def _whole(self, ds: xr.Dataset, status: str, report: Report | None = None) -> Seen:
        history = prepare(open_run(self._path), report)
        return Seen(history=history, tokens=TokenList(ds), ds=ds, standing=status)

    def _follow(self) -> None:
        took = 0.0
        while not self._stop.wait(max(_SECONDS, 9 * took)):
            begin = time.monotonic()
            try:
                self.look()
            except (TrajstoreError, OSError) as error:
                trouble = str(error)
                if trouble != self.seen.trouble:
                    self.seen = replace(self.seen, trouble=trouble)
            took = time.monotonic() - begin
