"""W and the moments, computed from the gradient: a key row, and corrections of the rule's bits.

The arrays of a *unit* have the same blocks, parts and inner chunks. A chunk of the kind
``computed`` holds its first row. For every further row it holds the recorded bits XOR the result of
the optimizer's rule, applied to the recorded row before and the gradient. If they agree, it is 0.
"""

from __future__ import annotations

import json
import math
import os
import threading
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, Self

import numpy as np
import numpy.typing as npt

from trajstore.codec.adam_loop import run_adam_loop
from trajstore.codec.codec_chain import Chain
from trajstore.codec.scratch_memory import scratch
from trajstore.strict_json import canonical
from trajstore.values.native_types import widen
from trajstore.values.optimizer_rule import LARGEST, OptimizerRule, Rates
from trajstore.values.rounding import check_subnormals, result_bits

__all__ = [
    "GRADIENT",
    "RATES",
    "ComputedUnit",
    "cache",
    "computed_chains",
    "unit_of",
    "windows_of",
]

Array = npt.NDArray[Any]

GRADIENT = "grad"
RATES = ("step", "lr", "clip_coef", "skipped")
"""Per-step numbers that a rule uses; the last two if they are recorded."""

_CACHED = 64 << 20  # bytes of computed rows in the cache of a process


@dataclass(frozen=True, kw_only=True)
class ComputedUnit:
    """Arrays that are computed together, and the arrays they are computed from.

    Attributes
    ----------
    rule : OptimizerRule
    chains : dict of str to Chain
        Chain of each array of the unit: the computed ones, the gradient, and the rates.
    """

    rule: OptimizerRule
    chains: Mapping[str, Chain]

    @classmethod
    def of(cls, text: str) -> Self:
        """The unit that `Chain.rule` describes.

        Raises
        ------
        ValueError
            If the text does not describe a unit.
        """
        facts = json.loads(text)
        try:
            rule = OptimizerRule.from_facts(facts["optimizer"])
            chains = {
                name: Chain.from_facts(
                    {**own, "rule": facts} if own.get("kind") == "computed" else own
                )
                for name, own in facts["arrays"].items()
            }
        except (KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"got {text}, expected the description of a rule") from error
        if not {*rule.state, GRADIENT, "step", "lr"} <= chains.keys() <= {
            *rule.state, GRADIENT, *RATES,
        }:  # fmt: skip
            raise ValueError(
                f"got a rule over {', '.join(chains)}, expected {', '.join(rule.state)}, "
                f"{GRADIENT}, step and lr"
            )
        return cls(rule=rule, chains=chains)

    @property
    def matrices(self) -> tuple[str, ...]:
        """Names of the arrays with the same chunks: the computed ones, and the gradient."""
        return (*self.rule.state, GRADIENT)

    @property
    def rates(self) -> tuple[str, ...]:
        """Names of the per-step numbers."""
        return tuple(name for name in RATES if name in self.chains)

    def encode(
        self,
        bits: Mapping[str, Array],
        rates: Mapping[str, Array],
        skips: int,
        shape: tuple[int, ...],
    ) -> dict[str, bytes]:
        """Encode one chunk of each computed array.

        Parameters
        ----------
        bits : mapping of str to ndarray of native bits, (row, token, hidden)
            Present rows of each of `matrices`.
        rates : mapping of str to ndarray, (row,)
            Values of each of `rates`.
        skips : int
            Number of skipped steps before the first row.
        shape : tuple of int
            Shape of a whole chunk.

        Returns
        -------
        dict of str to bytes
        """
        inside = tuple(slice(length) for length in bits[GRADIENT].shape)
        corrections: dict[str, Array] = {}
        places: dict[str, Array] = {}
        for name in self.rule.state:
            made = scratch.array(f"corrections of {name}", shape, bits[name].dtype)
            if bits[name].shape != shape:
                made.fill(0)
            corrections[name], places[name] = made, made[inside]
            places[name][0] = bits[name][0]
        self._follow(bits, places, self.rule.state, self._rates(rates, skips))
        return {
            name: self.chains[name].encode_corrections(made, bits[name], skips)
            for name, made in corrections.items()
        }

    def compute(
        self,
        held: Mapping[str, tuple[int | None, Array]],
        grad: Array,
        rates: Mapping[str, Array],
    ) -> dict[str, Array]:
        """Rows of the computed arrays.

        Parameters
        ----------
        held : mapping of str to (int or None, ndarray)
            Result of `Decoder.stored_form` for each computed array.
        grad : ndarray of native bits, (row, token, hidden)
        rates : mapping of str to ndarray, (row,)

        Returns
        -------
        dict of str to ndarray of native bits, (row, token, hidden)
        """
        rows = {name: bits for name, (_, bits) in held.items()}
        computed = {name: skips for name, (skips, _) in held.items() if skips is not None}
        skips = {*computed.values()}
        if len(skips) != 1:
            raise ValueError(f"{', '.join(computed)} differ in the number of skipped steps")
        numbers = self._rates(rates, skips.pop())
        self._follow({**rows, GRADIENT: grad}, rows, list(computed), numbers)
        return rows

    def _follow(
        self,
        rows: Mapping[str, Array],
        out: Mapping[str, Array],
        computed: Sequence[str],
        rates: Sequence[Rates | None],
    ) -> None:
        """Compute each row after the first XOR the rule's bits. In place, this restores rows.

        Parameters
        ----------
        rows : mapping of str to ndarray of native bits, (row, …)
            Rows of each of `matrices`.
        out : mapping of str to ndarray
            Results for each computed array; may be `rows`.
        computed : sequence of str
        rates : sequence of Rates or None
            Numbers of the step of each row; None if no step was taken.
        """
        check_subnormals()
        natives = {name: self.chains[name].native for name in self.matrices}
        if run_adam_loop(self.rule, rows, out, computed, natives, rates):
            return
        names = {name: native.name for name, native in natives.items()}
        state = self.rule.state
        before = {name: widen(rows[name][0], natives[name]) for name in state}
        if self.rule.amsgrad:
            before[LARGEST] = before["exp_avg_sq"]
        for row in range(1, len(rates)):
            made: Mapping[str, Array] = before
            rate = rates[row]
            if rate is not None:
                grad = widen(rows[GRADIENT][row], natives[GRADIENT])
                made = self.rule.next_row(before, grad, names, rate)
            for name in computed:
                bits = result_bits(made[name], natives[name])
                np.bitwise_xor(rows[name][row], bits, out=out[name][row])
            largest = before.get(LARGEST)
            before = {name: widen(rows[name][row], natives[name]) for name in state}
            if largest is not None:
                before[LARGEST] = np.maximum(largest, before["exp_avg_sq"])

    @staticmethod
    def _rates(rates: Mapping[str, Array], skips: int) -> list[Rates | None]:
        """Numbers of each step; None if no step was taken, or its learning rate is unknown."""
        made: list[Rates | None] = []
        for row, (step, lr) in enumerate(zip(rates["step"], rates["lr"], strict=True)):
            skipped = "skipped" in rates and bool(rates["skipped"][row] == 1)
            skips += skipped
            clip = float(rates["clip_coef"][row]) if "clip_coef" in rates else 1.0
            taken = not skipped and int(step) > skips and math.isfinite(lr)
            numbers = Rates(step=int(step) - skips, lr=float(lr), clip=clip)
            made.append(numbers if taken else None)
        return made


