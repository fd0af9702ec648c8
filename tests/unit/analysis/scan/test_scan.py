"""Runs with changes but no W, what to record, statistics of populations; kernels and blocks."""

from __future__ import annotations

import os
import signal
import sys

import dask
import dask.array as da
import distributed
import numpy as np
import pytest
import xarray as xr
from held_arrays import made_of_blocks

from trajstore import analysis
from trajstore.analysis.scan import input_checks
from trajstore.analysis.scan.block_tasks import (
    ConsecutiveRows,
    chunks_of,
    compute_all,
    in_turn,
    measure,
    read_again,
)
from trajstore.analysis.several_quantities import QUANTITIES
from trajstore.errors import InvalidArgument, StepNotFound, VariableNotRecorded

ROWS, TOKENS, HIDDEN = 14, 6, 5


@pytest.fixture
def both(make_run) -> tuple[xr.Dataset, xr.Dataset]:
    """A run with W, on a grid on which differences and their sums are exact, and one of delta."""
    rng = np.random.default_rng(0)
    steps = rng.integers(-9, 9, (ROWS, TOKENS, HIDDEN)) / 256
    steps[5:, 0] = 0  # token 0 is unchanged from row 5 on, token 1 for some rows
    steps[3:8, 1] = 0
    W = (1 + np.cumsum(steps, axis=0)).astype("f4")
    grad = rng.normal(size=W.shape).astype("f4")
    one = make_run(W, native="float32", grad=grad, is_dead=np.arange(TOKENS) % 2 == 0)
    delta = one.W.diff("step").reindex(step=one.step)  # the change to the first row is not used
    return one, one.drop_vars("W").assign(delta=delta.assign_attrs(one.W.attrs))


OF_MOTION = (
    "velocity speed acceleration displacement freeze bulk_thermal coherence discontinuities "
    "crossings grad_norms"
).split()


def test_quantities_of_changes_equal_those_of_W_and_changes_give_no_positions(both) -> None:
    with_W, changes = both[0], both[1].chunk(step=4, token=4)
    found, refusals = {}, []
    for name in QUANTITIES:
        quantity = getattr(analysis, name)
        try:
            found[name] = quantity(changes), quantity(with_W)
        except VariableNotRecorded as error:
            refusals.append(str(error))
    assert set(found) == set(OF_MOTION)
    advice = "it holds delta, the changes of W, which only give quantities of motion"
    assert all(advice in refusal for refusal in refusals if "requires W" in refusal)
    assert found["velocity"][0].chunks is not None, "lazy"
    for name, quantity in {
        "previous": lambda ds: analysis.displacement(ds, since="previous"),
        "from step 9": lambda ds: analysis.displacement(ds, since=9),
        "rest": lambda ds: analysis.freeze(ds, min_unchanged=2),
        "together": lambda ds: analysis.compute(ds, ["speed", "freeze", "velocity"]),
        "summary": lambda ds: analysis.summary(ds).drop_vars("centroid_norm", errors="ignore"),
    }.items():
        found[name] = quantity(changes), quantity(with_W)
    for of_changes, expected in found.values():
        xr.testing.assert_identical(of_changes.compute(), expected.compute())
    with pytest.raises(VariableNotRecorded):
        analysis.freeze(changes, lattice="bfloat16")


def test_steps_without_a_row_are_refused(both) -> None:
    _, changes = both
    for compute in (analysis.speed, analysis.velocity, analysis.freeze, analysis.displacement):
        with pytest.raises(InvalidArgument, match=r"step 0 is followed by step 2; .* consecutive"):
            compute(changes.isel(step=slice(0, None, 2)))
    later = changes.isel(step=slice(3, None))
    assert analysis.speed(later).identical(analysis.speed(changes).isel(step=slice(3, None)))


def test_a_change_that_is_not_a_number_is_motion(both) -> None:
    _, changes = both
    changes["delta"][-1, 0, 0] = np.nan
    rest = analysis.freeze(changes)
    assert rest.last_motion.values[0] == changes.step.values[-1]
    assert np.isnan(analysis.displacement(changes).values[-1, 0])


def test_what_to_record(make_run, walk):
    run = make_run(walk(2, 2, 2))
    for missing, attrs, advice in (
        (["grad"], {}, r"; record it with variables='weights\+grads'$"),
        (["exp_avg", "lr"], {}, "; record it with variables='matrix'$"),
        (["hidden_mean"], {}, "; record it with variables='matrix,hidden_mean'$"),
        (["grad", "hidden_states", "batch"], {}, r"='weights\+grads,hidden_states,batch'$"),
        (["exp_avg", "param_norm"], {}, "; record it with variables='matrix,norms'$"),
        (["param_norm"], {}, "; record it with variables='norms'$"),
        (["parameter"], {}, "which the run does not hold$"),
        (["hidden_mean"], {"imported": {}}, "because the imported file does not"),
        (["lr"], {"imported": {}}, "; assign the rate of each step"),
    ):
        with pytest.raises(VariableNotRecorded, match=advice):
            input_checks.require_variables(run.assign_attrs(attrs), *missing)


