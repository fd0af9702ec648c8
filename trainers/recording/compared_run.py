"""Comparison of a repeated training with a recorded run.

A `ComparedRun` has the interface of a `RunWriter`: it provides memory for a row and takes the
filled row. So the recorder needs no change.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from trajstore.schema import STEP
from trajstore.store.writing.resumed_run import ResumedRun
from trajstore.store.writing.writer import RunWriter

Array = npt.NDArray[Any]


@dataclass(frozen=True, kw_only=True)
class RowDifference:
    """The first row in which a repeated training differs from the run.

    Attributes
    ----------
    step : int
        Step of the row.
    row : int
        Number of the row.
    variables : tuple of str
        Variables that differ.
    stored, computed : mapping of str to ndarray
        Native bits of the row and of the training, for each of them; empty if unknown.
    """

    step: int
    row: int
    variables: tuple[str, ...]
    stored: Mapping[str, Array] = field(default_factory=dict)
    computed: Mapping[str, Array] = field(default_factory=dict)


class Comparison:
    """Result of comparing a repeated training with a run.

    Parameters
    ----------
    make_writer : callable, optional
        Called with the number of the first different row; returns a writer for that row and all
        later ones. Without it, rows after the first difference are ignored.

    Attributes
    ----------
    difference : RowDifference or None
        None while every bit agrees.
    successor : RunWriter or None
        Writer of the rows from the difference on.
    agreed : int
        Rows before the difference.
    """

    def __init__(self, make_writer: Callable[[int], RunWriter] | None = None) -> None:
        self.difference: RowDifference | None = None
        self.successor: RunWriter | None = None
        self.agreed = 0
        self._make_writer = make_writer

    def differ(self, difference: RowDifference) -> RunWriter | None:
        """Store the first difference, and return the writer of the following rows."""
        self.difference = difference
        if self._make_writer is not None:
            self.successor = self._make_writer(difference.row)
        return self.successor

    def close(self) -> None:
        """Close the writer of the different rows."""
        if self.successor is not None:
            self.successor.close("interrupted")


class ComparedRun:
    """Takes rows as a `RunWriter` does, and compares each with a run, bit for bit.

    The run is read one block at a time and never changed.

    Parameters
    ----------
    stored : ResumedRun
        Run with the rows to compare.
    steps : sequence of int
        Steps of all its rows.
    rows : int
        Number of rows before the first compared row.
    comparison : Comparison

    Attributes
    ----------
    path : Path
    layout : Layout
        Layout of the run.
    rows : int
        Rows so far, including those before the comparison.
    bytes_recorded, bytes_written, seconds_waited : int, int, float
        As in `RunWriter`; nothing is stored.
    """

    notes: Sequence[Mapping[str, Any]] = ()
    bytes_written = 0
    seconds_waited = 0.0

    def __init__(
        self, stored: ResumedRun, steps: Sequence[int], rows: int, comparison: Comparison
    ) -> None:
        self.path = stored.path
        self.layout = stored.layout
        self.rows = rows
        self.comparison = comparison
        self._stored = stored
        self._steps = steps
        self._held = frozenset(steps)
        self._row: dict[str, Array] = {
            name: np.empty(array.row, array.native.bits)
            for name, array in stored.layout.arrays.items()
            if name != STEP.name
        }
        self._number = -1  # number of the block in memory
        self._block: dict[str, Array] = {}

    @property
    def committed_rows(self) -> int:
        """Rows so far."""
        return self.rows

    @property
    def bytes_recorded(self) -> int:
        """Bytes of the rows so far, in native types."""
        return self.rows * sum(place.nbytes for place in self._row.values())

    def next_rows(self, most: int) -> dict[str, Array]:
        """Return memory for one row, as `RunWriter.next_rows`: each row may have another place."""
        if self.comparison.successor is not None:
            return self.comparison.successor.next_rows(1)
        return {name: place[None] for name, place in self._row.items()}

    def commit_row(self, step: int) -> None:
        """Compare the filled row from `next_rows` with the row of `step`.

        An earlier training may have ended with an extra row; the extended run lacks it, so it is
        ignored.
        """
        if step not in self._held:
            return
        comparison = self.comparison
        if comparison.successor is not None:
            comparison.successor.commit_row(step)
        elif comparison.difference is None:
            if not (unequal := self._unequal(step)):
                comparison.agreed += 1
            elif (successor := comparison.differ(self._difference(step, unequal))) is not None:
                for name, place in successor.next_row().items():
                    place[...] = self._row[name]
                successor.commit_row(step)
        self.rows += 1

    def commit(self) -> None:
        """Store nothing."""

    def close(self, status: str = "complete") -> None:
        """Release the block; the comparison stays open for the next segment."""
        self._block = {}

    def _difference(self, step: int, unequal: tuple[str, ...]) -> RowDifference:
        at = self.rows % self.layout.block_rows
        known = [name for name in unequal if name in self._row]  # not a wrong step
        return RowDifference(
            step=step,
            row=self.rows,
            variables=unequal,
            stored={name: self._block[name][at] for name in known},
            computed={name: self._row[name].copy() for name in known},
        )

    def _unequal(self, step: int) -> tuple[str, ...]:
        """Return the variables whose bits differ from the row."""
        if self.rows >= self._stored.rows or self._steps[self.rows] != step:
            return (STEP.name,)
        number, at = divmod(self.rows, self.layout.block_rows)
        if number != self._number:
            self._block = {}  # release the old block first
            first = number * self.layout.block_rows
            rows = slice(first, min(first + self.layout.block_rows, self._stored.rows))
            self._block = {
                name: self._stored.arrays[name].native_bits(rows, self.layout.arrays[name].native)
                for name in self._row
            }
            self._number = number
        return tuple(
            name for name, place in self._row.items() if (place != self._block[name][at]).any()
        )


RowTarget = RunWriter | ComparedRun
"""Types that take the rows of a training run."""
