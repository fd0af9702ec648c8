"""W and the moments, computed from the gradient: a key row, and corrections of the rule's bits.

So are the vectors of all other parameters, where each parameter has its own numbers of a step.

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
from functools import cached_property, lru_cache
from typing import Any, Self

import numpy as np
import numpy.typing as npt

from trajstore.codec.adam_loop import run_adam_loop
from trajstore.codec.chunk import Chain, Head, padded
from trajstore.codec.delta import scratch
from trajstore.strict_json import canonical
from trajstore.values.native_types import kept_subnormals, result_bits, widen
from trajstore.values.optimizer_rule import LARGEST, VECTORS, OptimizerRule, Rates, VectorRule

Array = npt.NDArray[Any]

GRADIENT = "grad"
RATES = ("step", "lr", "clip_coef", "skipped")
"""Per-step numbers that a rule uses; the last two if they are recorded."""

VECTOR_RATES = ("params_lr", "params_count", "clip_coef")
"""Per-step numbers that the rule of the vectors uses; the last one if it is recorded."""

_CACHED = 64 << 20  # bytes of computed rows in the cache of a process
_ENTRY = 2 << 10  # bytes of an entry without its values: labels of its objects, and arrays


@dataclass(frozen=True, kw_only=True)
class ComputedUnit:
    """Arrays that are computed together, and the arrays they are computed from.

    Attributes
    ----------
    rule : OptimizerRule or VectorRule
        The latter for the vectors of all other parameters.
    chains : dict of str to Chain
        Chain of each array of the unit: the computed ones, the gradient, and the rates.
    """

    rule: OptimizerRule | VectorRule
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
            rule: OptimizerRule | VectorRule
            if "vectors" in facts:
                rule = VectorRule.from_facts(facts["vectors"])
            else:
                rule = OptimizerRule.from_facts(facts["optimizer"])
            chains = {
                name: Chain.from_facts(
                    {**settings, "rule": facts} if settings.get("kind") == "computed" else settings
                )
                for name, settings in facts["arrays"].items()
            }
        except (KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"got {text}, expected the description of a rule") from error
        unit = cls(rule=rule, chains=chains)
        possible = _rates_of(rule)
        if not {*unit.matrices, *possible[:2]} <= chains.keys() <= {*unit.matrices, *possible}:
            raise ValueError(
                f"got a rule over {', '.join(chains)}, expected {', '.join(unit.matrices)}, "
                f"{' and '.join(possible[:2])}"
            )
        return unit

    @property
    def gradient(self) -> str:
        """Name of the array that the others are computed from."""
        return VECTORS[GRADIENT] if isinstance(self.rule, VectorRule) else GRADIENT

    @property
    def matrices(self) -> tuple[str, ...]:
        """Names of the arrays with the same chunks: the computed ones, and the gradient."""
        return (*self.rule.state, self.gradient)

    @property
    def rates(self) -> tuple[str, ...]:
        """Names of the per-step numbers."""
        return tuple(name for name in _rates_of(self.rule) if name in self.chains)

    def row_of_rate(self, name: str) -> tuple[int, ...]:
        """Shape of one row of a per-step number."""
        if not isinstance(self.rule, VectorRule) or name == "clip_coef":
            return ()
        return (len(self.rule.groups) if name == "params_lr" else self.rule.parameters,)

    def encode(
        self,
        bits: Mapping[str, Array],
        rates: Mapping[str, Array],
        skips: int,
        shape: tuple[int, ...],
        first: int,
    ) -> dict[str, bytes]:
        """Encode one chunk of each computed array.

        Parameters
        ----------
        bits : mapping of str to ndarray of native bits, (row, token, hidden) or (row, element)
            Present rows of each of `matrices`.
        rates : mapping of str to ndarray, (row, …)
            Values of each of `rates`, and the result of `OptimizerRule.changing`.
        skips : int
            Number of skipped steps before the first row.
        first : int
            Position of the chunk along the second dimension.
        shape : tuple of int
            Shape of a whole chunk.

        Returns
        -------
        dict of str to bytes
        """
        inside = tuple(slice(length) for length in bits[self.gradient].shape)
        corrections: dict[str, Array] = {}
        places: dict[str, Array] = {}
        for name in self.rule.state:
            made = scratch.array(f"corrections of {name}", shape, bits[name].dtype)
            if bits[name].shape != shape:
                made.fill(0)
            corrections[name], places[name] = made, made[inside]
            places[name][0] = bits[name][0]
        self._follow_parts(bits, places, self.rule.state, rates, skips, first)
        settings = rates.get("settings", np.empty((0, 0)))
        numbers = padded(settings, (len(settings), shape[0])).tobytes()
        return {
            name: self.chains[name].encode_corrections(made, bits[name], (skips, numbers))
            for name, made in corrections.items()
        }

    def compute(
        self,
        stored: Mapping[str, tuple[Head | None, Array]],
        grad: Array,
        rates: Mapping[str, Array],
        first: int,
    ) -> dict[str, Array]:
        """Rows of the computed arrays.

        Parameters
        ----------
        stored : mapping of str to (Head or None, ndarray)
            Result of `Decoder.stored_form` for each computed array.
        grad : ndarray of native bits, (row, token, hidden) or (row, element)
        rates : mapping of str to ndarray, (row, …)
        first : int
            Position of the window along the second dimension.

        Returns
        -------
        dict of str to ndarray of native bits, (row, token, hidden)
        """
        rows = {name: bits for name, (_, bits) in stored.items()}
        computed = {name: head for name, (head, _) in stored.items() if head is not None}
        heads = {*computed.values()}
        if len(heads) != 1:
            raise ValueError(f"{', '.join(computed)} differ in skipped steps or hyperparameters")
        (skips, numbers), given = heads.pop(), {**rows, self.gradient: grad}
        if numbers:
            rates = {**rates, "settings": np.frombuffer(numbers)}
        self._follow_parts(given, rows, list(computed), rates, skips, first)
        return rows

    def _follow_parts(
        self,
        rows: Mapping[str, Array],
        out: Mapping[str, Array],
        computed: Sequence[str],
        rates: Mapping[str, Array],
        skips: int,
        first: int,
    ) -> None:
        """`_follow` for the matrix, or for each parameter of the vectors."""
        rule = self.rule
        if not isinstance(rule, VectorRule):
            self._follow(rows, out, computed, self._rates(rule, rates, skips))
            return
        roles = {array: role for role, array in VECTORS.items()}
        for part, group, parameter in rule.parts(first, rows[self.gradient].shape[1]):
            self._groups[group]._follow(
                {role: rows[array][:, part] for array, role in roles.items()},
                {roles[array]: out[array][:, part] for array in rule.state},
                [roles[array] for array in computed],
                rule.rates(rates, group, parameter),
            )

    @cached_property
    def _groups(self) -> list[ComputedUnit]:
        """Units of the groups of the optimizer, with the names of a matrix."""
        assert isinstance(self.rule, VectorRule)
        chains = {role: self.chains[array] for role, array in VECTORS.items()}
        return [ComputedUnit(rule=rule, chains=chains) for rule in self.rule.groups]

    @kept_subnormals()
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
        rule = self.rule
        assert isinstance(rule, OptimizerRule)
        natives = {name: self.chains[name].native for name in self.matrices}
        if run_adam_loop(rule, rows, out, computed, natives, rates):
            return
        names = {name: native.name for name, native in natives.items()}
        state = rule.state
        before = {name: widen(rows[name][0], natives[name]) for name in state}
        if rule.amsgrad:
            before[LARGEST] = before["exp_avg_sq"]
        for row in range(1, len(rates)):
            made: Mapping[str, Array] = before
            rate = rates[row]
            if rate is not None:
                grad = widen(rows[GRADIENT][row], natives[GRADIENT])
                made = rule.next_row(before, grad, names, rate)
            for name in computed:
                bits = result_bits(made[name], natives[name])
                np.bitwise_xor(rows[name][row], bits, out=out[name][row])
            largest = before.get(LARGEST)
            before = {name: widen(rows[name][row], natives[name]) for name in state}
            if largest is not None:
                before[LARGEST] = np.maximum(largest, before["exp_avg_sq"])

    @staticmethod
    def _rates(rule: OptimizerRule, rates: Mapping[str, Array], skips: int) -> list[Rates | None]:
        """Numbers of each step; None if no step was taken, or its learning rate is unknown."""
        made: list[Rates | None] = []
        steps = rates["step"].tolist()
        skipped = rates["skipped"].tolist() if "skipped" in rates else [0] * len(steps)
        clips = rates["clip_coef"].tolist() if "clip_coef" in rates else [1.0] * len(steps)
        own = rule.numbers(rates, len(steps))
        columns: Any = steps, rates["lr"].tolist(), skipped, clips, own
        for step, lr, skip, clip, numbers in zip(*columns, strict=True):
            skips += skip == 1
            taken = skip != 1 and step > skips and math.isfinite(lr)
            rate = Rates(step=step - skips, lr=lr, clip=clip, numbers=numbers)
            made.append(rate if taken else None)
        return made


def _rates_of(rule: OptimizerRule | VectorRule) -> tuple[str, ...]:
    return VECTOR_RATES if isinstance(rule, VectorRule) else RATES


@lru_cache(maxsize=64)
def unit_of(text: str) -> ComputedUnit:
    """The unit that `Chain.rule` describes."""
    return ComputedUnit.of(text)


def changing_settings(rule: str, names: Sequence[str], values: Array) -> dict[str, Array]:
    """`OptimizerRule.changing` of some rows.

    Parameters
    ----------
    rule : str
        `Chain.rule` of W.
    names : sequence of str
    values : ndarray of float64, (row, hyperparameter)
    """
    matrix = unit_of(rule).rule if rule else None
    return matrix.changing(names, values) if isinstance(matrix, OptimizerRule) else {}


def computed_chains(
    rule: OptimizerRule | VectorRule, chains: Mapping[str, Chain]
) -> dict[str, Chain]:
    """Chains of a unit. Each computed one contains the description of the unit.

    Parameters
    ----------
    rule : OptimizerRule or VectorRule
    chains : mapping of str to Chain
        Chains of all arrays, those of the unit without a rule.
    """
    unit = ComputedUnit(rule=rule, chains=chains)
    chains = {name: chains[name] for name in (*unit.matrices, *unit.rates)}
    facts = {
        "vectors" if isinstance(rule, VectorRule) else "optimizer": rule.facts(),
        "arrays": {
            name: replace(chain, kind="computed").own_facts()
            if name in rule.state
            else chain.facts()
            for name, chain in chains.items()
        },
    }
    text = canonical(facts)
    return {
        name: replace(chain, kind="computed", rule=text) if name in rule.state else chain
        for name, chain in chains.items()
    }


class _Cache:
    """The most recently used computed rows, for all threads."""

    def __init__(self) -> None:
        self.clear()

    def clear(self, most: int = _CACHED) -> None:
        """Remove all entries, and replace the locks, which a lost thread may hold.

        Parameters
        ----------
        most : int
            Bytes that it keeps from now on.
        """
        self._most = most
        self._rows: OrderedDict[Any, dict[str, Array]] = OrderedDict()
        self._bytes = 0
        self._lock = threading.Lock()
        self._making: dict[Any, threading.Lock] = {}

    def get(self, key: Any, make: Callable[[], dict[str, Array]], rows: int) -> dict[str, Array]:
        """Cached arrays with at least `rows` rows; otherwise call `make` and keep the result.

        Other threads that need the same arrays wait for them.
        """
        with self._lock:
            cached = self._cached(key, rows)
            if cached is not None:
                return cached
            making = self._making.setdefault(key, threading.Lock())
        with making:
            with self._lock:
                cached = self._cached(key, rows)
            try:
                made = make() if cached is None else cached
                with self._lock:
                    self._keep(key, made)
            finally:
                with self._lock:
                    self._making.pop(key, None)
        return made

    def _cached(self, key: Any, rows: int) -> dict[str, Array] | None:
        cached = self._rows.get(key)
        if cached is None or len(next(iter(cached.values()))) < rows:
            return None
        self._rows.move_to_end(key)
        return cached

    def _keep(self, key: Any, made: dict[str, Array]) -> None:
        last = self._rows.pop(key, None)
        self._bytes += _size(made) - (0 if last is None else _size(last))
        self._rows[key] = made
        while self._bytes > self._most and self._rows:
            self._bytes -= _size(self._rows.popitem(last=False)[1])


def _size(arrays: Mapping[str, Array]) -> int:
    return _ENTRY + sum(array.nbytes for array in arrays.values())


cache = _Cache()
"""Cache of this process, for all runs."""

os.register_at_fork(after_in_child=cache.clear)  # a thread may have held the lock
