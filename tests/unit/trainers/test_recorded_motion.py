from __future__ import annotations

from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")
from hypothesis import given  # noqa: E402
from hypothesis import strategies as st  # noqa: E402

from trainers.motion import token_norm, ulp, ulp_l1  # noqa: E402

pytestmark = pytest.mark.torch

SIGNED = {torch.bfloat16: torch.int16, torch.float16: torch.int16, torch.float32: torch.int32}


@pytest.mark.parametrize("dtype", SIGNED)
@given(pattern=st.integers(0, 2**32 - 1))
def test_ulp_is_the_distance_to_the_next_number(dtype: Any, pattern: int) -> None:
    width = torch.finfo(dtype).bits
    magnitude = pattern % 2 ** (width - 1)
    bits = torch.tensor([magnitude, magnitude + 1], dtype=torch.int64)
    pair = bits.to(SIGNED[dtype]).view(dtype)
    if not pair.isfinite().all():
        return
    distance = (pair[1].double() - pair[0].double()).item()
    assert ulp(pair[:1]).item() == distance
    assert ulp(-pair[:1]).item() == distance


def test_the_least_spacing_of_bfloat16() -> None:
    assert ulp(torch.zeros(1, dtype=torch.bfloat16)).item() == 2.0**-133
    assert ulp(torch.ones(1, dtype=torch.bfloat16)).item() == 2.0**-7


def test_norms_are_taken_in_float64() -> None:
    rng = np.random.default_rng(0)
    before, now = (torch.from_numpy(rng.normal(size=(50, 64)).astype("f4")) for _ in range(2))
    change = now.numpy().astype("f8") - before.numpy().astype("f8")
    expected = np.sqrt((change**2).sum(-1)).astype("f4")
    assert (token_norm(now, before).numpy() == expected).all()
    assert token_norm(now).dtype == torch.float32
    one = torch.ones(1, 3, dtype=torch.bfloat16)
    assert ulp_l1(one + 2**-7, one).item() == 3.0
