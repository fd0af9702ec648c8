from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
import xarray as xr
from lattice_models import hops_of, regime_of

from trajstore import analysis
from trajstore.errors import InvalidArgument


def widened(bits: np.ndarray) -> np.ndarray:
    return (bits.astype(np.uint32) << 16).view(np.float32)


def places_of(bits: np.ndarray) -> np.ndarray:
    """Signed index of each pattern, counted from zero."""
    magnitude = (bits & 0x7FFF).astype(np.int64)
    return np.where(bits >> 15, -magnitude, magnitude)


def test_hops_in_spacings(bits, chunks, make_run):
    ds = make_run(bits, chunks=chunks)
    hops = hops_of(widened(bits), "bfloat16")
    np.testing.assert_array_equal(analysis.lattice_displacement(ds), hops)
    with np.errstate(all="ignore"):
        norms = {
            1: np.abs(hops).sum(-1),
            2: np.sqrt((hops**2).sum(-1)),
            np.inf: np.abs(hops).max(-1),
        }
        for order, expected in norms.items():
            got = analysis.lattice_displacement(ds, ord=order).values
            assert got.dtype == np.float32
            np.testing.assert_allclose(got, expected.astype(np.float32), rtol=2e-7)


def test_hops_in_values(bits, chunks, make_run):
    ds = make_run(bits, chunks=chunks)
    hops = np.diff(places_of(bits), axis=0)
    got = analysis.lattice_displacement(ds, metric="ordinal")
    assert got.dtype == np.int64
    np.testing.assert_array_equal(got, hops)
    for order, expected in {1: np.abs(hops).sum(-1), np.inf: np.abs(hops).max(-1)}.items():
        norm = analysis.lattice_displacement(ds, metric="ordinal", ord=order)
        assert norm.dtype == np.int64
        np.testing.assert_array_equal(norm, expected)
    l2 = analysis.lattice_displacement(ds, metric="ordinal", ord=2)
    np.testing.assert_array_equal(l2, np.sqrt((hops.astype(float) ** 2).sum(-1)).astype("f4"))


def test_ordinal_hops_of_neighbors_are_one_across_every_boundary(make_run):
    # All 65,536 patterns but the NaNs, in the order of their values, and the next value of each.
    negative = np.arange(0xFF80, 0x7FFF, -1).astype(np.uint16)
    positive = np.arange(0x0001, 0x7F81).astype(np.uint16)
    climb = np.concatenate([negative, positive])
    ds = make_run(np.stack([climb[:-1], climb[1:]])[:, None])
    assert (analysis.lattice_displacement(ds, metric="ordinal") == 1).all()
    # Away from zero a step is one spacing; toward zero, half a spacing across a power of two.
    hops = analysis.lattice_displacement(ds).values.ravel()
    finite = hops[np.isfinite(hops)]
    assert set(np.unique(finite)) == {0.5, 1.0}


def test_regimes_and_counts(bits, chunks, make_run):
    dead = np.arange(bits.shape[1]) % 3 == 0
    ds = make_run(bits, is_dead=dead, chunks=chunks)
    hops = hops_of(widened(bits), "bfloat16")
    with np.errstate(all="ignore"):
        expected = np.array(
            [[regime_of(token) for token in row] for row in hops], dtype="<U9"
        ).reshape(hops.shape[:2])
    got = analysis.regimes(ds).compute()
    assert got.regime.dtype == np.int8
    names = np.array(got.regime.attrs["flag_meanings"].split())
    np.testing.assert_array_equal(names[got.regime.values], expected)
    assert got.regime.attrs["flag_values"].tolist() == [0, 1, 2, 3, 4]
    for name in names:
        np.testing.assert_array_equal(
            got.counts.sel(population="dead", regime_name=name), (expected[:, dead] == name).sum(1)
        )
    assert (got.counts.sel(population="all").sum("regime_name") == bits.shape[1]).all()

    order = list(analysis.REGIMES)
    ranks = np.array([[order.index(name) for name in row] for row in expected])
    for name, sign in {"heated": 1, "cooled": -1}.items():
        counted = (np.sign(np.diff(ranks.reshape(hops.shape[:2]), axis=0)) == sign)[:, dead].sum(1)
        mine = got[name].sel(population="dead").values
        np.testing.assert_array_equal(mine[1:], counted)
        assert (mine[:1] == -1).all()


def test_regimes_with_other_thresholds(bits, chunks, make_run):
    ds = make_run(bits, chunks=chunks)
    size = np.abs(hops_of(widened(bits), "bfloat16"))
    with np.errstate(all="ignore"):
        l1, l2, linf = size.sum(-1), np.sqrt((size**2).sum(-1)), size.max(-1)
        wanted = np.select(
            [l1 == 0, l1 <= 1, linf <= 3, l2 <= 40, l2 > 1000], [0, 1, 2, 3, 5], default=4
        )
    got = analysis.regimes(ds, neighbor=3, jump=40, far=1000).compute()
    np.testing.assert_array_equal(got.regime, wanted)
    assert got.regime.attrs["flag_meanings"].split() == [*analysis.REGIMES, "far"]
    np.testing.assert_array_equal(
        got.counts.sel(population="all", regime_name="far"), (wanted == 5).sum(1)
    )
    usual = analysis.regimes(ds, jump=np.sqrt(bits.shape[2]), neighbor=1).compute()
    xr.testing.assert_identical(usual, analysis.regimes(ds).compute())
    with pytest.raises(InvalidArgument, match="neighbor=1, jump=9 and far=5, expected positive"):
        analysis.regimes(ds, jump=9, far=5)