def test_the_nearest_steps(make_run, walk):
    run = make_run(walk(5, 2, 2), steps=range(0, 10, 2))
    for rows, step, advice in (
        (5, 5, "; the nearest recorded ones are 4 and 6$"),
        (5, 9, "; the nearest recorded one is 8$"),
        (5, -1, "; the nearest recorded one is 0$"),
        (0, 5, "which has no rows"),
    ):
        with pytest.raises(StepNotFound, match=f"step {step} is not in the run.*{advice}"):
            input_checks.row_of_step(run.isel(step=slice(rows)), step)


def test_statistics_of_each_population(make_run, walk):
    dead = np.array([True, False, False, True, False, True, False])
    norms = analysis.displacement(make_run(walk(9, 7, 4), is_dead=dead)).compute()
    norms[1, 0] = np.nan  # it spoils its populations
    values = norms.values.astype(np.float64)
    for chunked in (norms, norms.chunk(step=2, token=3)):
        got = analysis.by_population(chunked, quantiles=(0.1, 0.9)).compute()
        for name, members in {"dead": dead, "live": ~dead, "all": dead | True}.items():
            one, chosen = got.sel(population=name), values[:, members]
            for fact in ("mean", "std", "min", "max", "median"):
                np.testing.assert_allclose(one[fact], getattr(np, fact)(chosen, axis=1))
            expected = np.quantile(chosen, [0.1, 0.9], axis=1).T
            np.testing.assert_allclose(one["quantiles"], expected)
    assert got["mean"].attrs["units"] == "1"
    alone = analysis.by_population(norms.isel(token=dead))
    assert alone.sel(population="live").isnull().all().to_array().all()


def test_mostly_dead_tokens_are_a_population_of_their_own(make_run, walk):
    count = np.array([0, 1, 3, 4, 900, -1])  # -1 means unknown
    rare = np.array([False, True, True, False, False, False])
    ds = make_run(walk(5, 6, 3), is_dead=count == 0).assign_coords(token_count=("token", count))
    ds = ds.chunk(step=2, token=4)
    reported = ds.assign_attrs(config={"data": {"mostly_dead": 3}})
    counts = analysis.regimes(reported).counts.sum("regime_name").compute()
    assert counts.population.values.tolist() == ["dead", "live", "all", "mostly_dead"]
    np.testing.assert_array_equal(counts, [[1, 5, 6, 2]] * 4)
    way = analysis.displacement(reported)
    mean = analysis.by_population(way)["mean"].sel(population="mostly_dead")
    np.testing.assert_allclose(mean, way.values[:, rare].astype(float).mean(1))
    alone = analysis.regimes(ds.isel(token=rare)).counts.sel(population="all")
    of_rare = analysis.regimes(reported).counts.sel(population="mostly_dead")
    np.testing.assert_array_equal(of_rare, alone)
    for config in (None, {}, {"data": {}}, {"data": {"mostly_dead": None}}, "text"):
        plain = ds.assign_attrs(config=config)
        assert "mostly_dead" not in analysis.regimes(plain).population
    with pytest.raises(InvalidArgument, match="expected dead, live, all, mostly_dead"):
        analysis.centroid(reported, "undead")


def test_statistics_require_populations_and_tokens(make_run, walk):
    norms = analysis.displacement(make_run(walk(3, 4, 2)))
    with pytest.raises(VariableNotRecorded, match="is_dead"):
        analysis.by_population(norms)
    with pytest.raises(InvalidArgument, match="expected token"):
        analysis.by_population(norms.step)
    with pytest.raises(InvalidArgument, match="quantiles"):
        analysis.by_population(norms, quantiles=(2,))


def test_a_kernel_gets_lists_of_chunks_that_its_result_does_not_divide() -> None:
    values, factors = np.arange(84.0).reshape(7, 4, 3), np.arange(7)

    def kernel(block, factor, *, groups):  # type: ignore[no-untyped-def]
        chunks = chunks_of(block)
        assert [chunk.shape[1:] for chunk in chunks] == [(3, 3), (1, 3)]
        assert factor.shape == (len(chunks[0]), 1, 1)
        sums = np.concatenate(chunks, 1).sum(-1) * factor[..., 0]
        return np.stack([sums[:, group].sum(-1) for group in groups], -1)

    groups = np.array([[True, False, False, True], [False, True, True, False]])
    result = measure(
        kernel,
        da.from_array(values, chunks=(5, 3, 3)),
        factors,
        dims=("step", "population"),
        groups=groups,
        dtype=np.float64,
        sizes={"population": 2},
    )
    assert result.chunks == ((5, 2), (2,))
    expected = (values.sum(-1) * factors[:, None]) @ groups.T
    np.testing.assert_array_equal(result.compute(), expected)


