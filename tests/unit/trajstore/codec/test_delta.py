from __future__ import annotations

import re
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as npst

from trajstore.codec.delta import fold, unfold
from trajstore.values.native_types import narrow, native_type

FORMAT = Path(__file__).parents[4] / "docs" / "reference" / "format.md"

EXAMPLE = np.array([[0x3F80, 0xBF80], [0x3F81, 0xBF80], [0x3F7F, 0x3F80]], np.uint16)
GOLDEN = "00 7f ff 80 02 00 00 00 03 00 ff ff"


def folded(bits: np.ndarray) -> np.ndarray:
    out = np.empty_like(bits)
    fold(bits, out)
    return out


def unfolded(bits: np.ndarray) -> np.ndarray:
    names = {2: "bfloat16", 4: "float32", 8: "float64"}
    native = native_type(names[bits.itemsize])
    out = np.empty(bits.shape, f"u{native.stored.itemsize}")
    unfold(bits, native, out)
    return narrow(out.view(native.stored), native)


def reference(bits: np.ndarray) -> np.ndarray:
    """The definition, with Python's integers."""
    width = 8 * bits.itemsize
    out = np.empty_like(bits)
    for index in np.ndindex(bits.shape):
        before = int(bits[(index[0] - 1, *index[1:])]) if index[0] else 0
        difference = (int(bits[index]) - before) % 2**width
        signed = difference - 2**width if difference >> (width - 1) else difference
        out[index] = 2 * signed if signed >= 0 else -2 * signed - 1
    return out


@given(
    npst.arrays(
        st.sampled_from([np.uint16, np.uint32, np.uint64]),
        npst.array_shapes(min_dims=1, max_dims=3, max_side=6),
    ),
    st.sampled_from([1, 24, 100, 1 << 20]),
    st.sampled_from([0, 3, 256]),
    st.integers(0, 5),
)
def test_folding_is_what_the_format_says_and_can_be_undone(
    bits: np.ndarray, group: int, short: int, start: int
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        # Groups of one row, of some, and of all; rows added up one by one, and at once.
        patch.setattr("trajstore.codec.delta._GROUP", group)
        patch.setattr("trajstore.codec.delta._SHORT", short)
        np.testing.assert_array_equal(folded(bits), reference(bits))
        np.testing.assert_array_equal(unfolded(folded(bits)), bits)
        start = min(start, len(bits) - 1)
        native = native_type({2: "bfloat16", 4: "float32", 8: "float64"}[bits.itemsize])
        later = np.empty_like(bits[start:])
        unfold(folded(bits), native, later, start)
        np.testing.assert_array_equal(later, bits[start:])


def test_the_bytes_of_the_worked_example_are_pinned() -> None:
    assert folded(EXAMPLE).astype("<u2").tobytes().hex(" ") == GOLDEN
    text = FORMAT.read_text()
    assert f"`{GOLDEN}`" in text
    rows = re.findall(r"\| step \d \| " + " \\| ".join(["([0-9A-F]{4})"] * 6), text)
    table = np.array([[int(cell, 16) for cell in row] for row in rows], np.uint16)
    np.testing.assert_array_equal(table[:, :2], EXAMPLE)
    np.testing.assert_array_equal(table[:, 4:], folded(EXAMPLE))
    values = EXAMPLE.view(ml_dtypes.bfloat16).astype(float)
    assert values.T.tolist() == [[1.0, 1.0078125, 0.99609375], [-1.0, -1.0, 1.0]]