def test_exponents_that_change(bits, chunks, make_run):
    exponent = np.maximum((bits >> 7) & 0xFF, 1).astype(int)
    finite = exponent < 255
    known = finite[1:] & finite[:-1]
    got = analysis.exponent_crossings(make_run(bits, chunks=chunks)).compute()
    for name, sign in {"exponent_up": 1, "exponent_down": -1}.items():
        expected = (known & (np.sign(np.diff(exponent, axis=0)) == sign)).sum(-1)
        np.testing.assert_array_equal(got[name], expected)


def test_lifecycle_is_the_final_exit(bits, chunks, make_run):
    steps = np.arange(len(bits)) * 3 + 5
    ds = make_run(bits, steps=steps, chunks=chunks)
    regime = analysis.regimes(ds).regime.values
    got = analysis.lifecycle(ds).compute()
    for name, inside in {"last_jump": [4], "last_local": [3], "last_hop": [1, 2]}.items():
        for token in range(bits.shape[1]):
            rows = [r for r in range(len(regime)) if regime[r, token] in inside]
            expected = steps[rows[-1] + 1] if rows else -1
            assert got[name].values[token] == expected


def test_ulp_upward_is_the_distance_to_the_next_larger_number():
    bits = np.arange(1 << 16, dtype="u2")
    values = bits[bits & 0x7F80 != 0x7F80].view(ml_dtypes.bfloat16)
    up = np.nextafter(values, ml_dtypes.bfloat16(np.inf)).astype("f4")
    W = xr.DataArray(values.astype("f4"), dims="token", attrs={"native_dtype": "bfloat16"})
    largest = values == ml_dtypes.finfo(ml_dtypes.bfloat16).max
    got = analysis.ulp(W, direction="up").values
    np.testing.assert_array_equal(got[~largest], (up - W.values)[~largest])
    assert (got != analysis.ulp(W).values).sum() == 253  # negative powers of two
    with pytest.raises(InvalidArgument, match="got direction='down'"):
        analysis.ulp(W, direction="down")


def test_ulp_of_a_variable_and_of_a_run(make_run):
    values = np.float32([1.0, -3.0, 0.0, 2.0**-133, np.inf]).reshape(1, 1, 5)
    expected = [2.0**-7, 2.0**-6, 2.0**-133, 2.0**-133, np.nan]
    for native, chunks in (("bfloat16", None), ("bfloat16", (1, 1, 2))):
        ds = make_run(values, native=native, chunks=chunks)
        np.testing.assert_array_equal(analysis.ulp(ds).values.ravel(), np.float32(expected))
        np.testing.assert_array_equal(analysis.ulp(ds.W), analysis.ulp(ds))
    plain = xr.DataArray(np.float32([1.0, 1e-40]))
    np.testing.assert_array_equal(analysis.ulp(plain), np.spacing(plain.values))


def model(values, last, rows, columns, pool):
    ordered = values[:, np.argsort(last, kind="stable")]
    return [
        [pool(block) for block in np.split(band, columns, axis=1)]
        for band in np.split(ordered, rows, axis=0)
    ]


def test_groups_of_the_heatmap(make_run, walk):
    ds = make_run(walk(23, 11, 6), is_dead=np.arange(11) % 3 == 0, chunks=(6, 4, 3))
    last = analysis.freeze(ds).last_motion.values
    rows, columns = [5, 11, 16], [3, 7]
    regime = analysis.regimes(ds).regime.values

    def commonest(block):
        counts = np.bincount(block.ravel(), minlength=5)
        return np.flatnonzero(counts == counts.max()).max()

    found = analysis.heatmap(ds, most_steps=4, most_groups=3).compute()
    np.testing.assert_array_equal(found.update_size, model(regime, last, rows, columns, commonest))
    assert found.update_size.dtype == np.int8
    assert found.step.values.tolist() == [1, 6, 12, 17]
    assert found.steps.values.tolist() == [5, 6, 5, 6]
    assert found.tokens.values.tolist() == [3, 4, 4]
    np.testing.assert_array_equal(found.last_motion, np.sort(last)[[2, 6, 10]])
    dead = model(ds.is_dead.values[None], last, [], columns, np.mean)
    np.testing.assert_array_equal(found.dead_fraction, dead[0])
    assert "dead_fraction" not in analysis.heatmap(ds.drop_vars("is_dead"))
    hop = analysis.lattice_displacement(ds, ord=1).values
    found = analysis.heatmap(ds, "hop", most_steps=4, most_groups=3)
    np.testing.assert_allclose(
        found.update_size, model(hop, last, rows, columns, np.mean), rtol=1e-6
    )


def test_a_small_heatmap_is_not_pooled(make_run, walk):
    ds = make_run(walk(9, 5, 4))
    found = analysis.heatmap(ds)
    order = np.argsort(analysis.freeze(ds).last_motion.values, kind="stable")
    np.testing.assert_array_equal(found.update_size, analysis.regimes(ds).regime.values[:, order])


def test_a_heatmap_needs_two_rows(make_run, walk):
    with pytest.raises(InvalidArgument, match="at least 2 rows"):
        analysis.heatmap(make_run(walk(1, 5, 4)))
