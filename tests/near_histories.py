"""Histories whose vectors are near each other, for questions about neighbors."""

from __future__ import annotations

import numpy as np
import xarray as xr
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

# Near each other, across zero and across a power of two; NaN and infinity.
BITS = st.sampled_from([0, 0x8000, 1, 0x8001, 0x3F7F, 0x3F80, 0x3F81, 0x3F83, 0x7F80, 0x7FC0])


@st.composite
def near_histories(draw: st.DrawFn) -> xr.Dataset:
    rows, tokens, hidden = draw(st.integers(1, 2)), draw(st.integers(1, 8)), draw(st.integers(1, 2))
    bits = draw(arrays(np.uint16, (rows, tokens, hidden), elements=BITS))
    W = (bits.astype(np.uint32) << 16).view(np.float32)
    ds = xr.Dataset(
        {"W": (("step", "token", "hidden"), W, {"native_dtype": "bfloat16"})},
        coords={
            "step": np.arange(rows) * 2,
            "token": np.array(draw(st.permutations(range(tokens)))),
            "is_dead": ("token", draw(arrays(bool, tokens))),
        },
    )
    return ds.chunk({dim: draw(st.integers(1, size)) for dim, size in ds.sizes.items()})
