"""The fast path to the regimes of a 16-bit type, compared with the general one."""

from __future__ import annotations

import numpy as np
import pytest

from trajstore.analysis.scan import rows
from trajstore.values.native_types import native_type, widen


def walk(
    rng: np.random.Generator, hidden: int, native: str, longest: int
) -> tuple[np.ndarray, np.ndarray]:
    """Rows of stored values that hop between neighbors, also across binades and zero."""
    tokens = 300 if hidden < 1000 else 30
    start = rng.integers(0, 1 << 16, (tokens, hidden))
    powers = (rng.integers(0, 16 if native == "bfloat16" else 6, (tokens, hidden)) << 7) + 1
    start[: tokens // 3] = powers[: tokens // 3]  # a hop away from a power of two, or subnormal
    start[tokens // 3 : tokens // 2] &= 0x8003  # around zero
    hops = rng.integers(-longest, longest + 1, (6, tokens, hidden))
    hops *= rng.random((6, tokens, 1)) < rng.random((1, tokens, 1))  # some vectors are unchanged
    hops *= rng.random((6, tokens, hidden)) < rng.random((1, tokens, 1)) ** 3  # or most of one
    bits = ((start + np.cumsum(hops, 0)) & 0xFFFF).astype(np.uint16)
    stored = np.empty(bits.shape, np.float32)
    widen(bits, native_type(native), out=stored.view(np.uint32))
    return stored[1:], stored[:1]


@pytest.mark.parametrize("longest", [1, 2, 12, 200])
@pytest.mark.parametrize("hidden", [1, 3, 8, 64, 130, 4096])
@pytest.mark.parametrize("native", ["bfloat16", "float16"])
def test_regimes_in_float32_are_those_in_float64(
    native: str, hidden: int, longest: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows, boundary = walk(np.random.default_rng(hidden * longest), hidden, native, longest)
    short = rows.measure_pairs(rows, boundary, ("regime",), native)["regime"]
    monkeypatch.setattr(rows, "_LONGEST_VECTOR", 0)
    long = rows.measure_pairs(rows, boundary, ("regime",), native)["regime"]
    np.testing.assert_array_equal(short, long)
    if hidden >= 8 and longest <= 12:
        assert len(np.unique(long)) >= 3  # or the test shows little


@pytest.mark.parametrize("hidden", [7, 8, 8 * 254, 8 * 255, 8 * 256])
def test_motion_is_seen_in_vectors_of_any_length(hidden: int) -> None:
    tile = np.zeros((2, 3, hidden), np.float32)
    tile[1, 1, -1] = 1
    tile[1, 2] = 1
    moved = rows.measure_pairs(tile[1:], tile[:1], ("moved",), "float32")["moved"]
    assert moved.tolist() == [[False, True, True]]
