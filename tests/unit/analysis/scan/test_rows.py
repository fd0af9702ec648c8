"""The fast path to the regimes of a 16-bit type, compared with the general one."""

from __future__ import annotations

import itertools

import dask.array as da
import ml_dtypes
import numpy as np
import pytest
from bits_and_calls import nightly_but
from held_arrays import BLOCK, held_at_most, made_of_blocks
from lattice_models import TYPES, hops_of, nearest, regime_of, spacing_of

from trajstore import analysis
from trajstore.analysis.scan.block_tasks import fold
from trajstore.analysis.scan.rows import measure_pairs, measure_rows, on_lattice, regime_of_hops
from trajstore.errors import InvalidArgument
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
    [(1, 12), (3, 200), (8, 1), (8, 12), (64, 200), (130, 12), (4096, 1), (4096, 200)],
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


HISTORIES = {"crawling": crawling, "oddities": oddities, "any bits": any_bits}


def values_of(history):
    values = HISTORIES[history]()
    # All NaN are equal here; payloads have a separate test.
    return np.where(np.isnan(values), np.float32(np.nan), values)


@pytest.mark.parametrize(
    "case",
    nightly_but(
        itertools.product(HISTORIES, ["bfloat16", "float16", "float32"]),
        ("crawling", "bfloat16"),
        ("oddities", "bfloat16"),
        ("oddities", "float16"),
        ("any bits", "float32"),
    ),
    ids=str,
)
def test_motion_on_another_lattice_equals_its_definition(case, make_run):
    history, lattice = case
    W = values_of(history)
    dead = np.arange(W.shape[1]) % 2 == 0
    ds = make_run(W, native="float32", is_dead=dead, chunks=(4, 3, -1))
    cells = nearest(W, lattice)
    hops = hops_of(cells, lattice)
    moved = np.array([[any(hop != 0 for hop in token) for token in row] for row in hops])

    np.testing.assert_array_equal(analysis.lattice_displacement(ds, lattice=lattice), hops)
    l1 = analysis.lattice_displacement(ds, ord=1, lattice=lattice)
    with np.errstate(over="ignore"):
        np.testing.assert_allclose(l1, np.abs(hops).sum(-1).astype("f4"), rtol=2e-7)
    assert l1.attrs["units"] == f"{lattice} spacings"

    spacings = [spacing_of(value, lattice) for value in cells.ravel()]
    got = analysis.ulp(ds, lattice).values
    np.testing.assert_array_equal(got, np.reshape(spacings, W.shape).astype("f4"))
    np.testing.assert_array_equal(analysis.ulp(ds.W, lattice), got)

    names = np.array(analysis.REGIMES)
    found = analysis.regimes(ds, lattice)
    expected = np.array([[regime_of(token) for token in row] for row in hops])
    np.testing.assert_array_equal(names[found.regime.values], expected)
    for name in names:
        counts = found.counts.sel(population="dead", regime_name=name)
        np.testing.assert_array_equal(counts, (expected[:, dead] == name).sum(-1))

    rest = analysis.freeze(ds, lattice=lattice)
    rows = np.arange(1, len(W))[:, None]
    np.testing.assert_array_equal(rest.last_motion, np.where(moved, rows, -1).max(0))
    np.testing.assert_array_equal(rest.moves, moved.sum(0))
    np.testing.assert_allclose(rest.unchanged_fraction.sel(population="all"), 1 - moved.mean(1))

    last_jump = np.where(expected == "jump", rows, -1).max(0)
    np.testing.assert_array_equal(analysis.lifecycle(ds, lattice).last_jump, last_jump)

    distinct = analysis.distinct(ds, "all", lattice).distinct
    as_bytes = [len({token.tobytes() for token in row}) for row in cells]
    np.testing.assert_array_equal(distinct, as_bytes)


@pytest.mark.parametrize("metric", ["ulp", "ordinal"])
def test_cells_of_float32_master_weights_are_those_of_their_cast(metric, make_run):
    W = crawling()
    cast = W.astype(ml_dtypes.bfloat16).view(np.uint16)
    masters, half = make_run(W, native="float32"), make_run(cast)
    for order in (None, 1, 2, np.inf):
        got = analysis.lattice_displacement(masters, metric, order, "bfloat16")
        assert got.equals(analysis.lattice_displacement(half, metric, order))


def test_payloads_of_nan_count_as_far_as_the_lattice_holds_them(make_run):
    bits = np.full((3, 2, 1), 0x7FC00000, np.uint32)
    bits[1:, 0] |= 1 << 20  # a bit that bfloat16 has
    bits[1:, 1] |= 1  # a bit that it does not have
    ds = make_run(bits.view(np.float32), native="float32")
    np.testing.assert_array_equal(analysis.freeze(ds).moves, [1, 1])
    np.testing.assert_array_equal(analysis.freeze(ds, lattice="bfloat16").moves, [1, 0])
    signalling = np.array([0x7F800001], np.uint32).view(np.float32)
    assert np.isnan(on_lattice(signalling, "W", "float32", "bfloat16")).all(), "no infinity"


