"""Any gradients and any recorded moments: the exact moments and counterfactuals, by a model."""

from __future__ import annotations

import os

import numpy as np
import xarray as xr
from adam_runs import attributed_by_hand, by_hand
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from trajstore import analysis

# Zeros of both signs, subnormals, infinities, NaN; and values whose moments rest and move.
BITS = st.one_of(
    st.sampled_from([0, 0x8000, 1, 0x3F80, 0xBF80, 0x3F81, 0x3A80, 0x7F80, 0x7FC0, 0xFF81]),
    st.integers(0, 0xFFFF),
)


several = settings(max_examples=int(os.environ.get("TRAJSTORE_EXAMPLES", "4")), deadline=None)


@st.composite
def histories(draw: st.DrawFn) -> tuple[xr.Dataset, xr.Dataset]:
    """A history of moments that hold any bits, and the same in chunks."""
    rows, tokens, hidden = (draw(st.integers(1, most)) for most in (5, 3, 2))
    dims = ("step", "token", "hidden")
    first = draw(st.sampled_from([0, 0, 5]))

    def matrix() -> tuple[tuple[str, ...], np.ndarray, dict[str, str]]:
        bits = draw(arrays(np.uint16, (rows, tokens, hidden), elements=BITS))
        for row in range(1, rows):
            if draw(st.booleans()):
                bits[row] = bits[row - 1]
        return dims, (bits.astype(np.uint32) << 16).view(np.float32), {"native_dtype": "bfloat16"}

    ds = xr.Dataset(
        {name: matrix() for name in ("W", "grad", "exp_avg", "exp_avg_sq")},
        coords={
            "step": first + np.arange(rows),
            "is_dead": ("token", draw(arrays(bool, tokens))),
        },
    )
    factors = draw(arrays(np.float32, rows, elements=st.sampled_from([1.0, 0.5, 0.2509765625])))
    ds = ds.assign(clip_coef=("step", factors), lr=("step", np.full(rows, 1e-3)))
    if first == 0 and draw(st.booleans()):
        ds = ds.assign(skipped=("step", draw(arrays(bool, rows)).astype(np.float32)))
    hyperparameters = {
        "betas": draw(st.sampled_from([(0.9, 0.999), (0.0, 0.5)])),
        "eps": 1e-8,
        "weight_decay": draw(st.sampled_from([0.0, 0.1])),
        "maximize": draw(st.booleans()),
    }
    kind = draw(st.sampled_from(["Adam", "AdamW"]))
    ds = ds.assign_attrs(optimizer={"class": kind, "hyperparameters": hyperparameters})
    return ds, ds.chunk({dim: draw(st.integers(1, size)) for dim, size in ds.sizes.items()})


@several
@given(histories())
def test_exact_moments(history: tuple[xr.Dataset, xr.Dataset]) -> None:
    ds, lazy = history
    with np.errstate(all="ignore"):
        for name, expected in by_hand(ds).items():
            for run in (ds, lazy):
                got = analysis.exact_moments(run)[f"exact_{name}"].compute(scheduler="sync")
                np.testing.assert_array_equal(got, expected)


@several
@given(histories(), st.integers(1, 4))
def test_freeze_attribution(history: tuple[xr.Dataset, xr.Dataset], window: int) -> None:
    ds, lazy = history
    got = analysis.freeze_attribution(lazy, window=window).compute(scheduler="sync")
    whole = analysis.freeze_attribution(ds, window=window).compute(scheduler="sync")
    xr.testing.assert_identical(got, whole)
    with np.errstate(all="ignore"):
        for name, expected in attributed_by_hand(ds, window).items():
            np.testing.assert_array_equal(got[name], expected, err_msg=name)
