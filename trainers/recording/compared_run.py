"""Rows that are compared with those of a run, in place of being stored: a training done again.

What records a training sees no difference: a `ComparedRun` gives out the places of a row and takes
the row when it is filled, as a `RunWriter` does.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from trajstore.schema import STEP
from trajstore.store.writing.resumed_run import ResumedRun
from trajstore.store.writing.writer import RunWriter

__all__ = ["ComparedRun", "Comparison", "RowDifference", "RowTarget"]

Array = npt.NDArray[Any]


@dataclass(frozen=True, kw_only=True)
class RowDifference:
    """The first row in which a training that is done again is not the recorded one.

    Attributes
    ----------
    step : int
        Of the row.
    row : int
        Its number.
    variables : tuple of str
        Those that differ in it.
    """

    step: int
    row: int
    variables: tuple[str, ...]


class Comparison:
    """What a training that is done again is to find out about a run.

    Parameters
    ----------
    make_writer : callable, optional
        Called with the number of the first row that differs; makes the writer that takes that row
        and all after it. Without it, rows after the first difference are passed over.

    Attributes
    ----------
    difference : RowDifference or None
        None as long as every bit agrees.
    successor : RunWriter or None
        That takes the rows from there on.
    """

    def __init__(self, make_writer: Callable[[int], RunWriter] | None = None) -> None:
        self.difference: RowDifference | None = None
        self.successor: RunWriter | None = None
        self._make_writer = make_writer

    def differ(self, difference: RowDifference) -> RunWriter | None:
        """Note the first difference, and make what takes the rows from there on."""
        self.difference = difference
        if self._make_writer is not None:
            self.successor = self._make_writer(difference.row)
        return self.successor

    def close(self) -> None:
        """Close what took the rows that differed."""
        if self.successor is not None:
            self.successor.close("interrupted")


class ComparedRun:
    """Takes rows as a `RunWriter` does, and compares each with that of a run, bit for bit.

    The run is only read, a block at a time.

    Parameters
    ----------
    stored : ResumedRun
        With all rows that are to be compared.
    steps : sequence of int
        Of all its rows.
    rows : int
        Rows that come before the first one that is taken.
    comparison : Comparison

    Attributes
    ----------
    path : Path
    layout : Layout
        Of the run.
    rows : int
        Rows until now, those included that came before.
    bytes_recorded, bytes_written, seconds_waited : int, int, float
        As of a `RunWriter`; nothing is stored.
    """

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
        self._row_bytes = sum(place.nbytes for place in self._row.values())
        self._number = -1  # of the block that is in memory
        self._block: dict[str, Array] = {}

    @property
    def committed_rows(self) -> int:
        """Rows until now."""
        return self.rows

    @property
    def bytes_recorded(self) -> int:
        """Bytes of the rows until now, in native types."""
        return self.rows * self._row_bytes

    def next_row(self) -> dict[str, Array]:
        """Places of the next row's values, as `RunWriter.next_row`."""
        if self.comparison.successor is not None:
            return self.comparison.successor.next_row()
        return self._row

    def commit_row(self, step: int) -> None:
        """Compare the row that `next_row` gave out, every variable filled, as that of `step`.

        A row that ended the run before it was extended is not in the run; it is passed over.
        """
        if step not in self._held:
            return
        comparison = self.comparison
        if comparison.successor is not None:
            comparison.successor.commit_row(step)
        elif comparison.difference is None and (unequal := self._unequal(step)):
            found = RowDifference(step=step, row=self.rows, variables=unequal)
            if (successor := comparison.differ(found)) is not None:
                self._hand_on(step, successor)
        self.rows += 1

    def close(self, status: str = "complete") -> None:
        """Let go of the run; the comparison stays open, for the stretch that follows."""
        self._block = {}

    def _hand_on(self, step: int, successor: RunWriter) -> None:
        """Have another take the row that was compared."""
        for name, place in successor.next_row().items():
            place[...] = self._row[name]
        successor.commit_row(step)

    def _unequal(self, step: int) -> tuple[str, ...]:
        """Variables whose bits are not those of the row."""
        if self.rows >= self._stored.rows or self._steps[self.rows] != step:
            return (STEP.name,)
        number, at = divmod(self.rows, self.layout.block_rows)
        if number != self._number:
            self._load(number)
        return tuple(
            name for name, place in self._row.items() if (place != self._block[name][at]).any()
        )

    def _load(self, number: int) -> None:
        self._block = {}  # not two at once
        first = number * self.layout.block_rows
        rows = slice(first, min(first + self.layout.block_rows, self._stored.rows))
        self._block = {
            name: self._stored.arrays[name].native_bits(rows, self.layout.arrays[name].native)
            for name in self._row
        }
        self._number = number


RowTarget = RunWriter | ComparedRun
"""What takes the rows of a training."""
