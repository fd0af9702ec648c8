"""A run followed from outside: what it has come to, as of its last commit."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Literal

import numpy as np
import xarray as xr

from trajstore.errors import FormatError, RunNotFound
from trajstore.store.metadata.object_keys import DOCUMENT
from trajstore.store.reading.open_run import open_run
from trajstore.store.reading.run_info import stored_bytes
from trajstore.store.storage.lock import is_written_to
from trajstore.store.storage.remote_path import Location, RemotePath, RunPath, location
from trajstore.values.native_types import NATIVE_TYPES
from trajstore.watching.measures import BoundedCurve, Measured, RecordingPace, RowMeasures

__all__ = ["Look", "RunFollower", "Standing"]

Standing = Literal["absent", "recording", "abandoned", "interrupted", "complete"]

_BUDGET = 64 << 20
_TRIES = 5


@dataclass(frozen=True, kw_only=True)
class Look:
    """What was seen of a run at one moment. Curves go on with the follower.

    Attributes
    ----------
    standing : str
        ``absent``: there is nothing yet; ``recording``; ``abandoned``: the root says ``recording``,
        and the process that did so is gone; ``interrupted``; ``complete``.
    rows, step : int
        That are committed, and the step of the last of them.
    steps : int or None
        Of the whole training, if the run says so.
    commit_at : float
        Time of the last commit, in seconds of the system's clock.
    commit_age : float
        Seconds since then.
    rows_per_second, remaining : float or None
        None where it is not known yet; `remaining` in seconds.
    bytes_recorded : int
        In the types that were recorded.
    bytes_on_disk : int or None
        As stored; None on a web server, which does not say it.
    curves : dict of str to BoundedCurve
        ``loss``, ``gradient POPULATION``, ``unchanged POPULATION``: those there are values of.
    gradient_of, unchanged_of : str or None
        Variables that these were made of.
    measured : int
        Rows that gradients and changes were read of.
    largest : tuple of (str, float), or None
        Token with the largest gradient in the last row that was read, and the norm.
    lr : float or None
        Of the last row.
    attributes : dict
        Of the root.
    """

    standing: Standing
    rows: int = 0
    step: int = 0
    steps: int | None = None
    commit_at: float = math.nan
    commit_age: float = math.nan
    rows_per_second: float | None = None
    remaining: float | None = None
    bytes_recorded: int = 0
    bytes_on_disk: int | None = 0
    curves: dict[str, BoundedCurve]
    gradient_of: str | None = None
    unchanged_of: str | None = None
    measured: int = 0
    largest: tuple[str, float] | None = None
    lr: float | None = None
    attributes: dict[str, Any]


class RunFollower:
    """Looks at a run again and again, and reads of it what is new. Its memory does not grow.

    Scalars are read of all rows. Gradients and weights are read within a budget for each look, the
    newest rows first, each row once.

    Parameters
    ----------
    path : path-like
        A run, local or in an object store, which need not be there yet.
    budget : int
        Bytes of gradients and weights to read at each look; a row is read in any case.
    clock : callable
        Seconds, as the file system stamps them.

    Raises
    ------
    InvalidArgument, MissingExtra
        If it is an address that cannot be read.

    Examples
    --------
    >>> look = RunFollower("gatsby.zarr").look()
    >>> look.standing, look.rows, look.step, list(look.curves)[:3]
    ('complete', 21, 20, ['loss', 'gradient dead', 'gradient live'])
    """

    def __init__(
        self,
        path: RunPath,
        *,
        budget: int = _BUDGET,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._path = location(path)
        self._budget = budget
        self._clock = clock
        self._seen: tuple[Any, ...] | None = None
        self._forget()

    def look(self) -> Look:
        """Look at the run, at its last commit.

        Raises
        ------
        FormatError
            If what is there is not a run, or damaged, also when it is opened again.
        """
        for attempt in range(_TRIES):
            try:
                return self._look()
            except RunNotFound:
                break
            except FormatError:
                # Cut or replaced while it was read: a writer needs an instant for its documents.
                self._forget()
                if attempt == _TRIES - 1:
                    raise
                time.sleep(0.1)  # which nothing tells the end of
        self._forget()
        return Look(standing="absent", curves={}, attributes={})

    def _look(self) -> Look:
        # In this order: whoever ends a recording says so in the root, and then lets go of the lock.
        written_to = is_written_to(self._path)
        seen = _state(self._path / DOCUMENT)
        if seen is None:
            raise RunNotFound(f"there is no run at {self._path}")
        if seen != self._seen:
            self._open(seen[-1] / 1e9)
            self._seen = seen
        self._measure()
        return self._made_look(seen[-1] / 1e9, abandoned=written_to is False)

    def _forget(self) -> None:
        self._seen = None
        self._runs: Any = None
        self._rows = 0
        self._last_row = b""
        self._measured = 0
        self._unread: list[range] = []
        self._largest: tuple[int, tuple[str, float]] | None = None
        self._curves: dict[str, BoundedCurve] = {}
        self._pace = RecordingPace()

    def _open(self, committed_at: float) -> None:
        ds = open_run(self._path, chunks=None)
        rows = ds.sizes["step"]
        pace = self._pace
        if rows < self._rows or ds.attrs.get("runs") != self._runs or self._is_another(ds):
            self._forget()  # rows that were seen may be others now
            self._runs = ds.attrs.get("runs")
            self._pace = pace  # which knows that it was cut
            created = _seconds(ds.attrs.get("created"))
            if created is not None and len(self._runs or ()) == 1:
                pace.start(created)
        self._ds, self._measures = ds, RowMeasures(ds) if rows else None
        self._step = int(ds["step"][-1]) if rows else 0
        pace.see(committed_at, rows, self._step)
        self._lr = float(ds["lr"][-1]) if "lr" in ds and rows else None
        if rows > self._rows:
            self._take_new(range(self._rows, rows))
        self._rows, self._last_row = rows, _scalars(ds, rows - 1)
        self._on_disk = stored_bytes(self._path)

    def _is_another(self, ds: xr.Dataset) -> bool:
        """Whether the last row that was seen is another now: it was cut, and recorded again."""
        return self._rows > 0 and _scalars(ds, self._rows - 1) != self._last_row

    def _take_new(self, rows: range) -> None:
        if "loss" in self._ds:
            values = self._ds["loss"][rows.start : rows.stop].values
            self._curves.setdefault("loss", BoundedCurve()).add(rows.start, values)
        if self._unread and self._unread[-1].stop == rows.start:
            rows = range(self._unread.pop().start, rows.stop)
        self._unread.append(rows)

    def _measure(self) -> None:
        """Read the newest rows that were not read, as many as the budget allows."""
        if self._measures is None:
            return
        left = max(self._budget // max(self._measures.row_bytes, 1), 1)
        while left and self._unread:
            unread = self._unread.pop()
            taken = unread[-left:]
            if len(taken) < len(unread):
                self._unread.append(unread[: -len(taken)])
            self._take(self._measures.read(taken))
            left -= len(taken)

    def _take(self, found: Measured) -> None:
        for kind, of in (("gradient", found.gradient), ("unchanged", found.unchanged)):
            for population, values in of.items():
                curve = self._curves.setdefault(f"{kind} {population}", BoundedCurve())
                curve.add(found.rows.start, values)
        self._measured += len(found.rows)
        row = found.rows[-1]
        if found.largest is not None and (self._largest is None or row >= self._largest[0]):
            at, norm = found.largest
            self._largest = row, (_token(self._ds, at), norm)

    def _made_look(self, committed_at: float, *, abandoned: bool) -> Look:
        attributes = dict(self._ds.attrs)
        standing = attributes.get("status", "complete")
        if standing == "recording" and abandoned:
            standing = "abandoned"
        now = self._clock()
        steps = (attributes.get("config") or {}).get("training", {}).get("steps")
        remaining = self._pace.remaining(steps, now) if standing == "recording" else None
        measures = self._measures
        return Look(
            standing=standing,
            rows=self._rows,
            step=self._step,
            steps=steps if isinstance(steps, int) else None,
            commit_at=committed_at,
            commit_age=max(now - committed_at, 0.0),
            rows_per_second=self._pace.rows_per_second,
            remaining=remaining,
            bytes_recorded=sum(map(_native_bytes, self._ds.data_vars.values())),
            bytes_on_disk=self._on_disk,
            curves=self._curves,
            gradient_of=None if measures is None else measures.gradient_of,
            unchanged_of=None if measures is None else measures.unchanged_of,
            measured=self._measured,
            largest=None if self._largest is None else self._largest[1],
            lr=self._lr,
            attributes=attributes,
        )


def _state(document: Location) -> tuple[Any, ...] | None:
    """What changes with every commit, its time at the end; None if there is no such object."""
    if isinstance(document, RemotePath):
        facts = document.stat()
        return None if facts is None else (facts["e_tag"], facts["last_modified"].timestamp() * 1e9)
    try:
        found = os.stat(document)
    except (FileNotFoundError, NotADirectoryError):
        return None
    return found.st_ino, found.st_size, found.st_mtime_ns


def _scalars(ds: xr.Dataset, row: int) -> bytes:
    """Step and loss of a row, by which it is known again."""
    names = [name for name in ("step", "loss") if name in ds and row >= 0]
    return b"".join(ds[name][row].values.tobytes() for name in names)


def _seconds(text: Any) -> float | None:
    try:
        return datetime.fromisoformat(text).timestamp()
    except (TypeError, ValueError):
        return None


def _native_bytes(da: xr.DataArray) -> int:
    native = NATIVE_TYPES.get(da.attrs.get("native_dtype", ""))
    return da.size * (native.itemsize if native is not None else da.dtype.itemsize)


def _token(ds: xr.Dataset, at: int) -> str:
    """How a token reads, and its id."""
    number = int(ds["token"][at])
    if "token_text" not in ds:
        return str(number)
    return f"{str(np.asarray(ds['token_text'][at].values))!r} ({number})"