def test_blocks_are_not_copied() -> None:
    made = [np.zeros((2, 3, 2)), np.zeros((2, 3, 2))]
    seen = []

    def kernel(block):  # type: ignore[no-untyped-def]
        seen.append(any(np.shares_memory(block, one) for one in made))
        return block.sum(-1)

    def make(block_id):  # type: ignore[no-untyped-def]
        return made[block_id[0]]

    blocks = da.map_blocks(make, chunks=((2, 2), (3,), (2,)), dtype=float, meta=made[0][:0])
    measure(kernel, blocks, dims=("step", "token"), dtype=np.float64).compute(scheduler="sync")
    assert seen == [True, True]


def test_blocks_are_read_one_after_the_other() -> None:
    read: list[int] = []
    measured: list[int] = []

    def make(block_info):  # type: ignore[no-untyped-def]
        number = block_info[None]["chunk-location"][0]
        read.append(number)
        return np.full((2, 3, 2), float(number))

    def kernel(block, boundary):  # type: ignore[no-untyped-def]
        assert boundary[0, 0, 0] == max(block[0, 0, 0] - 1, 0)
        # Without the dependency, the last blocks would be read first.
        assert sorted(set(read)) == list(range(len(measured) + 1))
        measured.append(int(block[0, 0, 0]))
        return block.sum(-1)

    blocks = da.map_blocks(
        make, chunks=((2,) * 5, (3,), (2,)), dtype=float, meta=np.empty((0, 0, 0))
    )
    result = in_turn(
        lambda points: measure(kernel, points, dims=("step", "token"), dtype=np.float64),
        ConsecutiveRows(variable="W", type="float64", blocks=blocks),
    )
    sums = result[1:].compute(scheduler="sync")
    np.testing.assert_array_equal(sums[:, 0], np.repeat(range(5), 2)[1:] * 2.0)
    assert measured == [0, 1, 2, 3, 4]


@pytest.mark.parametrize("part", [slice(None), slice(1, 6)])
def test_blocks_are_read_again_after_the_result_they_need(part: slice) -> None:
    reported: list[str] = []

    def make(block_id):  # type: ignore[no-untyped-def]
        reported.append("read")
        return np.full((2, 3), block_id[0], np.float64)

    def mean(values):  # type: ignore[no-untyped-def]
        reported.append("known")
        return values.mean(keepdims=True)

    source = da.map_blocks(make, chunks=((2, 2, 2, 2), (3,)), meta=np.empty((0, 0)))
    blocks = source[part]
    known = blocks.rechunk(-1).map_blocks(mean, chunks=((1,), (1,)), meta=np.empty((0, 0)))
    reported.clear()  # calls by dask for type inference
    again = read_again(blocks, known) - known
    values = again.compute(scheduler="sync")
    reads = blocks.numblocks[0]
    assert reported == ["read"] * reads + ["known"] + ["read"] * reads
    expected = np.repeat(np.arange(4.0), 2)[part]
    np.testing.assert_array_equal(values[:, 0], expected - expected.mean())


@pytest.mark.nightly
def test_a_killed_worker_changes_nothing() -> None:
    lazy = analysis.regimes(made_of_blocks(60))
    expected = lazy.compute(scheduler="threads")
    reported: list[tuple[int, int]] = []

    def report(done: int, total: int) -> None:
        if done and not any(before for before, _ in reported):
            os.kill(victim, signal.SIGKILL)
        reported.append((done, total))

    with (
        distributed.LocalCluster(
            n_workers=2, threads_per_worker=1, processes=True, dashboard_address="127.0.0.1:0"
        ) as cluster,
        distributed.Client(cluster) as client,
    ):
        victim, *_ = client.run(os.getpid).values()
        (got,) = compute_all([lazy], report)
        loaded = client.run(lambda: "torch" in sys.modules)
        assert not any(loaded.values()), "workers need no torch"
    assert got.identical(expected)
    assert reported[-1][0] == reported[-1][1] > 0
    assert min(done for done, _ in reported if done) < reported[-1][1], (
        "it was killed in the middle"
    )


@pytest.mark.nightly
def test_a_failing_task_raises_its_error() -> None:
    W = made_of_blocks(4).W
    nested = {"broken": [W.map_blocks(lambda block: 1 / 0, template=W), 1]}
    with (
        distributed.LocalCluster(n_workers=1, processes=False, dashboard_address=None) as cluster,
        distributed.Client(cluster),
        pytest.raises(ZeroDivisionError),
    ):
        compute_all([nested], lambda done, total: None)


def test_progress_without_a_cluster() -> None:
    reported: list[tuple[int, int]] = []
    with dask.config.set(scheduler="threads"):
        compute_all([analysis.speed(made_of_blocks(8))], lambda *tasks: reported.append(tasks))
    assert reported[-1][0] == reported[-1][1] > 0
