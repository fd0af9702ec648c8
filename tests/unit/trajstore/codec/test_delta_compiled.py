"""The compiled loop adds up what NumPy adds up, wherever the values lie."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from bits_and_calls import random_bits

from trajstore.codec import delta
from trajstore.threads import CompiledLoop, values_side_by_side
from trajstore.values.native_types import NATIVE_TYPES

pytest.importorskip("numba")


@pytest.fixture(autouse=True)
def calls(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """How many values the loop went through each time; it is compiled at once."""
    loop, made = CompiledLoop("trajstore.codec.delta", "unfold_rows", enough=0), []
    run = loop.run

    def watched(*arguments: Any) -> bool:
        made.append(arguments[0].size)
        return run(*arguments)

    monkeypatch.setattr(loop, "run", watched)
    monkeypatch.setattr(delta, "_LOOP", loop)
    return made


SHAPES = [(1, 1), (5,), (7, 3), (16, 30, 64), (3, 2, 5, 4), (4, 3, 1), (5, 1, 1, 1), (3, 4_100)]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("name", NATIVE_TYPES)
def test_the_compiled_unfold_equals_that_of_numpy(
    name: str, shape: tuple[int, ...], calls: list[int]
) -> None:
    native = NATIVE_TYPES[name]
    axes = range(len(shape))
    for order in itertools.permutations(axes):
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
                assert calls == ([folded.size] if can_be else [])
                calls.clear()


def test_single_rows_do_not_load_numba_soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """Loading it takes as long as many rows; rows that are only summed do not count."""
    loop = CompiledLoop("trajstore.codec.delta", "unfold_rows", enough=20)
    monkeypatch.setattr(delta, "_LOOP", loop)
    folded, native = random_bits((8, 10), 1, 16), NATIVE_TYPES["bfloat16"]
    for worth in (False, True):
        delta.unfold(folded.copy(), native, np.empty((1, 10), np.uint32), 7)
        assert loop.is_worth(0) == worth