@lru_cache(maxsize=64)
def unit_of(text: str) -> ComputedUnit:
    """The unit that `Chain.rule` describes."""
    return ComputedUnit.of(text)


def computed_chains(rule: OptimizerRule, chains: Mapping[str, Chain]) -> dict[str, Chain]:
    """Chains of a unit. Each computed one contains the description of the unit.

    Parameters
    ----------
    rule : OptimizerRule
    chains : mapping of str to Chain
        Chains of the arrays of the unit, without a rule.
    """
    facts = {
        "optimizer": rule.facts(),
        "arrays": {
            name: replace(one, kind="computed").own_facts() if name in rule.state else one.facts()
            for name, one in chains.items()
        },
    }
    text = canonical(facts)
    return {
        name: replace(one, kind="computed", rule=text) if name in rule.state else one
        for name, one in chains.items()
    }


class _Cache:
    """The most recently used computed rows, for all threads."""

    def __init__(self, size: int) -> None:
        self._most = size
        self.clear()

    def clear(self) -> None:
        """Remove all entries, and replace the lock, which a lost thread may hold."""
        self._held: OrderedDict[Any, dict[str, Array]] = OrderedDict()
        self._bytes = 0
        self._lock = threading.Lock()

    def get(self, key: Any, make: Callable[[], dict[str, Array]], rows: int) -> dict[str, Array]:
        """Cached arrays with at least `rows` rows; otherwise call `make` and keep the result."""
        with self._lock:
            found = self._held.get(key)
            if found is not None and len(next(iter(found.values()))) >= rows:
                self._held.move_to_end(key)
                return found
        made = make()
        size = _size(made)
        with self._lock:
            last = self._held.pop(key, None)
            self._bytes += size - (0 if last is None else _size(last))
            self._held[key] = made
            while self._bytes > self._most and self._held:
                self._bytes -= _size(self._held.popitem(last=False)[1])
        return made


def _size(arrays: Mapping[str, Array]) -> int:
    return sum(array.nbytes for array in arrays.values())


cache = _Cache(_CACHED)
"""Cache of this process, for all runs."""

os.register_at_fork(after_in_child=cache.clear)  # a thread may have held the lock


def windows_of(picks: Sequence[Any]) -> tuple[slice, ...]:
    """Part of a chunk to decode for a selection: all rows from the first."""
    rows, *others = (pick.window for pick in picks)
    return (slice(0, rows.stop), *others)
