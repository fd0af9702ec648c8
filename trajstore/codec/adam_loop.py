"""Adam's rule over rows of bits, in one loop that numba compiles.

The results equal those of `trajstore.values.optimizer_rule.OptimizerRule.next_row`, bit for bit:
the same operations in the same order. A division by 0 raises no error. A NaN of the rule has the
bits of the quiet NaN without sign and payload.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt

from trajstore.compiled_loop import CompiledLoop, memory_of, rows_in_one_piece
from trajstore.values.native_types import NativeType
from trajstore.values.optimizer_rule import OptimizerRule, Rates
from trajstore.values.rounding import cast

__all__ = ["adam_rows", "run_adam_loop"]

Array = npt.NDArray[Any]

_LOOP = CompiledLoop("trajstore.codec.adam_loop", "adam_rows")

_LEAST_WORK = 10_000  # numbers that NumPy processes in the time of its calls for one row

_TYPES = {"bfloat16": 16, "float32": 0}
"""Types whose bits are the highest of a float32, with the number of omitted bits."""


def run_adam_loop(
    rule: OptimizerRule,
    rows: Mapping[str, Array],
    out: Mapping[str, Array],
    computed: Sequence[str],
    natives: Mapping[str, NativeType],
    rates: Sequence[Rates | None],
) -> bool:
    """Compute rows XOR the rule's bits, if a compiled loop is available.

    Parameters
    ----------
    rule : OptimizerRule
    rows : mapping of str to ndarray of native bits, (row, …)
        Rows of W, the moments and the gradient.
    out : mapping of str to ndarray
        Receives, from row 1, the rows of W and the moments XOR the rule's bits. It may be `rows`;
        then each row is changed before it is used for the next one.
    computed : sequence of str
        Names of the arrays to compute, out of W and the moments.
    natives : mapping of str to NativeType
    rates : sequence of Rates or None
        Rates of each row; None if no step was taken.

    Returns
    -------
    bool
        False if no loop is available. Then nothing was changed.
    """
    names = ("W", "exp_avg", "exp_avg_sq", "grad")
    if rule.kind != "adam" or any(natives[name].name not in _TYPES for name in names):
        return False
    arrays = [*(rows[name] for name in names), *(out[name] for name in names[:3])]
    count = rows["W"][0].size
    if not _LOOP.is_worth(len(rates) * max(3 * count, _LEAST_WORK)) or not all(
        map(rows_in_one_piece, arrays)
    ):
        return False
    taken, factors = _numbers(rule, tuple(natives[name].name for name in names), tuple(rates))
    types = np.array([_TYPES[natives[name].name] for name in names], np.uint32)
    return _LOOP.run(
        *map(memory_of, arrays),
        np.array([array.strides[0] // array.itemsize for array in arrays], np.int64),
        count,
        types,
        np.array([name in computed for name in names[:3]], np.bool_),
        taken,
        factors,
        rule.rounds_once,
        rule.maximize,
        bool(rule.weight_decay) and rule.decoupled,
        bool(rule.weight_decay) and not rule.decoupled,
        rule.amsgrad,
    )


@lru_cache(maxsize=64)  # chunks of a block share them
def _numbers(
    rule: OptimizerRule, natives: tuple[str, ...], rates: tuple[Rates | None, ...]
) -> tuple[npt.NDArray[np.bool_], npt.NDArray[np.float32]]:
    """For each row, True if a step was taken; and its numbers."""
    taken = np.array([rate is not None for rate in rates], np.bool_)
    return taken, np.array([_factors(rule, natives, rate) for rate in rates], np.float32)


@np.errstate(all="ignore")  # infinity is a result
def _factors(rule: OptimizerRule, natives: tuple[str, ...], rates: Rates | None) -> list[Any]:
    """Numbers of one step in float32, in the order that `adam_rows` expects."""
    if rates is None:
        return [0] * 11
    one = np.float32
    correction, root = rule.corrections(rates.step)
    coupled, eps = one(rule.weight_decay), one(rule.eps)
    if not rule.rounds_once:
        coupled = cast(np.array([coupled], one), natives[0])[0]
        eps = cast(np.array([eps], one), natives[2])[0]
    clip = one(rates.clip)
    return [
        one(1) if np.isnan(clip) else clip,
        one(1 - rates.lr * rule.weight_decay),
        coupled,
        one(1 - rule.beta1),
        one(rule.beta1),
        one(rule.beta2),
        one(1 - rule.beta2),
        one(root),
        eps,
        one(-rates.lr / correction),
        one(1 - rule.beta1 < 0.5),
    ]


def adam_rows(
    W: Array,
    exp_avg: Array,
    exp_avg_sq: Array,
    grad: Array,
    W_out: Array,
    exp_avg_out: Array,
    exp_avg_sq_out: Array,
    strides: npt.NDArray[np.int64],
    count: int,
    shifts: npt.NDArray[np.uint32],
    computed: npt.NDArray[np.bool_],
    taken: npt.NDArray[np.bool_],
    factors: npt.NDArray[np.float32],
    rounds_once: bool,
    maximize: bool,
    decays: bool,
    couples: bool,
    keeps_largest: bool,
) -> None:
    """The loop for numba. `run_adam_loop` prepares its arguments; arrays are 1-D memory.

    It processes a few elements at a time, whose values fit into the L1 cache. Each inner loop does
    one operation, so that the compiler can vectorize it. Indices are unsigned, as a negative index
    counts from the end.
    """
    quiet, one, last = np.uint32(0x7FC00000), np.uint32(1), np.uint32(16)

    # Functions within the loop are inlined by numba. A NaN is checked for where values are loaded
    # and stored: the bits of a quiet NaN without payload, of any sign, are not changed by rounding.
    def raise_to(values: Any, others: Any, size: Any) -> None:
        for at in range(size):
            other = others[at]
            values[at] = other if other > values[at] or other != other else values[at]

    def load(memory: Any, base: Any, shift: Any, out: Any, size: Any) -> None:
        bits = out.view(np.uint32)
        if shift:
            for at in range(size):
                bits[at] = np.uint32(memory[base + at]) << shift
        else:
            for at in range(size):
                wide = np.uint32(memory[base + at])
                is_nan = np.uint32(wide & np.uint32(0x7FFFFFFF)) > np.uint32(0x7F800000)
                bits[at] = quiet if is_nan else wide

    def rounded(values: Any, shift: Any, size: Any) -> None:
        if shift:
            bits = values.view(np.uint32)
            for at in range(size):
                wide = bits[at]
                half = np.uint32(np.uint32(0x7FFF) + ((wide >> last) & one))
                bits[at] = np.uint32(wide + half) & np.uint32(0xFFFF0000)

    def store(
        values: Any, shift: Any, given: Any, base: Any, out: Any, place: Any, size: Any
    ) -> None:
        bits = values.view(np.uint32)
        for at in range(size):
            wide = bits[at]
            is_nan = np.uint32(wide & np.uint32(0x7FFFFFFF)) > np.uint32(0x7F800000)
            bits[at] = np.uint32((quiet if is_nan else wide) >> shift) ^ given[base + at]
        for at in range(size):  # apart, as `out` may be `given`, and then no loop is vectorized
            out[place + at] = out.dtype.type(bits[at])

    of_W, of_first, of_second, of_grad = shifts[0], shifts[1], shifts[2], shifts[3]
    none, places = np.uint32(0), strides.astype(np.uint64)
    # If only results are rounded, intermediate values keep all bits.
    stage_W = none if rounds_once else of_W
    stage_first = none if rounds_once else of_first
    stage_second = none if rounds_once else of_second
    w, m, v = np.empty(1024, np.float32), np.empty(1024, np.float32), np.empty(1024, np.float32)
    g, t = np.empty(1024, np.float32), np.empty(1024, np.float32)
    largest = np.empty(1024, np.float32)
    for first in range(0, count, 1024):
        size = np.uint64(min(1024, count - first))
        for row in range(1, taken.size):
            clip, decay, coupled = factors[row, 0], factors[row, 1], factors[row, 2]
            weight, beta1, beta2 = factors[row, 3], factors[row, 4], factors[row, 5]
            weight2, root, eps = factors[row, 6], factors[row, 7], factors[row, 8]
            scale, near = factors[row, 9], factors[row, 10] != 0
            before = np.uint64(row - 1) * places[:3] + np.uint64(first)
            load(W, before[0], of_W, w, size)
            load(exp_avg, before[1], of_first, m, size)
            load(exp_avg_sq, before[2], of_second, v, size)
            if row == 1:
                load(exp_avg_sq, before[2], of_second, largest, size)
            elif keeps_largest:
                raise_to(largest, v, size)
            if taken[row]:
                load(grad, np.uint64(row) * places[3] + np.uint64(first), of_grad, g, size)
                if clip != np.float32(1):
                    for at in range(size):
                        g[at] = g[at] * clip
                    rounded(g, of_grad, size)
                if maximize:
                    for at in range(size):
                        g[at] = -g[at]
                if decays:
                    for at in range(size):
                        w[at] = w[at] * decay
                    rounded(w, stage_W, size)
                if couples:
                    for at in range(size):
                        product = np.float64(w[at]) * np.float64(coupled)
                        g[at] = np.float32(product + np.float64(g[at]))
                    rounded(g, stage_W, size)
                if near:
                    for at in range(size):
                        change = np.float32(g[at] - m[at])
                        product = np.float64(change) * np.float64(weight)
                        m[at] = np.float32(product + np.float64(m[at]))
                else:
                    for at in range(size):
                        change = np.float32(m[at] - g[at])
                        product = np.float64(change) * np.float64(beta1)
                        m[at] = np.float32(product + np.float64(g[at]))
                rounded(m, stage_first, size)
                for at in range(size):
                    v[at] = v[at] * beta2
                rounded(v, stage_second, size)
                for at in range(size):
                    scaled = np.float32(g[at] * weight2)
                    product = np.float64(scaled) * np.float64(g[at])
                    v[at] = np.float32(product + np.float64(v[at]))
                rounded(v, stage_second, size)
                if keeps_largest:
                    for at in range(size):
                        t[at] = largest[at]
                    raise_to(t, v, size)
                    for at in range(size):
                        t[at] = np.sqrt(t[at])
                else:
                    for at in range(size):
                        t[at] = np.sqrt(v[at])
                rounded(t, stage_second, size)
                for at in range(size):
                    t[at] = t[at] / root
                rounded(t, stage_second, size)
                for at in range(size):
                    t[at] = t[at] + eps
                rounded(t, stage_second, size)
                for at in range(size):
                    step = np.float32(scale * m[at])
                    w[at] = w[at] + np.float32(step / t[at])
            rounded(w, of_W, size)
            if rounds_once:
                rounded(m, of_first, size)
                rounded(v, of_second, size)
            bases = np.uint64(row) * places[:3] + np.uint64(first)
            ends = np.uint64(row) * places[4:] + np.uint64(first)
            if computed[0]:
                store(w, of_W, W, bases[0], W_out, ends[0], size)
            if computed[1]:
                store(m, of_first, exp_avg, bases[1], exp_avg_out, ends[1], size)
            if computed[2]:
                store(v, of_second, exp_avg_sq, bases[2], exp_avg_sq_out, ends[2], size)
