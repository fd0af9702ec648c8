"""Checks of single rows, in addition to the steps.

Row 0 is the state before training, ``skipped`` is 0 or 1, and the clipping factor follows from the
norm of all gradients. Summaries are computed again from the recorded arrays by the same functions,
and cells from W. Summaries detect what the steps cannot: a changed gradient whose effect on W and
the state is rounded away.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from trajstore.trainers.recording.device_norms import token_norm, ulp_l1
from trajstore.trainers.recording.step_hooks import clip_coefficient
from trajstore.trainers.replays.findings import Comparisons, finding_at
from trajstore.trainers.replays.parameter_placement import tensor_of
from trajstore.trainers.replays.recorded_rows import RecordedRow, RecordedRows
from trajstore.trainers.replays.replay_result import Finding
from trajstore.values.native_types import NATIVE_TYPES, as_bits, is_nan, widen
from trajstore.values.rounding import convert

__all__ = [
    "SummaryChecks",
    "check_cells",
    "check_clipping",
    "check_skipped",
    "checked_first_row",
]

Array = npt.NDArray[Any]

_OF_GRADIENT = "grad_token_norm"
_OF_MOTION = {"W_step_norm": token_norm, "W_ulp_l1": ulp_l1}


def check_skipped(rows: RecordedRows, findings: list[Finding]) -> None:
    """Check that every row except the first is 0 or 1, or NaN like the rate of several steps."""
    if "skipped" not in rows:
        return
    for number, step in enumerate(rows.steps[1:].tolist(), 1):
        skipped, rate = rows.value("skipped", number), rows.value("lr", number)
        if skipped not in (0, 1) and not (np.isnan(skipped) and np.isnan(rate)):
            findings.append(Finding(kind="invalid", variable="skipped", step=step, tokens=0))


def checked_first_row(
    row: RecordedRow, rows: RecordedRows, findings: list[Finding], starts: Mapping[str, float]
) -> RecordedRow:
    """Return the state before training, in which every element of the optimizer's is a start.

    Another state, or a gradient, gives a finding. A run that starts later is not checked.
    """
    if not rows.from_start:
        return row
    bits = dict(row.bits)
    for name in ("grad", *starts):
        if name not in bits:
            continue
        stored = bits[name]
        if name == "grad":  # the same NaN everywhere
            values, counts = np.unique(stored, return_counts=True)
            wrong = stored != values[counts.argmax()]
            wrong |= ~tensor_of(stored, rows.natives[name]).isnan().numpy()
        else:
            native = rows.natives[name]
            start = torch.tensor(starts[name], dtype=getattr(torch, native.name))
            bits[name] = np.full_like(stored, as_bits(start, native, name))
            wrong = stored != bits[name]
        if wrong.any():
            findings.append(finding_at({name: wrong}, rows.tokens, kind="start", step=row.step))
    return replace(row, bits=bits)


def check_clipping(
    row: RecordedRow,
    rows: RecordedRows,
    max_grad_norm: object,
    comparisons: Comparisons,
    findings: list[Finding],
) -> None:
    """Compare the clipping factor with the norm of the gradients.

    Parameters
    ----------
    row : RecordedRow
    rows : RecordedRows
    max_grad_norm : object
        Recorded limit of the norm.
    comparisons : Comparisons
    findings : list of Finding
    """
    if "grad_norm" not in rows or not isinstance(max_grad_norm, int | float):
        return
    native = rows.natives["clip_coef"]
    if rows.natives["grad_norm"] != native:
        return
    expected = clip_coefficient(
        tensor_of(rows.scalar("grad_norm", row.number), native), max_grad_norm
    )
    stored = rows.scalar("clip_coef", row.number)
    # Without clipping, the factor is 1.
    allowed = [
        as_bits(factor, native, "clip_coef") for factor in (expected, torch.ones_like(expected))
    ]
    if not max_grad_norm and stored != allowed[1]:
        return  # the loop did not name its norm, and the recorder found the factor
    agrees = any(stored == factor for factor in allowed)
    comparisons.add("clip_coef", row.step, stored, stored if agrees else allowed[0])
    if not agrees:
        variable = "clip_coef, grad_norm"
        findings.append(Finding(kind="inconsistent", variable=variable, step=row.step, tokens=0))


class SummaryChecks:
    """Compares the recorded summaries of each row.

    Parameters
    ----------
    rows : RecordedRows
    comparisons : Comparisons
    findings : list of Finding
        A finding is added if the step has none yet.

    Attributes
    ----------
    names : set of str
        Variables to read: recorded summaries and their inputs, if those are recorded.
    """

    def __init__(
        self, rows: RecordedRows, comparisons: Comparisons, findings: list[Finding]
    ) -> None:
        self._rows = rows
        self._comparisons = comparisons
        self._findings = findings
        self.names = {name for name in _OF_MOTION if name in rows}
        if self.names:
            self.names.add("W")
        if _OF_GRADIENT in rows and "grad" in rows:
            self.names |= {_OF_GRADIENT, "grad"}

    def compare(self, previous: RecordedRow, row: RecordedRow) -> None:
        """Compare those summaries of a row that were read."""
        wrong = {}
        for name, values in self._summaries(previous, row).items():
            stored, computed = row.bits[name], as_bits(values, NATIVE_TYPES["float32"], name)
            self._comparisons.add(name, row.step, stored, computed)
            if (stored != computed).any():
                wrong[name] = stored != computed
        _add_inconsistent(wrong, row, self._rows, self._findings)

    def _summaries(self, previous: RecordedRow, row: RecordedRow) -> dict[str, torch.Tensor]:
        natives, computed = self._rows.natives, {}
        if _OF_GRADIENT in row.bits:
            computed[_OF_GRADIENT] = token_norm(tensor_of(row.bits["grad"], natives["grad"]))
        for name, norm in _OF_MOTION.items():
            if name in row.bits:
                before, now = (tensor_of(r.bits["W"], natives["W"]) for r in (previous, row))
                computed[name] = norm(now, before)
        return computed


def check_cells(
    row: RecordedRow, rows: RecordedRows, comparisons: Comparisons, findings: list[Finding]
) -> None:
    """Compare the cells of a row with W rounded to bfloat16, if both were read."""
    if not {"W", "cells"} <= row.bits.keys():
        return
    native, bfloat16 = rows.natives["W"], NATIVE_TYPES["bfloat16"]
    expected, _ = convert(np.asarray(widen(row.bits["W"], native)), native, bfloat16)
    held = row.bits["cells"]
    nan = is_nan(held, bfloat16) | is_nan(expected, bfloat16)  # one of them may be lost
    expected = np.where(nan, held, expected)
    comparisons.add("cells", row.step, held, expected)
    wrong = held != expected
    _add_inconsistent({"cells": wrong} if wrong.any() else {}, row, rows, findings)


def _add_inconsistent(
    wrong: dict[str, Array], row: RecordedRow, rows: RecordedRows, findings: list[Finding]
) -> None:
    """Add a finding, unless the step has one: an altered W also changes its summaries."""
    if wrong and all(one.step != row.step for one in findings):
        findings.append(finding_at(wrong, rows.tokens, kind="inconsistent", step=row.step))
