"""The loop as Python runs it, uncompiled, so that what it does is seen line by line."""

from __future__ import annotations

import numpy as np
import pytest
from bits_and_calls import random_bits

from trajstore.codec.delta import fold
from trajstore.codec.norm_loop import measure_vectors
from trajstore.values.native_types import native_type, widen
from trajstore.values.token_norms import rounding_slack, token_norm


@pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning")
@pytest.mark.parametrize("start", [0, 2])
@pytest.mark.parametrize("width", [3, 500, 800])
def test_it_measures_vectors_of_differences(width: int, start: int) -> None:
    bits = random_bits((4, 5, width), 3) & np.uint16(0x78FF)  # lengths that fit
    folded = np.empty_like(bits)
    fold(bits, folded)
    out, unsure = np.full((4 - start, 5), -1, "f4"), np.full(1, 7, "u1")
    slack = rounding_slack(width)
    arguments = 5 * width, folded.shape, start, np.uint32(16), slack, out.reshape(-1), unsure
    measure_vectors(folded.reshape(-1), *arguments)
    expected = token_norm(widen(bits, native_type("bfloat16")))[start:]
    assert unsure[0] == 0
    np.testing.assert_array_equal(out, expected)
    # With so much slack each length may round otherwise.
    measure_vectors(folded.reshape(-1), *arguments[:4], 1e-6, *arguments[5:])
    assert unsure[0] == 1
