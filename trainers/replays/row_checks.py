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

from trajstore.trainers.recording.device_summaries import token_norm, ulp_l1
from trajstore.trainers.recording.step_gradients import clip_coefficient
from trajstore.trainers.replays.findings import finding_at, ulp_distance
from trajstore.trainers.replays.parameter_placement import tensor_of
from trajstore.trainers.replays.recorded_rows import RecordedRow, RecordedRows
from trajstore.trainers.replays.replay_result import Compared, Finding
from trajstore.values.native_types import NATIVE_TYPES, as_bits, convert, is_nan, widen

Array = npt.NDArray[Any]

_OF_GRADIENT = "grad_token_norm"
_OF_MOTION = {"W_step_norm": token_norm, "W_ulp_l1": ulp_l1}


class RowChecks:
    """Checks of the rows of a run, with their results.

    Parameters
    ----------
    rows : RecordedRows

    Attributes
    ----------
    compared : dict of str to Compared
        Counts of different values, for each variable.
    findings : list of Finding
    summaries : set of str
        Variables that `compare_summaries` needs: recorded summaries and their inputs, if those are
        recorded.
    """

    def __init__(self, rows: RecordedRows) -> None:
        self._rows = rows
        self.compared: dict[str, Compared] = {}
        self.findings: list[Finding] = []
        self.summaries = {name for name in _OF_MOTION if name in rows}
        if self.summaries:
            self.summaries.add("W")
        if _OF_GRADIENT in rows and "grad" in rows:
            self.summaries |= {_OF_GRADIENT, "grad"}

    def compare(self, name: str, step: int, stored: Array, computed: Array) -> None:
        """Compare one variable of one step.

        Parameters
        ----------
        name : str
        step : int
        stored, computed : ndarray, (token, hidden), (token,) or ()
            Native bits.
        """
        counted = self.compared.setdefault(name, Compared())
        counted.steps += 1
        wrong = stored != computed
        if number := int(np.count_nonzero(wrong)):
            distance = ulp_distance(stored[wrong], computed[wrong], self._rows.natives[name])
            counted.differing += number
            counted.first = counted.first or self._place(step, wrong)
            counted.ulps = None if distance is None else max(distance, counted.ulps or 0)

    def _place(self, step: int, wrong: Array) -> dict[str, int | None]:
        """Return step, token and hidden of the first different value."""
        place = np.argwhere(wrong)[0].tolist() if wrong.ndim else []
        return {
            "step": step,
            "token": int(self._rows.tokens[place[0]]) if place else None,
            "hidden": place[1] if len(place) > 1 else None,
        }

    def check_skipped(self) -> None:
        """Check that each row but the first is 0 or 1, or NaN like the rate of several steps."""
        rows = self._rows
        if "skipped" not in rows:
            return
        for number, step in enumerate(rows.steps[1:].tolist(), 1):
            skipped, rate = rows.value("skipped", number), rows.value("lr", number)
            if skipped not in (0, 1) and not (np.isnan(skipped) and np.isnan(rate)):
                self.findings.append(
                    Finding(kind="invalid", variable="skipped", step=step, tokens=0)
                )

    def checked_first_row(self, row: RecordedRow, starts: Mapping[str, float]) -> RecordedRow:
        """Return the state before training, in which every element of the optimizer's is a start.

        Another state, or a gradient, gives a finding. A run that starts later is not checked.
        """
        rows = self._rows
        if not rows.from_start:
            return row
        bits = dict(row.bits)
        for name in ("grad", *starts):
            if name not in bits:
                continue
            stored, native = bits[name], rows.natives[name]
            if name == "grad":  # the same NaN everywhere
                values, counts = np.unique(stored, return_counts=True)
                wrong = stored != values[counts.argmax()]
                wrong |= ~tensor_of(stored, native).isnan().numpy()
            else:
                dtype = getattr(torch, native.name)
                start = torch.tensor(starts[name], dtype=dtype, device="cpu")
                bits[name] = np.full_like(stored, as_bits(start, native, name))
                wrong = stored != bits[name]
            if wrong.any():
                self.findings.append(
                    finding_at({name: wrong}, rows.tokens, kind="start", step=row.step)
                )
        return replace(row, bits=bits)

    def check_clipping(self, row: RecordedRow, max_grad_norm: object) -> None:
        """Compare the clipping factor with the norm of the gradients and the recorded limit."""
        rows = self._rows
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
        self.compare("clip_coef", row.step, stored, stored if agrees else allowed[0])
        if not agrees:
            names = "clip_coef, grad_norm"
            self.findings.append(
                Finding(kind="inconsistent", variable=names, step=row.step, tokens=0)
            )

    def compare_summaries(self, previous: RecordedRow, row: RecordedRow) -> None:
        """Compare those summaries of a row that were read."""
        natives = self._rows.natives
        computed: dict[str, torch.Tensor] = {}
        if _OF_GRADIENT in row.bits:
            computed[_OF_GRADIENT] = token_norm(tensor_of(row.bits["grad"], natives["grad"]))
        for name, norm in _OF_MOTION.items():
            if name in row.bits:
                before, now = (tensor_of(r.bits["W"], natives["W"]) for r in (previous, row))
                computed[name] = norm(now, before)
        self._check_derived(
            row,
            {name: as_bits(one, NATIVE_TYPES["float32"], name) for name, one in computed.items()},
        )

    def check_cells(self, row: RecordedRow) -> None:
        """Compare the cells of a row with W rounded to bfloat16, if both were read."""
        if not {"W", "cells"} <= row.bits.keys():
            return
        native, bfloat16 = self._rows.natives["W"], NATIVE_TYPES["bfloat16"]
        expected, _ = convert(np.asarray(widen(row.bits["W"], native)), native, bfloat16)
        held = row.bits["cells"]
        nan = is_nan(held, bfloat16) | is_nan(expected, bfloat16)  # one of them may be lost
        self._check_derived(row, {"cells": np.where(nan, held, expected)})

    def _check_derived(self, row: RecordedRow, computed: Mapping[str, Array]) -> None:
        """Compare variables of a row with values that were computed from others of it.

        A difference is a finding, unless the step has one: an altered W also changes its summaries.
        """
        wrong = {}
        for name, bits in computed.items():
            self.compare(name, row.step, row.bits[name], bits)
            if (row.bits[name] != bits).any():
                wrong[name] = row.bits[name] != bits
        if wrong and all(one.step != row.step for one in self.findings):
            self.findings.append(
                finding_at(wrong, self._rows.tokens, kind="inconsistent", step=row.step)
            )
