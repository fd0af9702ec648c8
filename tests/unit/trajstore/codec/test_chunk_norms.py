"""Norms of a chunk are those of its values, to the last bit, compiled or not."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from bits_and_calls import random_bits

from trajstore import compiled_loop
from trajstore.codec import chunk_norms
from trajstore.codec.chunk_decoder import Decoder
from trajstore.codec.chunk_norms import ChunkNorms
from trajstore.codec.codec_chain import Chain, chain
from trajstore.compiled_loop import CompiledLoop
from trajstore.values.native_types import NATIVE_TYPES, narrow, native_type, widen
from trajstore.values.token_norms import token_norm

SHAPES = [(1, 1, 1), (5, 7, 1), (4, 9, 6), (7, 30, 64), (3, 4, 769), (2, 1, 2_000)]

Calls = list[bool]


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Calls:
    """Each run of the loop, and whether it was sure; it is compiled at once."""
    pytest.importorskip("numba")
    monkeypatch.setattr(compiled_loop, "_ENOUGH", 0)
    made: Calls = []

    class Spy(CompiledLoop):
        def run(self, *arguments: Any) -> bool:
            done = super().run(*arguments)
            assert done
            made.append(not arguments[-1][0])
            return done

    name = "trajstore.codec.norm_loop"
    monkeypatch.setattr(chunk_norms, "_LOOP", Spy(name, "measure_vectors", in_any_order=True))
    return made


@pytest.fixture
def interpreted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is ever worth compiling."""
    monkeypatch.setattr(compiled_loop, "_ENOUGH", float("inf"))


def histories(name: str, shape: tuple[int, ...]) -> Iterator[np.ndarray]:
    """Bits of any patterns, of none that is NaN, and such as training makes them."""
    native = native_type(name)
    bits = random_bits(shape, 1, 8 * native.itemsize)
    yield bits
    with np.errstate(invalid="ignore", over="ignore"):
        values = widen(bits, native)
    yield narrow(np.where(np.isfinite(values), values, 0).astype(values.dtype), native)
    near = bits.copy()
    near[1:] = near[0] + np.arange(1, shape[0], dtype=bits.dtype)[:, None, None]
    near[:, ::3] = native.nan_bits
    near[:, 1::5, :1] = native.infinity_bits
    yield near


def measured(coding: Chain, bits: np.ndarray, window: tuple[slice, ...], order: float) -> Any:
    """Norms of a part of a chunk, between others, and what is expected of them."""
    data = coding.encode(np.ascontiguousarray(bits), bits.shape)
    norms = ChunkNorms(Decoder(coding, bits.shape), order)
    expected = token_norm(widen(bits, coding.native)[window], order)
    out = np.full((expected.shape[0] + 1, expected.shape[1] + 2, 1), 7, norms.dtype)
    norms.decode(data, window, out[1:, 1:-1])
    assert (out[0] == 7).all()
    assert (out[:, [0, -1]] == 7).all()
    return out[1:, 1:-1, 0], expected


def windows(shape: tuple[int, ...]) -> Iterator[tuple[slice, ...]]:
    rows, tokens, hidden = shape
    for steps in {(0, rows), (rows // 2, rows), (0, (rows + 1) // 2)}:
        for taken in {(0, tokens), (tokens // 3, tokens // 3 + (tokens + 1) // 2)}:
            yield slice(*steps), slice(*taken), slice(0, hidden)


def agree(coding: Chain, name: str, shape: tuple[int, ...], order: float) -> None:
    for bits in histories(name, shape):
        for window in windows(shape):
            got, expected = measured(coding, bits, window, order)
            assert got.dtype == expected.dtype
            np.testing.assert_array_equal(
                got.view(f"u{got.itemsize}"), expected.view(f"u{got.itemsize}")
            )


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("name", NATIVE_TYPES)
def test_by_the_loop_they_are_those_of_the_values(
    name: str, shape: tuple[int, ...], calls: Calls
) -> None:
    agree(chain(native_type(name), 3, small=True), name, shape, 2)
    can_be = NATIVE_TYPES[name].is_cut_off and name != "float64"
    assert bool(calls) == can_be


@pytest.mark.usefixtures("interpreted")
@pytest.mark.parametrize("order", [1, 2, np.inf])
@pytest.mark.parametrize("name", ["bfloat16", "float16", "float32"])
def test_without_it_they_are_the_same(name: str, order: float) -> None:
    agree(chain(native_type(name), 3, small=True), name, (4, 9, 6), order)


def test_chunks_that_lie_token_by_token_are_decoded_first(calls: Calls) -> None:
    coding = replace(chain(native_type("bfloat16"), 3, small=True), token_first=True)
    agree(coding, "bfloat16", (7, 30, 64), 2)
    assert not calls, "of several steps and tokens the vectors do not lie side by side"


def test_where_the_order_of_adding_up_may_matter_they_are_measured_again(calls: Calls) -> None:
    """A length of 25 bits, odd: halfway between two numbers of float32."""
    tie = 3 * 3_355_445, 4 * 3_355_445, 5 * 3_355_445
    assert tie[2] > 1 << 24
    assert np.float32(tie[0]) == tie[0]
    assert np.float32(tie[1]) == tie[1]
    vectors = np.zeros((2, 3, 8), "f4")
    vectors[1, 2, [1, 6]] = tie[:2]
    vectors[0, 0] = 1.5
    coding = chain(native_type("float32"), 3, small=True)
    got, expected = measured(coding, vectors.view("u4"), (slice(0, 2), slice(0, 3), slice(0, 8)), 2)
    np.testing.assert_array_equal(got, expected)
    assert got[1, 2] == np.float32(np.float64(tie[2]))
    assert calls == [False]
    measured(coding, vectors.view("u4"), (slice(0, 1), slice(0, 3), slice(0, 8)), 2)
    assert calls == [False, True]


def test_a_broken_chunk_is_an_error(calls: Calls) -> None:
    coding = chain(native_type("bfloat16"), 3, small=True)
    shape = (4, 9, 6)
    data = bytearray(coding.encode(random_bits(shape, 1), shape))
    data[40] ^= 1
    norms = ChunkNorms(Decoder(coding, shape), 2)
    window = tuple(slice(0, length) for length in shape)
    with pytest.raises(ValueError, match="checksum"):
        norms.decode(bytes(data), window, np.empty((4, 9, 1), norms.dtype))
    assert not calls
