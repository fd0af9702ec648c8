"""Recorded summaries, computed again from the recorded arrays by the functions that made them.

They see what a replay cannot: a change of a gradient, or of the initial weights, that is rounded
away in everything the optimizer makes of it.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from trainers.findings import Compared, Finding, Findings
from trainers.motion import ULP_TYPES, token_norm, ulp_l1
from trainers.rule import tensor_of
from trajstore.bits import NativeType

__all__ = ["MOTION", "SUMMARIES", "Recomputation", "norm_bits"]

Array = npt.NDArray[Any]

MOTION = ("W_step_norm", "W_ulp_l1")
SUMMARIES = ("grad_token_norm", *MOTION)

_KEPT = 256  # disagreements that are looked at one by one


@dataclass(frozen=True, kw_only=True, eq=False)
class _Mismatch:
    """A token whose summaries disagree with the arrays."""

    names: tuple[str, ...]
    step: int
    previous: int
    token: int
    recorded: dict[str, Array]
    computed: dict[str, Array]
    rows: tuple[Array, ...]


@dataclass(kw_only=True, eq=False)
class Recomputation:
    """Compares the recorded summaries of one row after the other.

    Attributes
    ----------
    natives : dict of str to NativeType
        Of ``W``, ``grad`` and the summaries that are recorded.
    tokens : ndarray of int, (token,)
    compared : dict of str to Compared
    """

    natives: dict[str, NativeType]
    tokens: Array
    compared: dict[str, Compared] = field(default_factory=dict)
    _mismatches: list[_Mismatch] = field(default_factory=list)
    _more: int = 0

    def gradient(self, step: int, gradient: Array, recorded: Array) -> None:
        """Compare ``grad_token_norm``.

        Parameters
        ----------
        step : int
        gradient : ndarray, (token, hidden)
            Bits.
        recorded : ndarray, (token,)
            Bits.
        """
        computed = norm_bits(gradient, self.natives["grad"])
        wrong = self._compare("grad_token_norm", step, recorded, computed)
        for token in np.flatnonzero(wrong):
            self._keep(
                step,
                step,
                token,
                {"grad_token_norm": recorded},
                {"grad_token_norm": computed},
                (gradient,),
            )

    def motion(
        self, step: int, previous: int, before: Array, now: Array, recorded: dict[str, Array]
    ) -> None:
        """Compare ``W_step_norm`` and ``W_ulp_l1``, whichever is recorded.

        Parameters
        ----------
        step, previous : int
            Of the row and of the one before.
        before, now : ndarray, (token, hidden)
            Bits of W.
        recorded : dict of str to ndarray, (token,)
            Bits.
        """
        computed = self._motion(before, now, recorded)
        wrong = np.zeros(len(self.tokens), bool)
        for name, bits in computed.items():
            wrong |= self._compare(name, step, recorded[name], bits)
        for token in np.flatnonzero(wrong):
            self._keep(step, previous, token, recorded, computed, (before, now))

    def conclude(self, findings: Findings, proven: set[int]) -> None:
        """Add findings for the disagreements that those there are do not account for.

        Parameters
        ----------
        findings : Findings
            Of the replay.
        proven : set of int
            Steps whose W was compared with what the step gives.
        """
        for case in self._mismatches:
            if "grad_token_norm" in case.recorded:
                if not findings.names("grad", case.step, case.token):
                    findings.add(self._finding(case, {"grad": case.step}))
                continue
            steps = (case.previous, case.step)
            if not any(findings.names("W", step, case.token) for step in steps):
                open_rows = [step for step in steps if step not in proven]
                findings.add(self._finding(case, {f"W@{step}": step for step in open_rows}))
        findings.total += self._more

    def _motion(self, before: Array, now: Array, wanted: Any) -> dict[str, Array]:
        native = self.natives["W"]
        left, right = tensor_of(now, native), tensor_of(before, native)
        computed = {}
        if "W_step_norm" in wanted:
            computed["W_step_norm"] = _bits(token_norm(left, right))
        if "W_ulp_l1" in wanted and left.dtype in ULP_TYPES:
            computed["W_ulp_l1"] = _bits(ulp_l1(left, right))
        return computed

    def _compare(self, name: str, step: int, recorded: Array, computed: Array) -> Array:
        before = self.compared.get(name, Compared())
        self.compared[name] = before.including(
            step, self.tokens, recorded, computed, self.natives[name]
        )
        wrong: Array = recorded != computed
        return wrong

    def _keep(
        self,
        step: int,
        previous: int,
        token: Any,
        recorded: dict[str, Array],
        computed: dict[str, Array],
        rows: tuple[Array, ...],
    ) -> None:
        if len(self._mismatches) == _KEPT:
            self._more += 1
            return
        self._mismatches.append(
            _Mismatch(
                names=tuple(n for n in computed if recorded[n][token] != computed[n][token]),
                step=step,
                previous=previous,
                token=int(self.tokens[token]),
                recorded={name: recorded[name][token] for name in computed},
                computed={name: bits[token] for name, bits in computed.items()},
                rows=tuple(row[token].copy() for row in rows),
            )
        )

    def _finding(self, case: _Mismatch, arrays: dict[str, int]) -> Finding:
        """Finding that names what one flipped bit explains, or else all that may be wrong."""
        found: list[tuple[str, int, int | None]] = []
        for label, step in arrays.items():
            name = label.partition("@")[0]
            positions = self._flipped(case, name, step)
            if len(positions):
                found.append((name, step, int(positions[0]) if len(positions) == 1 else None))
        if len(case.names) == 1 and (
            (case.recorded[case.names[0]] ^ case.computed[case.names[0]]).item().bit_count() == 1
        ):
            found.append((case.names[0], case.step, None))
        if not found:
            found = [(name, case.step, None) for name in case.names]
            found += [(label.partition("@")[0], step, None) for label, step in arrays.items()]
        (variable, step, hidden), *others = found
        return Finding(
            kind="altered",
            variable=variable,
            step=step,
            token=case.token,
            hidden=hidden,
            others=tuple(f"{name} at step {at}" for name, at, _ in others),
        )

    def _flipped(self, case: _Mismatch, name: str, step: int) -> Array:
        """Positions of the values of which one flipped bit explains the recorded summaries."""
        at = 0 if name == "grad" or step == case.previous else 1
        row = case.rows[at]
        width = 8 * row.itemsize
        flipped = np.repeat(row[None], len(row) * width, axis=0)
        hidden = np.repeat(np.arange(len(row)), width)
        bit = np.tile(np.arange(width, dtype=row.dtype), len(row))
        flipped[np.arange(len(flipped)), hidden] ^= row.dtype.type(1) << bit
        if name == "grad":
            computed = {"grad_token_norm": norm_bits(flipped, self.natives["grad"])}
        else:
            other = np.broadcast_to(case.rows[1 - at], flipped.shape)
            pair = (flipped, other) if at == 0 else (other, flipped)
            computed = self._motion(*pair, case.recorded)
        same = np.ones(len(flipped), bool)
        for key, bits in computed.items():
            same &= bits == case.recorded[key]
        return np.unique(hidden[same])


def norm_bits(gradient: Array, native: NativeType) -> Array:
    """Bits of the length of each row of a gradient, as it is recorded.

    Parameters
    ----------
    gradient : ndarray of ``native.bits``, (token, hidden)
    native : NativeType

    Returns
    -------
    ndarray of uint32, (token,)
    """
    return _bits(token_norm(tensor_of(gradient, native)))


def _bits(values: torch.Tensor) -> Array:
    bits: Array = values.cpu().numpy().view(np.uint32)
    return bits
