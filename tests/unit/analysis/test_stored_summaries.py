"""What a recorder stores and what the analysis computes are one thing, to the last bit."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from trajstore.summaries import step_norm, token_norm, ulp_l1

torch = pytest.importorskip("torch")
motion = pytest.importorskip("trainers.motion", reason="no summaries are recorded here")
pytestmark = pytest.mark.torch


@pytest.mark.parametrize("scale", [1.0, 1e-4, 1e-20])
@pytest.mark.parametrize("hidden", [1, 7, 64])
def test_summaries_of_a_recorder_agree(scale, hidden, walk):
    bits = walk(12, 40, hidden)
    # Bits are scaled by a power of two near `scale`, which keeps them bfloat16.
    factor = np.float32(2.0 ** np.round(np.log2(scale)))
    history = (bits.astype(np.uint32) << 16).view(np.float32) * factor
    history = torch.from_numpy(history).bfloat16()
    for before, after in itertools.pairwise(history):
        x, y = before.float().numpy(), after.float().numpy()
        np.testing.assert_array_equal(motion.token_norm(after).numpy(), token_norm(y))
        np.testing.assert_array_equal(motion.token_norm(after, before).numpy(), step_norm(x, y))
        np.testing.assert_array_equal(
            motion.ulp_l1(after, before).numpy(), ulp_l1(x, y, "bfloat16")
        )