@pytest.mark.parametrize(("native", "lattice"), [("bfloat16", "native"), ("float16", "bfloat16")])
def test_a_native_type_that_the_values_contradict_is_refused(native, lattice, make_run):
    W = crawling()
    ds = make_run(W, native=native, chunks=(3, 2, -1))
    for quantity in (
        lambda ds: analysis.regimes(ds, lattice),
        lambda ds: analysis.freeze(ds, lattice=lattice),
        lambda ds: analysis.lifecycle(ds, lattice),
        lambda ds: analysis.distinct(ds, lattice=lattice),
        lambda ds: analysis.ulp(ds, lattice),
        lambda ds: analysis.lattice_displacement(ds, lattice=lattice),
        lambda ds: analysis.lattice_displacement(ds, "ordinal", 1, lattice),
    ):
        with pytest.raises(InvalidArgument, match=rf"native_dtype of W is {native}.*are not"):
            quantity(ds).compute()
    analysis.speed(ds).compute()  # does not depend on the type


@pytest.mark.parametrize(("stored", "native"), [("float16", "bfloat16"), ("bfloat16", "float16")])
def test_a_wrong_native_type_of_the_same_size_is_refused(stored, native, make_run):
    W = crawling().astype(TYPES[stored])
    W[0, 0, 0] = 1e-30 if stored == "bfloat16" else 1 + 2.0**-10
    for values in (W, W.astype(np.float32)):
        ds = make_run(W.astype(np.float32), native=native)
        ds["W"] = ds.W.copy(data=values)
        for held in (ds, ds.chunk(step=3)):
            with pytest.raises(InvalidArgument, match=rf"native_dtype of W is {native}"):
                analysis.freeze(held).compute()
        with pytest.raises(InvalidArgument, match=f"stored as {values.dtype}"):
            on_lattice(values, "W", native, native)
    assert on_lattice(W, "W", stored, stored) is W


def test_a_single_wrong_value_is_found_and_shown(make_run, walk):
    ds = make_run(walk(6, 4, 3))
    ds["W"][4, 2, 1] = 0.1
    with pytest.raises(
        InvalidArgument, match=r"1 of 72 checked values.*first is 0\.1.*stored as float32"
    ):
        analysis.freeze(ds).compute()


def test_values_of_a_narrower_type_contradict_no_wider_one(make_run, walk):
    ds = make_run(walk(6, 4, 3))
    ds.W.attrs["native_dtype"] = "float32"
    assert analysis.freeze(ds).moves.sum() > 0


def test_a_float64_history_is_rounded_too(make_run):
    W = crawling().astype(np.float64) * (1 + 1e-12)
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


@pytest.mark.parametrize("prepared", [False, True])
def test_a_state_passes_through_all_rows_of_each_token(prepared: bool) -> None:
    values, rows = np.arange(14).reshape(7, 2), np.arange(7)

    def chosen(block, row, *, least):  # type: ignore[no-untyped-def]
        return [(row[at, 0, 0], now) for at, now in enumerate(block) if now[0] >= least]

    def follow(state, *given, **options):  # type: ignore[no-untyped-def]
        return [*(state or []), *(given[0] if prepared else chosen(*given, **options))]

    found = fold(
        follow,
        da.from_array(values, chunks=(3, 1)),
        rows,
        finish=lambda state: np.array([[len(state)], state[0][1], state[-1][1] * state[-1][0]]),
        sizes=(3,),
        dtype=np.int64,
        prepare=chosen if prepared else None,
        least=4,
    )
    assert found.chunks == ((3,), (1, 1))
    assert found.compute().tolist() == [[5, 5], [4, 5], [12 * 6, 13 * 6]]


@pytest.mark.parametrize(("name", "workers"), [("pca", 1), ("pca", 5), ("path_efficiency", 2)])
def test_no_worker_reads_ahead_of_a_running_state(name: str, workers: int) -> None:
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
    if name == "adjacency":
        pytest.importorskip("scipy")
    whole = made_of_blocks(16).load()
    few, many = (
        len(dict(analysis.compute(block.chunk(), [name]).__dask_graph__()))
        for block in (whole.isel(step=slice(2)), whole)
    )
    assert many == few


@pytest.mark.torch
@pytest.mark.parametrize("name", NATIVE_TYPES)
def test_computed_and_recorded_values_agree(name):
    torch = pytest.importorskip("torch")
    motion = pytest.importorskip(
        "trajstore.trainers.recording.device_summaries", reason="no summaries are recorded here"
    )
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
