"""Recorded cells, held against W of the same row: W rounded to bfloat16."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from trajstore.trainers.replay.findings import Comparisons, Findings, Suspect
from trajstore.trainers.replay.recorded_rows import RecordedRow, RecordedRows
from trajstore.trainers.replay.replay_result import Finding
from trajstore.values.native_types import NATIVE_TYPES, is_nan, widen
from trajstore.values.rounding import convert

__all__ = ["CellChecks"]

Array = npt.NDArray[Any]

_KEPT = 256  # tokens of rows that are looked at one by one


class CellChecks:
    """Compares the recorded cells of one row after the other, if W is recorded, too.

    Parameters
    ----------
    rows : RecordedRows

    Attributes
    ----------
    comparisons : Comparisons
    names : set of str
        Variables to read.
    """

    def __init__(self, rows: RecordedRows) -> None:
        self.comparisons = Comparisons(rows.tokens, rows.natives)
        self.names = {"W", "cells"} if "W" in rows and "cells" in rows else set()
        self._rows = rows
        self._wrong: list[Finding] = []
        self._more = 0

    def compare(self, row: RecordedRow) -> None:
        """Compare the cells of a row."""
        if not self.names:
            return
        native, bfloat16 = self._rows.natives["W"], NATIVE_TYPES["bfloat16"]
        expected, _ = convert(np.asarray(widen(row.bits["W"], native)), native, bfloat16)
        held = row.bits["cells"]
        nan = is_nan(held, bfloat16) & is_nan(expected, bfloat16)
        expected = np.where(nan, held, expected)
        self.comparisons.add("cells", row.step, held, expected)
        wrong = held != expected
        for token in np.flatnonzero(wrong.any(axis=1)):
            if len(self._wrong) == _KEPT:
                self._more += 1
                continue
            self._wrong.append(
                Finding(
                    kind="altered",
                    variable="cells",
                    step=row.step,
                    token=int(self._rows.tokens[token]),
                    hidden=int(np.flatnonzero(wrong[token])[0]),
                    values=int(np.count_nonzero(wrong[token])),
                    others=(str(Suspect("W", row.step)),),
                )
            )

    def conclude(self, findings: Findings) -> None:
        """Add findings where no altered W is one already that accounts for it."""
        for finding in self._wrong:
            token = -1 if finding.token is None else finding.token
            if not findings.names("W", finding.step, token):
                findings.add(finding)
        findings.add_unlisted(self._more)
