"""Recorded summaries, computed again from the recorded arrays by the functions that made them.

They see what a replay cannot: a change of a gradient, or of the initial weights, that is rounded
away in everything the optimizer makes of it.
"""

from __future__ import annotations

from collections.abc import Container
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from trajstore.trainers.recording.device_norms import token_norm, ulp_l1
from trajstore.trainers.replay.findings import Comparisons, Findings, Suspect
from trajstore.trainers.replay.parameter_placement import tensor_of
from trajstore.trainers.replay.recorded_rows import RecordedRow, RecordedRows
from trajstore.trainers.replay.replay_result import Finding
from trajstore.values.native_types import NATIVE_TYPES, NativeType, as_bits

__all__ = ["SummaryChecks", "token_norm_bits"]

Array = npt.NDArray[Any]

_OF_GRADIENT = "grad_token_norm"
_OF_MOTION = ("W_step_norm", "W_ulp_l1")

_KEPT = 256  # disagreements that are looked at one by one


@dataclass(frozen=True, kw_only=True, eq=False)
class _Disagreement:
    """A token whose summaries disagree with the arrays they were made of.

    Attributes
    ----------
    step : int
    token : int
        Vocabulary id.
    recorded, computed : dict of str to unsigned integer
        Bits of its summaries.
    arrays : dict of Suspect to ndarray, (hidden,)
        Bits of what they were made of.
    """

    step: int
    token: int
    recorded: dict[str, Any]
    computed: dict[str, Any]
    arrays: dict[Suspect, Array]

    @property
    def wrong(self) -> dict[str, int]:
        """Bits in which each summary differs, where it does."""
        apart = {name: int(bits ^ self.recorded[name]) for name, bits in self.computed.items()}
        return {name: bits for name, bits in apart.items() if bits}


class SummaryChecks:
    """Compares the recorded summaries of one row after the other.

    Parameters
    ----------
    rows : RecordedRows

    Attributes
    ----------
    comparisons : Comparisons
    """

    def __init__(self, rows: RecordedRows) -> None:
        self.comparisons = Comparisons(rows.tokens, rows.natives)
        self._rows = rows
        self._disagreements: list[_Disagreement] = []
        self._more = 0

    @property
    def names(self) -> set[str]:
        """Variables to read: recorded summaries, and what they are made of, if that is recorded."""
        names = {name for name in _OF_MOTION if name in self._rows}
        if names:
            names.add("W")
        if _OF_GRADIENT in self._rows and "grad" in self._rows:
            names |= {_OF_GRADIENT, "grad"}
        return names

    def compare(self, previous: RecordedRow, row: RecordedRow) -> None:
        """Compare the summaries of a row, as far as they were read."""
        bits = row.bits
        if _OF_GRADIENT in bits:
            norms = {_OF_GRADIENT: bits[_OF_GRADIENT]}
            self._compare(row.step, norms, {Suspect("grad", row.step): bits["grad"]})
        motion = {name: bits[name] for name in _OF_MOTION if name in bits}
        if motion:
            before, now = Suspect("W", previous.step), Suspect("W", row.step)
            self._compare(row.step, motion, {before: previous.bits["W"], now: bits["W"]})

    def conclude(self, findings: Findings, proven: Container[int]) -> None:
        """Add findings for the disagreements that those there are do not account for.

        Parameters
        ----------
        findings : Findings
            Of the replay.
        proven : container of int
            Steps whose W was compared with what the step gives.
        """
        for case in self._disagreements:
            if any(findings.names(*suspect, case.token) for suspect in case.arrays):
                continue
            suspects = [s for s in case.arrays if s.variable == "grad" or s.step not in proven]
            findings.add(self._finding(case, suspects))
        findings.add_unlisted(self._more)

    def _compare(self, step: int, recorded: dict[str, Array], arrays: dict[Suspect, Array]) -> None:
        computed = self._summaries(recorded, *arrays.values())
        wrong = np.zeros(len(self._rows.tokens), bool)
        for name, bits in computed.items():
            self.comparisons.add(name, step, recorded[name], bits)
            wrong |= recorded[name] != bits
        for token in np.flatnonzero(wrong):
            if len(self._disagreements) == _KEPT:
                self._more += 1
                continue
            self._disagreements.append(
                _Disagreement(
                    step=step,
                    token=int(self._rows.tokens[token]),
                    recorded={name: recorded[name][token] for name in computed},
                    computed={name: bits[token] for name, bits in computed.items()},
                    arrays={suspect: bits[token].copy() for suspect, bits in arrays.items()},
                )
            )

    def _summaries(self, names: Container[str], *arrays: Array) -> dict[str, Array]:
        """Bits of the summaries of a gradient, or of W before and after a step."""
        natives = self._rows.natives
        if _OF_GRADIENT in names:
            (gradient,) = arrays
            return {_OF_GRADIENT: token_norm_bits(gradient, natives["grad"])}
        before, now = (tensor_of(bits, natives["W"]) for bits in arrays)
        computed = {}
        if "W_step_norm" in names:
            computed["W_step_norm"] = _float32_bits(token_norm(now, before))
        if "W_ulp_l1" in names:
            computed["W_ulp_l1"] = _float32_bits(ulp_l1(now, before))
        return computed

    def _finding(self, case: _Disagreement, suspects: list[Suspect]) -> Finding:
        """Finding that names what one flipped bit explains, or else all that may be wrong."""
        found: list[tuple[Suspect, int | None]] = []
        for suspect in suspects:
            positions = self._flipped(case, suspect)
            if len(positions):
                found.append((suspect, int(positions[0]) if len(positions) == 1 else None))
        summaries = [Suspect(name, case.step) for name in case.wrong]
        if [bits.bit_count() for bits in case.wrong.values()] == [1]:
            found.append((summaries[0], None))
        if not found:
            found = [(suspect, None) for suspect in (*summaries, *suspects)]
        ((variable, step), hidden), *others = found
        return Finding(
            kind="altered",
            variable=variable,
            step=step,
            token=case.token,
            hidden=hidden,
            others=tuple(str(suspect) for suspect, _ in others),
        )

    def _flipped(self, case: _Disagreement, suspect: Suspect) -> Array:
        """Positions of the values of which one flipped bit explains the recorded summaries."""
        row = case.arrays[suspect]
        width = 8 * row.itemsize
        flipped = np.repeat(row[None], len(row) * width, axis=0)
        hidden = np.repeat(np.arange(len(row)), width)
        bit = np.tile(np.arange(width, dtype=row.dtype), len(row))
        flipped[np.arange(len(flipped)), hidden] ^= row.dtype.type(1) << bit
        arrays = {other: np.broadcast_to(b, flipped.shape) for other, b in case.arrays.items()}
        computed = self._summaries(case.recorded, *(arrays | {suspect: flipped}).values())
        same = np.ones(len(flipped), bool)
        for name, bits in computed.items():
            same &= bits == case.recorded[name]
        return np.unique(hidden[same])


def token_norm_bits(gradient: Array, native: NativeType) -> Array:
    """Bits of the length of each row of a gradient, as it is recorded.

    Parameters
    ----------
    gradient : ndarray of ``native.bits``, (token, hidden)
    native : NativeType

    Returns
    -------
    ndarray of uint32, (token,)
    """
    return _float32_bits(token_norm(tensor_of(gradient, native)))


def _float32_bits(values: torch.Tensor) -> Array:
    return as_bits(values, NATIVE_TYPES["float32"], "summary")
