"""Values that a follower collects: bounded curves, the recording rate, numbers per row."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import xarray as xr

from trajstore.values.token_norms import vector_norm

Array = npt.NDArray[np.float64]

_BINS = 1024
_WINDOW = 120.0  # seconds: several commits, and short compared with a training run
_AT_ONCE = 16 << 20  # bytes of rows that are read together


class BoundedCurve:
    """Means over equal spans of rows. The spans double when there are more than `bins`.

    Parameters
    ----------
    bins : int
        Even number, larger than the width of any screen.

    Attributes
    ----------
    last : float
        Value of the last row, possibly NaN or infinite; NaN without rows.
    least, largest : float
        Extremes of all finite values, not of the means; NaN without finite values.

    Examples
    --------
    >>> curve = BoundedCurve(bins=4)
    >>> curve.add(0, np.arange(6.0))
    >>> curve.means(3).tolist(), curve.last
    ([0.5, 2.5, 4.5], 5.0)
    """

    def __init__(self, bins: int = _BINS) -> None:
        self.last = self.least = self.largest = float("nan")
        self._stop = 0
        self._span = 1
        self._sums = np.zeros(bins)
        self._counts = np.zeros(bins, np.int64)

    def add(self, first_row: int, values: npt.ArrayLike) -> None:
        """Add values of consecutive rows, in any order; only finite values enter the means."""
        numbers = np.asarray(values, np.float64)
        rows = first_row + np.flatnonzero(np.isfinite(numbers))
        if numbers.size and first_row + numbers.size > self._stop:
            self._stop, self.last = first_row + numbers.size, float(numbers[-1])
        while self._stop > self._span * self._sums.size:
            self._double()
        if not rows.size:
            return
        kept = numbers[rows - first_row]
        np.add.at(self._sums, rows // self._span, kept)
        np.add.at(self._counts, rows // self._span, 1)
        self.least = float(np.fmin(self.least, kept.min()))
        self.largest = float(np.fmax(self.largest, kept.max()))

    def means(self, width: int) -> npt.NDArray[np.float64]:
        """Means over at most `width` equal parts of all rows; NaN for a part without values."""
        used = -(-self._stop // self._span)
        parts = min(width, used)
        if parts == 0:
            return np.empty(0)
        starts = np.arange(parts) * used // parts
        counts = np.add.reduceat(self._counts[:used], starts)
        sums = np.add.reduceat(self._sums[:used], starts)
        means = np.full(parts, np.nan)
        np.divide(sums, counts, out=means, where=counts > 0)
        return means

    def _double(self) -> None:
        half = self._sums.size // 2
        for held in (self._sums, self._counts):
            held[:half] = held.reshape(-1, 2).sum(1)
            held[half:] = 0
        self._span *= 2


@dataclass(frozen=True, kw_only=True)
class _Commit:
    at: float
    rows: int
    step: int


class RecordingPace:
    """Rows and steps per second over the last two minutes of commits.

    Before a second commit, or if the run no longer grows, the rate is the average since the run
    was created. A resumed run has no such average, because the length of the pause is unknown.
    """

    def __init__(self) -> None:
        self._commits: deque[_Commit] = deque()
        self._created = False  # True if the first entry is the creation, not a commit

    def see(self, at: float, rows: int, step: int) -> None:
        """Add a commit: its time in seconds, and the rows and step that it made visible."""
        if self._commits and rows < self._commits[-1].rows:
            self._commits.clear()  # the run was cut
            self._created = False
        elif self._commits and rows == self._commits[-1].rows:
            return
        elif self._created and len(self._commits) == 2:
            self._commits.popleft()  # long before the first step, possibly
            self._created = False
        self._commits.append(_Commit(at=at, rows=rows, step=step))
        while len(self._commits) > 2 and self._commits[1].at < at - _WINDOW:
            self._commits.popleft()

    def start(self, at: float) -> None:
        """Add the time at which the run was created, without rows."""
        if not self._commits:
            self._commits.append(_Commit(at=at, rows=0, step=0))
            self._created = True

    @property
    def rows_per_second(self) -> float | None:
        """Rows per second; None if unknown."""
        return self._rate("rows")

    def remaining(self, total: int | None, now: float) -> float | None:
        """Seconds until step `total`; None if `total` or the rate is unknown."""
        steps = self._rate("step")
        if total is None or not steps:
            return None
        last = self._commits[-1]
        return max((total - last.step) / steps - (now - last.at), 0.0)

    def _rate(self, what: str) -> float | None:
        if len(self._commits) < 2:
            return None
        first, last = self._commits[0], self._commits[-1]
        seconds = last.at - first.at
        if seconds <= 0:
            return None
        grown: int = getattr(last, what) - getattr(first, what)
        return grown / seconds


@dataclass(frozen=True, kw_only=True)
class Measured:
    """Measures of consecutive rows, by population.

    Attributes
    ----------
    rows : range
    gradient : dict of str to ndarray, (row,)
        Mean L2 norm of the gradients over the tokens, in nat.
    unchanged : dict of str to ndarray, (row,)
        Fraction of tokens whose vector equals that of the previous row, bit for bit.
    largest : tuple of (int, float), or None
        Position and norm of the token with the largest gradient in the last row.
    """

    rows: range
    gradient: dict[str, Array]
    unchanged: dict[str, Array]
    largest: tuple[int, float] | None


class RowMeasures:
    """Measures of a run and the variables that they are computed from.

    Recorded summaries per token are read instead of the matrices.

    Parameters
    ----------
    ds : Dataset
        A run, opened without dask.

    Attributes
    ----------
    gradient_of, unchanged_of : str or None
        Variable that the measure is computed from; None if the run has none.
    row_bytes : int
        Bytes of memory per row.
    """

    def __init__(self, ds: xr.Dataset) -> None:
        self._ds = ds
        self.gradient_of = _first(ds, "grad_token_norm", "grad")
        self.unchanged_of = _first(ds, "W_ulp_l1", "W_step_norm", "W", "cells")
        names = [name for name in (self.gradient_of, self.unchanged_of) if name is not None]
        self.row_bytes = sum(ds[name].dtype.itemsize * ds[name][0].size for name in names)
        self._tokens = _populations(ds)

    def read(self, rows: range) -> Measured:
        """Measure consecutive rows in bounded memory.

        Raises
        ------
        FormatError
            If a block is missing or damaged, for example because the run was just cut.
        """
        gradient: dict[str, list[float]] = {name: [] for name in self._tokens}
        unchanged: dict[str, list[float]] = {name: [] for name in self._tokens}
        norms = None
        for norms in self._norms(rows):
            for name, those in self._tokens.items():
                gradient[name].append(float(norms[those].mean()))
        for unmoved in self._unmoved(rows):
            for name, those in self._tokens.items():
                unchanged[name].append(np.nan if unmoved is None else float(unmoved[those].mean()))
        return Measured(
            rows=rows,
            gradient={name: np.array(values) for name, values in gradient.items() if values},
            unchanged={name: np.array(values) for name, values in unchanged.items() if values},
            largest=None if norms is None else _largest(norms),
        )

    def _norms(self, rows: range) -> Iterator[Array]:
        if self.gradient_of is None:
            return
        for values in self._blocks(self.gradient_of, rows):
            yield from values if values.ndim == 2 else (vector_norm(row) for row in values)

    def _unmoved(self, rows: range) -> Iterator[npt.NDArray[np.bool_] | None]:
        """Per row, True for each unchanged token; None for row 0, which has no previous row."""
        name = self.unchanged_of
        if name is None:
            return
        if rows.start == 0:
            yield None
        if name not in ("W", "cells"):
            for values in self._blocks(name, range(max(rows.start, 1), rows.stop)):
                yield from values == 0
            return
        before = None
        for values in self._blocks(name, range(max(rows.start - 1, 0), rows.stop)):
            for bits in values.view(f"u{values.dtype.itemsize}"):
                if before is not None:
                    yield (bits == before).all(-1)
                before = bits

    def _blocks(self, name: str, rows: range) -> Iterator[npt.NDArray[np.float32]]:
        """Values of the rows in blocks of at most `_AT_ONCE` bytes, or of a single row."""
        da = self._ds[name]
        some = max(_AT_ONCE // (da.dtype.itemsize * max(da[0].size, 1)), 1)
        for start in range(rows.start, rows.stop, some):
            yield da[start : min(start + some, rows.stop)].values


def _first(ds: xr.Dataset, *names: str) -> str | None:
    return next((name for name in names if name in ds), None)


def _populations(ds: xr.Dataset) -> dict[str, npt.NDArray[np.intp]]:
    """Token positions of each population that is not empty."""
    if "is_dead" not in ds:
        return {"all": np.arange(ds.sizes["token"])}
    dead = ds["is_dead"].values
    found = {"dead": np.flatnonzero(dead), "live": np.flatnonzero(~dead)}
    return {name: those for name, those in found.items() if those.size}


def _largest(norms: Array) -> tuple[int, float] | None:
    if not np.isfinite(norms).any():
        return None
    at = int(np.nanargmax(norms))
    return at, float(norms[at])
