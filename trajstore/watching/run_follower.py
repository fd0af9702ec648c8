"""The state of a run at its last commit, read while another process records it."""

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

from trajstore.errors import FormatError, RunNotFound, TrajstoreError
from trajstore.store.metadata.object_keys import METADATA_KEY
from trajstore.store.reading.open_run import open_run
from trajstore.store.reading.run_info import stored_bytes
from trajstore.store.reading.run_settings import attribute
from trajstore.store.storage.lock import is_written_to
from trajstore.store.storage.remote_path import Location, RemotePath, RunPath, location
from trajstore.values.native_types import NATIVE_TYPES
from trajstore.watching.measures import BoundedCurve, Measured, RecordingPace, RowMeasures

Status = Literal["absent", "recording", "abandoned", "interrupted", "complete"]

_BUDGET = 64 << 20
_TRIES = 5


@dataclass(frozen=True, kw_only=True)
class Look:
    """State of a run at one moment. The follower continues to extend the curves.

    Attributes
    ----------
    status : str
        ``absent``: the run does not exist yet; ``recording``; ``abandoned``: the run is marked
        ``recording``, but its process died; ``interrupted``; ``complete``.
    rows, step : int
        Committed rows, and the step of the last one.
    steps : int or None
        Steps of the whole training, if recorded.
    commit_at : float
        Time of the last commit, in seconds of the system clock.
    commit_age : float
        Seconds since the last commit.
    rows_per_second, remaining : float or None
        None if unknown; `remaining` in seconds.
    bytes_recorded : int
        Uncompressed size in the native types.
    bytes_on_disk : int or None
        Stored size; None for a web server, which does not report it.
    curves : dict of str to BoundedCurve
        ``loss``, ``gradient POPULATION`` and ``unchanged POPULATION``, as far as recorded.
    gradient_of, unchanged_of : str or None
        Variables that these curves are computed from.
    measured : int
        Rows whose gradients and changes were read.
    largest : tuple of (str, float), or None
        Token with the largest gradient in the last row read, and its norm.
    lr : float or None
        Learning rate of the last row.
    attributes : dict
        Attributes of the root group.
    """

    status: Status
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
    """Reads the state of a run repeatedly, in bounded memory. Each call reads only new rows.

    `look` reads scalars of all rows. It reads gradients and weights within a budget per call, the
    newest rows first, each row once.

    Parameters
    ----------
    path : path-like
        A run, local or in an object store, which may not exist yet.
    budget : int
        Bytes of gradients and weights to read per call, at least one row.
    clock : callable
        Clock in seconds that matches the timestamps of the file system.

    Raises
    ------
    InvalidArgument, MissingExtra
        If the address cannot be read.

    Examples
    --------
    >>> look = RunFollower("gatsby.zarr").look()
    >>> look.status, look.rows, look.step, list(look.curves)[:3]
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
        """Read the state of the run at its last commit.

        Raises
        ------
        FormatError
            If the path is not a run, or the run is damaged, also after retries.
        """
        for attempt in range(_TRIES):
            try:
                return self._look()
            except RunNotFound:
                break
            except (
                ValueError,
                RuntimeError,
            ) as error:  # zarr's, of a coordinate, are no FormatError
                # The run may have been cut or replaced during the read. The writer needs a moment.
                self._forget()
                if attempt == _TRIES - 1 and isinstance(error, TrajstoreError):
                    raise
                if attempt == _TRIES - 1:
                    raise FormatError(f"{self._path} cannot be read: {error}") from error
                time.sleep(0.1)  # no event marks the end of a replacement
        self._forget()
        return Look(status="absent", curves={}, attributes={})

    def _look(self) -> Look:
        # Read the lock first: a writer marks the end in the root before it releases the lock.
        written_to = is_written_to(self._path)
        seen = _state(self._path / METADATA_KEY)
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
            self._forget()  # the rows read before may have been replaced
            self._runs = ds.attrs.get("runs")
            self._pace = pace  # it accounts for the cut
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
        """True if the last row read before was cut and recorded again."""
        return self._rows > 0 and _scalars(ds, self._rows - 1) != self._last_row

    def _take_new(self, rows: range) -> None:
        if "loss" in self._ds:
            values = self._ds["loss"][rows.start : rows.stop].values
            self._curves.setdefault("loss", BoundedCurve()).add(rows.start, values)
        if self._unread and self._unread[-1].stop == rows.start:
            rows = range(self._unread.pop().start, rows.stop)
        self._unread.append(rows)

    def _measure(self) -> None:
        """Read the newest unread rows within the budget."""
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
        status = attributes.get("status", "complete")
        if status == "recording" and abandoned:
            status = "abandoned"
        now = self._clock()
        steps = attribute(attributes, "config", "training", "steps")
        remaining = self._pace.remaining(steps, now) if status == "recording" else None
        measures = self._measures
        return Look(
            status=status,
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


def _state(metadata: Location) -> tuple[Any, ...] | None:
    """Values that change with every commit, time last; None if the object does not exist."""
    if isinstance(metadata, RemotePath):
        facts = metadata.stat()
        return None if facts is None else (facts["e_tag"], facts["last_modified"].timestamp() * 1e9)
    try:
        found = os.stat(metadata)
    except (FileNotFoundError, NotADirectoryError):
        return None
    return found.st_ino, found.st_size, found.st_mtime_ns


def _scalars(ds: xr.Dataset, row: int) -> bytes:
    """Bytes of step and loss of a row, which identify it."""
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
    """Text of a token and its id."""
    number = int(ds["token"][at])
    if "token_text" not in ds:
        return str(number)
    return f"{str(np.asarray(ds['token_text'][at].values))!r} ({number})"
