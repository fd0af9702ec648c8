"""Any gradients and any recorded moments: the exact ones, and what was left, by a model."""

from __future__ import annotations

import os

import numpy as np
import xarray as xr
from adam_runs import attributed_by_hand
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from trajstore import analysis

# Zeros of both signs, subnormals, infinities, NaN; and values whose moments rest and move.
BITS = st.one_of(
    st.sampled_from([0, 0x8000, 1, 0x3F80, 0xBF80, 0x3F81, 0x3A80, 0x7F80, 0x7FC0, 0xFF81]),
    st.integers(0, 0xFFFF),
)


several = settings(max_examples=int(os.environ.get("TRAJSTORE_EXAMPLES", "5")), deadline=None)


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


def targets(ds: xr.Dataset) -> dict[str, np.ndarray]:
    """What the moments are the moving averages of, float64."""
    given = ds.attrs["optimizer"]["hyperparameters"]
    product = (ds.grad.values * ds.clip_coef.values[:, None, None]).view(np.uint32)
    half = 0x7FFF + ((product >> 16) & 1)
    rounded = ((product + half) & np.uint32(0xFFFF0000)).view(np.float32).astype(np.float64)
    g = np.where(np.isnan(product.view(np.float32)), np.nan, rounded)
    g = -g if given["maximize"] else g
    if ds.attrs["optimizer"]["class"] == "Adam" and given["weight_decay"]:
        g[1:] += given["weight_decay"] * ds.W.values[:-1].astype(np.float64)
    return {"exp_avg": g, "exp_avg_sq": g * g}


def skips(ds: xr.Dataset, row: int) -> bool:
    return "skipped" in ds and ds.skipped.values[row] == 1


@several
@given(histories())
def test_exact_moments(history: tuple[xr.Dataset, xr.Dataset]) -> None:
    ds, lazy = history
    with np.errstate(all="ignore"):
        for number, (name, x) in enumerate(targets(ds).items()):
            beta = ds.attrs["optimizer"]["hyperparameters"]["betas"][number]
            moment = np.zeros(x.shape[1:])
            if ds.step[0] != 0:
                moment = ds[name].values[0].astype(np.float64)
            expected = [moment]
            for row in range(1, len(x)):
                expected.append(
                    expected[-1] if skips(ds, row) else beta * expected[-1] + (1 - beta) * x[row]
                )
            for run in (ds, lazy):
                got = analysis.exact_moments(run)[f"exact_{name}"].compute(scheduler="sync")
                np.testing.assert_array_equal(got, np.stack(expected))


@several
@given(histories())
def test_moment_stuck(history: tuple[xr.Dataset, xr.Dataset]) -> None:
    ds, lazy = history
    got = analysis.moment_stuck(lazy).compute(scheduler="sync")
    xr.testing.assert_identical(got, analysis.moment_stuck(ds).compute(scheduler="sync"))
    assert got.sizes["step"] == ds.sizes["step"] - 1
    with np.errstate(all="ignore"):
        for name, x in targets(ds).items():
            wide = ds[name].values.astype(np.float64)
            change = x[1:] - wide[:-1]
            meant = np.isfinite(change) & (change != 0)
            for row in range(len(meant)):
                meant[row] &= not skips(ds, row + 1)
            left = meant & (wide[1:] == wide[:-1])
            found = got.sel(variable=name, population="all")
            np.testing.assert_array_equal(found.meant_fraction, meant.mean((1, 2)))
            np.testing.assert_array_equal(
                found.stuck_fraction, left.sum((1, 2)) / meant.sum((1, 2))
            )
    assert not ((got.update_lost < 0) | (got.update_lost > 1)).any()


@several
@given(histories())
def test_moment_error_does_not_depend_on_chunks(history: tuple[xr.Dataset, xr.Dataset]) -> None:
    ds, lazy = history
    got = analysis.moment_error(lazy).compute(scheduler="sync")
    xr.testing.assert_identical(got, analysis.moment_error(ds).compute(scheduler="sync"))
    for population in ("dead", "live"):
        if not (ds.is_dead == (population == "dead")).any():
            assert got.sel(population=population).isnull().to_array().all()
    exact = {"exp_avg": ds.exp_avg, "exp_avg_sq": ds.exp_avg_sq}
    for name, array in analysis.exact_moments(ds).items():
        moment = str(name).removeprefix("exact_")
        exact[moment] = ds[moment].copy(data=array.values).assign_attrs(native_dtype="float64")
    right = analysis.moment_error(ds.assign(exact)).sel(population="all").compute()
    # Moments that are exact have no error; but where they are not finite there is no ratio.
    finite = np.stack([np.isfinite(exact[name].values).all((1, 2)) for name in right.moment.values])
    assert (right.ratio_quantiles.values[finite.T] == 1).all()


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
