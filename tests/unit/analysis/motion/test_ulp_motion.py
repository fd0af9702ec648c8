from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
import xarray as xr
from bits_and_calls import nightly_but

from trajstore import analysis

TYPES = {"bfloat16": ml_dtypes.bfloat16, "float16": np.float16, "float32": np.float32}


def spacing_of(values: np.ndarray, native: str) -> np.ndarray:
    """From each magnitude to the next point above it; of the largest, from the one below."""
    kind = TYPES[native]
    size = np.abs(values).astype(kind)
    with np.errstate(invalid="ignore", over="ignore"):
        ends = np.nextafter(size, kind(np.inf)), np.nextafter(size, kind(0))
        at, above, below = (points.astype(np.float64) for points in (size, *ends))
        spacing = np.where(np.isinf(above), at - below, above - at)
    return np.where(np.isfinite(at), spacing, np.nan)


def hops_of(cells: np.ndarray, native: str) -> np.ndarray:
    """ΔW/spacing of each element of float32 cells; 0 for equal bits, and for −0 and +0."""
    before, after = cells[:-1], cells[1:]
    same = (before == after) | (before.view("u4") == after.view("u4"))
    with np.errstate(invalid="ignore"):
        change = after.astype(np.float64) - before.astype(np.float64)
    return np.where(same, 0, change / spacing_of(before, native))


def regimes_of(
    hops: np.ndarray, neighbor: float = 1, jump: float | None = None, far: float = np.inf
) -> np.ndarray:
    """Regime of each vector of hops, as its number."""
    size = np.abs(hops)
    with np.errstate(all="ignore"):
        l1, l2, linf = size.sum(-1), np.sqrt((size**2).sum(-1)), size.max(-1)
    limit = np.sqrt(hops.shape[-1]) if jump is None else jump
    rules = [l1 == 0, l1 <= 1, linf <= neighbor, l2 <= limit, l2 > far]
    return np.select(rules, [0, 1, 2, 3, 5], default=4)


def check_motion(ds: xr.Dataset, lattice: str = "native") -> np.ndarray:
    """Compare motion on a lattice with its definition, and return the hops."""
    native = ds.W.attrs["native_dtype"]
    of = native if lattice == "native" else lattice
    cells = ds.W.values
    with np.errstate(all="ignore"):
        if of != native:
            cells = cells.astype(TYPES[of]).astype(np.float32)
        hops = hops_of(cells, of)
        norms = {
            1: np.abs(hops).sum(-1),
            2: np.sqrt((hops**2).sum(-1)),
            np.inf: np.abs(hops).max(-1),
        }
        norms = {order: values.astype(np.float32) for order, values in norms.items()}
    np.testing.assert_array_equal(analysis.lattice_displacement(ds, lattice=lattice), hops)
    for order, expected in norms.items():
        got = analysis.lattice_displacement(ds, ord=order, lattice=lattice)
        assert got.dtype == np.float32
        assert got.attrs["units"] == f"{of} spacings"
        np.testing.assert_allclose(got, expected, rtol=2e-7)

    for held in (ds, ds.W):
        np.testing.assert_array_equal(analysis.ulp(held, lattice), spacing_of(cells, of))

    dead = ds.is_dead.values
    regime = regimes_of(hops)
    found = analysis.regimes(ds, lattice).compute()
    assert found.regime.dtype == np.int8
    assert found.regime.attrs["flag_values"].tolist() == [0, 1, 2, 3, 4]
    assert found.regime.attrs["flag_meanings"].split() == list(analysis.REGIMES)
    np.testing.assert_array_equal(found.regime, regime)
    for population, members in (("dead", dead), ("all", dead | True)):
        one = found.sel(population=population)
        for number, name in enumerate(analysis.REGIMES):
            counted = (regime[:, members] == number).sum(1)
            np.testing.assert_array_equal(one.counts.sel(regime_name=name), counted)
        for name, sign in {"heated": 1, "cooled": -1}.items():
            counted = (np.sign(np.diff(regime[:, members], axis=0)) == sign).sum(1)
            np.testing.assert_array_equal(one[name][1:], counted)
            assert (one[name][:1] == -1).all()

    moved = (hops != 0).any(-1)
    rest = analysis.freeze(ds, lattice=lattice)
    rows = np.arange(1, len(cells))[:, None]
    np.testing.assert_array_equal(rest.last_motion, np.where(moved, rows, -1).max(0, initial=-1))
    np.testing.assert_array_equal(rest.moves, moved.sum(0))
    last_jump = np.where(regime == 4, rows, -1).max(0, initial=-1)
    np.testing.assert_array_equal(analysis.lifecycle(ds, lattice).last_jump, last_jump)
    vectors = [len({token.tobytes() for token in row}) for row in cells]
    np.testing.assert_array_equal(analysis.distinct(ds, "all", lattice).distinct, vectors)
    clusters = analysis.clusters(ds, "all", lattice)
    np.testing.assert_array_equal(clusters.groups + clusters.singles, vectors)
    return hops


