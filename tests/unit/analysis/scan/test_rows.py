"""The fast path to the regimes of a 16-bit type, native types, and running states."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
from bits_and_calls import nightly_but
from held_arrays import BLOCK, held_at_most, made_of_blocks

from trajstore import analysis
from trajstore.analysis.scan.rows import measure_pairs, measure_rows, on_lattice, regime_of_hops
from trajstore.errors import InvalidArgument
from trajstore.values import norms
from trajstore.values.native_types import NATIVE_TYPES, native_type, widen
from trajstore.values.norms import ulp_hops


def walk(
    rng: np.random.Generator, hidden: int, native: str, longest: int
) -> tuple[np.ndarray, np.ndarray]:
    """Rows of stored values that hop between neighbors, also across binades and zero."""
    tokens = 300 if hidden < 1000 else 30
    start = rng.integers(0, 1 << 16, (tokens, hidden))
    powers = (rng.integers(0, 16 if native == "bfloat16" else 6, (tokens, hidden)) << 7) + 1
    start[: tokens // 3] = powers[: tokens // 3]  # a hop away from a power of two, or subnormal
    start[tokens // 3 : tokens // 2] &= 0x8003  # around zero
    hops = rng.integers(-longest, longest + 1, (6, tokens, hidden))
    hops *= rng.random((6, tokens, 1)) < rng.random((1, tokens, 1))  # some vectors are unchanged
    hops *= rng.random((6, tokens, hidden)) < rng.random((1, tokens, 1)) ** 3  # or most of one
    bits = ((start + np.cumsum(hops, 0)) & 0xFFFF).astype(np.uint16)
    stored = np.empty(bits.shape, np.float32)
    widen(bits, native_type(native), out=stored.view(np.uint32))
    return stored[1:], stored[:1]


@pytest.mark.parametrize(
    ("hidden", "longest"),
    [(1, 12), (3, 200), (8, 12), (130, 12), (4096, 1), (4096, 200)],
)
@pytest.mark.parametrize("native", ["bfloat16", "float16"])
def test_regimes_in_float32_are_those_in_float64(native: str, hidden: int, longest: int) -> None:
    rows, boundary = walk(np.random.default_rng(hidden * longest), hidden, native, longest)
    short = measure_pairs(rows, boundary, ("regime",), native)["regime"]
    long = regime_of_hops(ulp_hops(np.concatenate([boundary, rows[:-1]]), rows, native))
    np.testing.assert_array_equal(short, long)
    if hidden >= 8 and longest <= 12:
        assert len(np.unique(long)) >= 3  # or the test shows little


@pytest.mark.parametrize("hidden", [7, 8, 8 * 254, 8 * 255, 8 * 256])
def test_motion_is_seen_in_vectors_of_any_length(hidden: int) -> None:
    tile = np.zeros((2, 3, hidden), np.float32)
    tile[1, 1, -1] = 1
    tile[1, 2] = 1
    moved = measure_pairs(tile[1:], tile[:1], ("moved",), "float32")["moved"]
    assert moved.tolist() == [[False, True, True]]


def test_payloads_of_nan_count_as_far_as_the_lattice_holds_them(make_run):
    bits = np.full((3, 2, 1), 0x7FC00000, np.uint32)
    bits[1:, 0] |= 1 << 20  # a bit that bfloat16 has
    bits[1:, 1] |= 1  # a bit that it does not have
    ds = make_run(bits.view(np.float32), native="float32")
    np.testing.assert_array_equal(analysis.freeze(ds).moves, [1, 1])
    np.testing.assert_array_equal(analysis.freeze(ds, lattice="bfloat16").moves, [1, 0])
    signalling = np.array([0x7F800001], np.uint32).view(np.float32)
    assert np.isnan(on_lattice(signalling, "W", "float32", "bfloat16")).all(), "no infinity"


SINGLES = np.random.default_rng(1).normal(0, 0.02, (9, 6, 4)).astype("f4")


def test_a_native_type_that_the_values_contradict_is_refused(make_run, walk):
    names = "regimes freeze lifecycle distinct ulp lattice_displacement clusters"
    for native, lattice in (("bfloat16", "native"), ("float16", "bfloat16")):
        ds = make_run(SINGLES, native=native, chunks=(3, 2, -1))
        for name in names.split():
            with pytest.raises(InvalidArgument, match=rf"native_dtype of W is {native}.*are not"):
                getattr(analysis, name)(ds, lattice=lattice).compute()
        analysis.speed(ds).compute()  # does not depend on the type
    ds = make_run(walk(6, 4, 3))
    assert analysis.freeze(ds.assign(W=ds.W.assign_attrs(native_dtype="float32"))).moves.any()
    ds["W"][4, 2, 1] = 0.1  # a single wrong value
    with pytest.raises(
        InvalidArgument, match=r"1 of 72 checked values.*first is 0\.1.*stored as float32"
    ):
        analysis.freeze(ds).compute()


@pytest.mark.parametrize(
    ("stored", "native", "value"),
    [("float16", "bfloat16", 1 + 2.0**-10), ("bfloat16", "float16", 1e-30)],
)
def test_a_wrong_native_type_of_the_same_size_is_refused(stored, native, value, make_run):
    W = SINGLES.astype(getattr(ml_dtypes, stored, stored))
    W[0, 0, 0] = value
    for values in (W, W.astype(np.float32)):
        ds = make_run(W.astype(np.float32), native=native)
        ds["W"] = ds.W.copy(data=values)
        for held in (ds, ds.chunk(step=3)):
            with pytest.raises(InvalidArgument, match=rf"native_dtype of W is {native}"):
                analysis.freeze(held).compute()
        with pytest.raises(InvalidArgument, match=f"stored as {values.dtype}"):
            on_lattice(values, "W", native, native)
    assert on_lattice(W, "W", stored, stored) is W


def test_a_float64_history_is_rounded_too(make_run):
    W = SINGLES.astype(np.float64) * (1 + 1e-12)
    ds = make_run(W, native="float64")
    single = make_run(W.astype(np.float32), native="float32")
    for lattice in ("bfloat16", "float16", "float32"):
        got = analysis.lattice_displacement(ds, "ordinal", 1, lattice)
        assert got.equals(analysis.lattice_displacement(single, "ordinal", 1, lattice))
    with pytest.raises(InvalidArgument, match="float64"):
        analysis.lattice_displacement(ds, "ordinal")


def test_the_stored_summary_is_of_the_own_lattice_only(make_run, walk):
    ds = make_run(walk(6, 4, 3))
    lied = ds.assign(W_ulp_l1=(("step", "token"), np.zeros((6, 4), np.float32)))
    for own in ("native", "bfloat16"):
        assert analysis.freeze(lied, lattice=own).moves.sum() == 0
        assert (analysis.lattice_displacement(lied, ord=1, lattice=own) == 0).all()
    for other in ("float32", "float16"):
        assert analysis.freeze(lied, lattice=other).equals(analysis.freeze(ds, lattice=other))
        got = analysis.lattice_displacement(lied, ord=1, lattice=other)
        assert got.equals(analysis.lattice_displacement(ds, ord=1, lattice=other))


@pytest.mark.parametrize(
    "case",
    nightly_but([("pca", 1), ("pca", 5), ("path_efficiency", 2)], ("path_efficiency", 2)),
    ids=str,
)
def test_no_worker_reads_ahead_of_a_running_state(case: tuple[str, int]) -> None:
    name, workers = case
    few, many = (
        held_at_most(
            lambda rows=rows: analysis.compute(made_of_blocks(rows), [name]).sum().compute(),
            workers,
        )
        for rows in (16, 48)
    )
    assert many < few + BLOCK / 2
    assert many < (2.5 + 1.5 * workers) * BLOCK


@pytest.mark.parametrize("name", ["adjacency", "nearest_distance"])
def test_rows_of_few_tokens_are_one_task(name: str) -> None:
    whole = made_of_blocks(16).load()
    few, many = (
        len(dict(analysis.compute(block.chunk(), [name]).__dask_graph__()))
        for block in (whole.isel(step=slice(2)), whole)
    )
    assert many == few


@pytest.mark.parametrize("name", NATIVE_TYPES)
def test_measured_rows_have_the_bits_of_values_norms(name):
    native, rng = native_type(name), np.random.default_rng(0)
    bits = rng.integers(0, 2 * native.sign_mask, (8, 40, 33), native.bits, endpoint=False)
    bits[:, :10] &= ~native.bits.type(1 << (native.mantissa_bits + 1))  # no infinity, no NaN
    for row in range(1, len(bits)):
        rest = rng.random((40, 1)) < 0.5
        bits[row] = np.where(rest, bits[row - 1], bits[row])
    stored = widen(bits, native)
    pair = stored[:-1], stored[1:]
    ways = measure_pairs(stored[1:], stored[:1], ("step_norm", "ulp_1"), name)
    np.testing.assert_array_equal(measure_rows(stored), norms.token_norm(stored))
    np.testing.assert_array_equal(ways["step_norm"], norms.step_norm(*pair))
    np.testing.assert_array_equal(ways["ulp_1"], norms.ulp_l1(*pair, name))
