"""Stored summaries and computed ones agree in every bit."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from trajstore.analysis.scan.rows import measure_pairs, measure_rows
from trajstore.values.native_types import NATIVE_TYPES, native_type, widen

torch = pytest.importorskip("torch")
motion = pytest.importorskip(
    "trajstore.trainers.recording.device_summaries", reason="no summaries are recorded here"
)
pytestmark = pytest.mark.torch


@pytest.mark.parametrize("name", NATIVE_TYPES)
def test_computed_and_recorded_values_agree(name):
    native, rng = native_type(name), np.random.default_rng(0)
    bits = rng.integers(0, 2 * native.sign_mask, (8, 40, 33), native.bits, endpoint=False)
    bits[:, :10] &= ~native.bits.type(1 << (native.mantissa_bits + 1))  # no infinity, no NaN
    for row in range(1, len(bits)):
        rest = rng.random((40, 1)) < 0.5
        bits[row] = np.where(rest, bits[row - 1], bits[row])
    rows = torch.from_numpy(bits.view(f"i{native.itemsize}")).view(getattr(torch, name))
    stored = widen(bits, native)
    with np.errstate(over="ignore"):
        lengths = measure_rows(stored).astype(np.float32)
        ways = measure_pairs(stored[1:], stored[:1], ("step_norm", "ulp_1"), name)
        ways = {field: ways[field].astype(np.float32) for field in ways.dtype.names}
    for row, (before, after) in enumerate(itertools.pairwise(rows)):
        for got, expected in (
            (motion.token_norm(before), lengths[row]),
            (motion.token_norm(after, before), ways["step_norm"][row]),
            (motion.ulp_l1(after, before), ways["ulp_1"][row]),
        ):
            np.testing.assert_array_equal(got.numpy().view("u4"), expected.view("u4"))
