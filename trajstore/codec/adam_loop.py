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

from trajstore.threads import CompiledLoop, memory_of, rows_in_one_piece
from trajstore.values.native_types import NativeType, cast
from trajstore.values.optimizer_rule import OptimizerRule, Rates

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
        return [0] * 12
    float32, rule = np.float32, rule.in_step(rates)
    correction, root = rule.corrections(rates.step)
    coupled, eps = float32(rule.weight_decay), float32(rule.eps)
    if not rule.rounds_once:
        coupled = cast(np.array([coupled], float32), natives[0])[0]
        eps = cast(np.array([eps], float32), natives[2])[0]
    clip = float32(rates.clip)
    return [
        float32(1) if np.isnan(clip) else clip,
        float32(1 - rates.lr * (rule.weight_decay if rule.decoupled else 0)),
        coupled,
        float32(1 - rule.beta1),
        float32(rule.beta1),
        float32(rule.beta2),
        float32(1 - rule.beta2),
        float32(root),
        eps,
        float32(-rates.lr / correction),
        float32(1 - rule.beta1 < 0.5),
        float32(rule.coupled_decay != 0),
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
    keeps_largest: bool,
) -> None:
    """The loop for numba. `run_adam_loop` prepares its arguments; arrays are 1-D memory.

    It processes a few elements at a time, whose values fit into the L1 cache. Few arrays in each
    inner loop, shifts by constants, and unsigned indices let the compiler vectorize it: numba
    shifts by variables in 64 bits, and a negative index counts from the end.
    """
    quiet, low_bit, last = np.uint32(0x7FC00000), np.uint32(1), np.uint32(16)

    # Functions within the loop are inlined by numba. A NaN is checked for where values are loaded
    # and stored: the bits of a quiet NaN without payload, of any sign, are not changed by rounding.
    def checked(word: Any) -> Any:
        is_nan = np.uint32(word & np.uint32(0x7FFFFFFF)) > np.uint32(0x7F800000)
        return quiet if is_nan else word

    def rounded(value: Any, odd: Any) -> Any:
        # To 16 bits if `odd` is 1; unchanged if it is 0.
        word = np.float32(value).view(np.uint32)
        half = np.uint32(np.uint32(odd * np.uint32(0x7FFF)) + np.uint32((word >> last) & odd))
        kept = np.uint32(np.uint32(0xFFFFFFFF) - np.uint32(odd * np.uint32(0xFFFF)))
        return np.uint32(np.uint32(word + half) & kept).view(np.float32)

    def load(memory: Any, base: Any, shift: Any, out: Any, size: Any) -> None:
        if shift:
            for at in range(size):
                out[at] = np.uint32(np.uint32(memory[base + at]) << last).view(np.float32)
        else:
            for at in range(size):
                out[at] = np.uint32(checked(np.uint32(memory[base + at]))).view(np.float32)

    def store(
        values: Any, shift: Any, given: Any, base: Any, state: Any, out: Any, place: Any, size: Any
    ) -> None:
        if shift:
            for at in range(size):
                word = checked(np.float32(rounded(values[at], low_bit)).view(np.uint32))
                state[at] = state.dtype.type(word >> last) ^ given[base + at]
        else:
            for at in range(size):
                word = checked(np.float32(values[at]).view(np.uint32))
                state[at] = state.dtype.type(word) ^ given[base + at]
        for at in range(size):  # apart, as `out` may be `given`, and then no loop is vectorized
            out[place + at] = state[at]

    of_W, of_first, of_second, of_grad = shifts[0], shifts[1], shifts[2], shifts[3]
    places = strides.astype(np.uint64)
    odd_grad = np.uint32(of_grad >> np.uint32(4))
    # If only results are rounded, intermediate values keep all bits.
    stage_W = np.uint32(0) if rounds_once else np.uint32(of_W >> np.uint32(4))
    stage_first = np.uint32(0) if rounds_once else np.uint32(of_first >> np.uint32(4))
    stage_second = np.uint32(0) if rounds_once else np.uint32(of_second >> np.uint32(4))
    w, m, v = np.empty(1024, np.float32), np.empty(1024, np.float32), np.empty(1024, np.float32)
    g, largest = np.empty(1024, np.float32), np.empty(1024, np.float32)
    held_W, held_first = np.empty(1024, W_out.dtype), np.empty(1024, exp_avg_out.dtype)
    held_second = np.empty(1024, exp_avg_sq_out.dtype)
    for first in range(0, count, 1024):
        size = np.uint64(min(1024, count - first))
        for row in range(1, taken.size):
            clip, coupled = factors[row, 0], factors[row, 2]
            decay, couples = factors[row, 1], factors[row, 11] != 0
            weight, beta1, beta2 = factors[row, 3], factors[row, 4], factors[row, 5]
            weight2, root, eps = factors[row, 6], factors[row, 7], factors[row, 8]
            scale, near = factors[row, 9], factors[row, 10] != 0
            begin, before, here = np.uint64(first), np.uint64(row - 1), np.uint64(row)
            load(W, begin + before * places[0], of_W, w, size)
            load(exp_avg, begin + before * places[1], of_first, m, size)
            load(exp_avg_sq, begin + before * places[2], of_second, v, size)
            if keeps_largest:
                for at in range(size):
                    other = v[at]
                    higher = row == 1 or other > largest[at] or other != other
                    largest[at] = other if higher else largest[at]
            if taken[row]:
                load(grad, begin + here * places[3], of_grad, g, size)
                if clip != np.float32(1):
                    for at in range(size):
                        g[at] = rounded(g[at] * clip, odd_grad)
                if maximize:
                    for at in range(size):
                        g[at] = -g[at]
                if couples:
                    for at in range(size):
                        product = np.float64(w[at]) * np.float64(coupled)
                        g[at] = rounded(np.float32(product + np.float64(g[at])), stage_W)
                if near:
                    for at in range(size):
                        change = np.float32(g[at] - m[at])
                        product = np.float64(change) * np.float64(weight)
                        m[at] = rounded(np.float32(product + np.float64(m[at])), stage_first)
                else:
                    for at in range(size):
                        change = np.float32(m[at] - g[at])
                        product = np.float64(change) * np.float64(beta1)
                        m[at] = rounded(np.float32(product + np.float64(g[at])), stage_first)
                for at in range(size):
                    scaled = np.float32(g[at] * weight2)
                    product = np.float64(scaled) * np.float64(g[at])
                    decayed = rounded(v[at] * beta2, stage_second)
                    v[at] = rounded(np.float32(product + np.float64(decayed)), stage_second)
                for at in range(size):
                    square = v[at]
                    higher = not keeps_largest or square > largest[at] or square != square
                    square = square if higher else largest[at]
                    divisor = rounded(np.float32(np.sqrt(square)), stage_second)
                    divisor = rounded(divisor / root, stage_second)
                    divisor = rounded(divisor + eps, stage_second)
                    step = np.float32(scale * m[at]) / divisor
                    w[at] = rounded(w[at] * decay, stage_W) + step
            at_W, at_first = begin + here * places[0], begin + here * places[1]
            at_second = begin + here * places[2]
            if computed[0]:
                place = begin + here * places[4]
                store(w, of_W, W, at_W, held_W, W_out, place, size)
            if computed[1]:
                place = begin + here * places[5]
                store(m, of_first, exp_avg, at_first, held_first, exp_avg_out, place, size)
            if computed[2]:
                place = begin + here * places[6]
                store(v, of_second, exp_avg_sq, at_second, held_second, exp_avg_sq_out, place, size)
