"""A curve over the rows of a run that takes the same memory however long the run becomes."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

__all__ = ["BoundedCurve"]

_BINS = 1024


class BoundedCurve:
    """Means over equal spans of rows, which double whenever there are more than `bins` of them.

    Parameters
    ----------
    bins : int
        Even; more than any screen shows.

    Attributes
    ----------
    last : float
        Value of the last row, which may be NaN or infinite; NaN without rows.
    least, largest : float
        Of all finite values that were given, not of their means; NaN without any.

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
        """Take the values of consecutive rows, in any order; finite ones make the curve."""
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
        """Means over at most `width` equal parts of all rows; NaN where no row has a value."""
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
