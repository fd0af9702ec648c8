"""Each compiled loop gives the bits of NumPy, also of NaN, infinity and subnormals."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from bits_and_calls import random_bits

from trajstore.codec import delta
from trajstore.codec.chunk import chain
from trajstore.codec.computed_rows import ComputedUnit
from trajstore.codec.predicted_rows import coefficients_and_differences, decode_rows
from trajstore.threads import CompiledLoop, values_side_by_side
from trajstore.values.native_types import NATIVE_TYPES, NativeType, cast, narrow
from trajstore.values.optimizer_rule import OptimizerRule

NEVER = 1 << 62


class Watched(CompiledLoop):
    """Keeps how many values it went through each time."""

    def __init__(self, module: str, name: str, enough: int) -> None:
        super().__init__(f"trajstore.codec.{module}", name, enough)
        self.made: list[int] = []

    def run(self, *arguments: Any) -> bool:
        self.made.append(arguments[0].size)
        return super().run(*arguments)


Loops = Callable[..., Watched]


@pytest.fixture
def loop_in(monkeypatch: pytest.MonkeyPatch) -> Loops:
    """A new loop in the place of another; it is compiled at once, or after so many values."""

    def put(place: str, module: str, name: str, enough: int = 0) -> Watched:
        loop = Watched(module, name, enough)
        monkeypatch.setattr(f"trajstore.codec.{place}", loop)
        return loop

    return put


SHAPES = [(1, 1), (5,), (7, 3), (16, 30, 64), (3, 2, 5, 4), (4, 3, 1), (5, 1, 1, 1), (3, 4_100)]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("name", NATIVE_TYPES)
def test_differences_are_added_up_wherever_they_lie(
    name: str, shape: tuple[int, ...], loop_in: Loops
) -> None:
    native, loop = NATIVE_TYPES[name], loop_in("delta._LOOP", "delta", "unfold_rows")
    for order in itertools.permutations(range(len(shape))):
        lying = random_bits(tuple(shape[axis] for axis in order), 1, 8 * native.itemsize)
        folded = lying.transpose(np.argsort(order))
        for start in {0, 1, shape[0] - 1} & set(range(shape[0])):
            for itemsize in {native.itemsize, native.stored.itemsize}:
                around = (shape[0] - start, *(length + 3 for length in shape[1:2]), *shape[2:])
                inside = (slice(None), *(slice(1, 1 + length) for length in shape[1:2]))
                out, expected = (np.zeros(around, f"u{itemsize}") for _ in range(2))
                delta._unfold_by_numpy(folded.copy("K"), native, expected[inside], start)
                delta.unfold(folded.copy("K"), native, out[inside], start)
                np.testing.assert_array_equal(out, expected)  # also around what is written
                axis, width = values_side_by_side(folded[start:], out[inside])
                plain = width and sum(length > 1 for length in shape[1 : axis + 1]) < 2
                can_be = plain and (itemsize == native.itemsize or native.is_cut_off)
                assert loop.made == ([folded.size] if can_be else [])
                loop.made.clear()


def test_single_rows_do_not_load_numba_soon(loop_in: Loops) -> None:
    """Loading it takes as long as many rows; rows that are only summed do not count."""
    loop = loop_in("delta._LOOP", "delta", "unfold_rows", 20)
    folded, native = random_bits((8, 10), 1, 16), NATIVE_TYPES["bfloat16"]
    for worth in (False, True):
        delta.unfold(folded.copy(), native, np.empty((1, 10), np.uint32), 7)
        assert loop.is_worth(0) == worth


def gradients(native: NativeType, tokens: int, hidden: int) -> np.ndarray:
    """Rows of low rank with noise; and of zeros, extreme numbers, and any bits."""
    rng = np.random.default_rng(1)
    rows = []
    for rank in (1, 3, 6, 2, 2, 2):
        directions = rng.standard_normal((rank, hidden))
        directions *= 4.0 ** -np.arange(rank)[:, None]
        noise = 1e-3 * rng.standard_normal((tokens, hidden))
        rows.append(rng.standard_normal((tokens, rank)) @ directions + noise)
    rows[3] *= 1e-38
    rows[4] *= np.where(np.arange(tokens) == tokens // 2, 1e38, 1)[:, None]
    rows[5] *= 1e37
    rows.append(np.zeros((tokens, hidden)))
    bits = narrow(cast(np.clip(rows, -3e38, 3e38), native.name), native)
    return np.concatenate([bits, random_bits((1, tokens, hidden), 2, 8 * native.itemsize)])


PREDICTION = {"_ENCODING": "terms_and_differences", "_DECODING": "decoded_rows"}


@pytest.mark.parametrize(
    ("name", "tokens", "hidden", "compiled"),
    [
        ("bfloat16", 130, 3, {"_DECODING"}),
        # That of the encoder is compiled for many seconds.
        pytest.param("bfloat16", 250, 64, {*PREDICTION}, marks=pytest.mark.nightly),
        pytest.param("float32", 7, 5, {*PREDICTION}, marks=pytest.mark.nightly),
    ],
)
def test_gradients_are_predicted(
    name: str, tokens: int, hidden: int, compiled: set[str], loop_in: Loops
) -> None:
    native = NATIVE_TYPES[name]
    bits = gradients(native, tokens, hidden)
    made = []
    for chosen in (set(), compiled):
        loops = [
            loop_in(f"predicted_rows.{at}", "prediction_loop", PREDICTION[at], enough)
            for at in PREDICTION
            for enough in (0 if at in chosen else NEVER,)
        ]
        found = coefficients_and_differences(bits, native)
        assert found is not None
        made.append([each.copy() for each in found])
        decoded = np.empty_like(bits)
        decode_rows(*made[-1], native, decoded)
        np.testing.assert_array_equal(decoded, bits)
        assert sum(bool(loop._ready) for loop in loops) == len(chosen)
    for one, other in zip(*made, strict=True):
        np.testing.assert_array_equal(one, other)


ROWS, SHAPE = 6, (37, 61)  # more than the loop takes at a time, and no multiple of it


@pytest.mark.nightly  # each combination of types is compiled, for seconds
@pytest.mark.parametrize(
    ("native", "state", "changed"),
    [
        ("bfloat16", "float32", {"name": "Adam", "betas": [0.3, 0.99]}),
        ("bfloat16", "float32", {"name": "RoundedAdamW", "maximize": True, "amsgrad": True}),
        ("bfloat16", "float32", {"eps": 0}),  # and a second moment of 0 divides by 0
        ("bfloat16", "bfloat16", {}),
        ("float32", "float32", {"weight_decay": 0}),
    ],
)
def test_rows_are_computed_by_the_rule(
    native: str, state: str, changed: dict[str, Any], loop_in: Loops
) -> None:
    natives = {"W": native, "grad": native, "exp_avg": state, "exp_avg_sq": state}
    given = {"betas": [0.9, 0.999], "eps": 1e-8, "weight_decay": 0.1, **changed}
    rule = OptimizerRule.of({"class": given.pop("name", "AdamW"), "hyperparameters": given})
    chains = {name: chain(NATIVE_TYPES[each], 3, small=True) for name, each in natives.items()}
    unit = ComputedUnit(rule=rule, chains=chains)
    bits = {
        name: random_bits((ROWS, *SHAPE), at, 8 * NATIVE_TYPES[each].itemsize)
        for at, (name, each) in enumerate(natives.items())
    }
    for each in bits.values():
        each[:, :5] = 0
    rates = {
        "step": np.array([0, 1, 2, 3, 50, 9000]),
        "lr": np.array([np.nan, 1e-3, 1e-3, np.nan, 0.3, 1e-5]),
        "clip_coef": np.array([np.nan, 1, 0.5, 1, 0.25, np.nan], np.float32),
        "skipped": np.zeros(ROWS, np.float32),
    }
    made = []
    for enough in (NEVER, 0):
        loop = loop_in("adam_loop._LOOP", "adam_loop", "adam_rows", enough)
        out = {name: np.zeros_like(bits[name]) for name in rule.state}
        unit._follow_parts(bits, out, rule.state, rates, 0, 0)
        assert bool(loop._ready) == (not enough)
        back = {name: bits[name].copy() for name in bits}
        for name in out:
            back[name][1:] = out[name][1:]
        unit._follow_parts(back, back, rule.state, rates, 0, 0)
        for name, values in bits.items():
            np.testing.assert_array_equal(back[name], values)
        made.append(out)
    for name in rule.state:
        np.testing.assert_array_equal(made[0][name], made[1][name])