def test_motion_equals_its_definition(bits, chunks, make_run):
    ds = make_run(bits, is_dead=np.arange(bits.shape[1]) % 3 == 0, chunks=chunks)
    hops = check_motion(ds)
    got = analysis.regimes(ds, neighbor=3, jump=40, far=1000).compute()
    wanted = regimes_of(hops, 3, 40, 1000)
    np.testing.assert_array_equal(got.regime, wanted)
    assert got.regime.attrs["flag_meanings"].split() == [*analysis.REGIMES, "far"]
    far = got.counts.sel(population="all", regime_name="far")
    np.testing.assert_array_equal(far, (wanted == 5).sum(1))


def crawling(rows: int = 9, tokens: int = 6, hidden: int = 4) -> np.ndarray:
    """float32 weights that move by less than a bfloat16 cell, mostly."""
    rng = np.random.default_rng(1)
    W = rng.normal(0, 0.02, (tokens, hidden))
    scale = 10.0 ** rng.uniform(-7, -3, (tokens, 1))
    return np.cumsum([W] + [rng.normal(0, scale, W.shape) for _ in range(rows - 1)], 0).astype("f4")


def oddities() -> np.ndarray:
    """Ties, −0, NaN, infinities, subnormals: (10, 8, 2)."""
    W = np.ones((10, 8, 2), np.float32)
    cell = np.float32(2.0**-7)
    W[1:, 0, 0] += cell / 2  # a tie, to the even 1
    W[1:, 1, 0] += 3 * cell / 2  # a tie, up to the even 1 + 2 cells
    W[2:, 2, 0] += np.nextafter(cell / 2, np.float32(1))  # just above the tie
    W[:, 3] = np.where(np.arange(10) % 2, -0.0, 0.0)[:, None]  # no motion
    W[:, 4, 0] = np.float32(2.0**-149) * np.arange(10)  # below the least of all 16-bit types
    W[:, 5, 0] = np.float32(2.0**-134) * np.arange(10)  # ties between subnormals
    W[3:, 6, 0] = np.nan
    W[4:6, 6, 1] = np.inf
    W[1:, 7, 0] = np.float32(3.4e38) * np.linspace(0.1, 1, 9)  # beyond float16, then beyond all
    W[-1, 7, 0] = np.finfo(np.float32).max
    return W


def any_bits() -> np.ndarray:
    bits = np.random.default_rng(5).integers(0, 1 << 32, (6, 5, 3), dtype=np.uint32)
    # Half of them are a few units from the previous row.
    near = np.random.default_rng(6).integers(0, 1 << 15, (6, 5, 3), dtype=np.uint32)
    return np.where(np.arange(5)[:, None] % 2, bits, bits[0] + near.cumsum(0)).view(np.float32)


@pytest.mark.parametrize("made", [crawling, oddities, any_bits])
@pytest.mark.parametrize("lattice", nightly_but(TYPES, "bfloat16", "float16"))
def test_motion_on_another_lattice_equals_its_definition(made, lattice, make_run):
    W = made()
    W[np.isnan(W)] = np.nan  # payloads have a separate test
    dead = np.arange(W.shape[1]) % 2 == 0
    check_motion(make_run(W, native="float32", is_dead=dead, chunks=(4, 3, -1)), lattice)


def test_hops_in_values(bits, chunks, make_run):
    ds = make_run(bits, chunks=chunks)
    magnitude = (bits & 0x7FFF).astype(np.int64)
    hops = np.diff(np.where(bits >> 15, -magnitude, magnitude), axis=0)
    got = analysis.lattice_displacement(ds, metric="ordinal")
    assert got.dtype == np.int64
    np.testing.assert_array_equal(got, hops)
    for order, expected in {1: np.abs(hops).sum(-1), np.inf: np.abs(hops).max(-1)}.items():
        norm = analysis.lattice_displacement(ds, metric="ordinal", ord=order)
        assert norm.dtype == np.int64
        np.testing.assert_array_equal(norm, expected)
    l2 = analysis.lattice_displacement(ds, metric="ordinal", ord=2)
    np.testing.assert_array_equal(l2, np.sqrt((hops.astype(float) ** 2).sum(-1)).astype("f4"))


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
    phases = {"last_jump": [4], "last_local": [3], "last_hop": [1, 2]}
    for far, more in ((None, {}), (50, {"last_far": [5]})):
        regime = analysis.regimes(ds, far=far).regime.values
        got = analysis.lifecycle(ds, far=far).compute()
        assert set(got) == {*phases, *more}
        for name, inside in (phases | more).items():
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
    whole = regime[:, np.argsort(last, kind="stable")]
    np.testing.assert_array_equal(analysis.heatmap(ds).update_size, whole)

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
