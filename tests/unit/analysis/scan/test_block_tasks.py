"""Kernels applied to blocks; blocks measured in sequence, or read again."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

import dask
import dask.array as da
import numpy as np
import pytest

from trajstore import RunWriter, analysis, open_run
from trajstore.analysis.scan.block_tasks import (
    ConsecutiveRows,
    chunks_of,
    compute_all,
    in_turn,
    measure,
    read_again,
)

distributed = pytest.importorskip("distributed")


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


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("runs") / "run.zarr"
    rng = np.random.default_rng(0)
    with RunWriter.create(
        path,
        token=np.arange(40),
        hidden=8,
        variables={"W": "float32"},
        is_dead=np.arange(40) % 3 == 0,
        block_rows=1,
    ) as made:
        for step in range(60):
            made.append(step=step, W=rng.integers(-3, 4, (40, 8)).astype("float32"))
    return path


def _loaded() -> bool:
    return "torch" in sys.modules


@pytest.mark.nightly
def test_a_killed_worker_changes_nothing(run: Path) -> None:
    lazy = analysis.regimes(open_run(run))
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
        assert not any(client.run(_loaded).values()), "workers need no torch"
    assert got.identical(expected)
    assert reported[-1][0] == reported[-1][1] > 0
    assert min(done for done, _ in reported if done) < reported[-1][1], (
        "it was killed in the middle"
    )


@pytest.mark.nightly
def test_a_failing_task_raises_its_error(run: Path) -> None:
    broken = open_run(run).W.map_blocks(lambda block: 1 / 0, template=open_run(run).W)
    nested = {"broken": [broken, 1]}
    with (
        distributed.LocalCluster(n_workers=1, processes=False, dashboard_address=None) as cluster,
        distributed.Client(cluster),
        pytest.raises(ZeroDivisionError),
    ):
        compute_all([nested], lambda done, total: None)


def test_progress_without_a_cluster(run: Path) -> None:
    reported: list[tuple[int, int]] = []
    with dask.config.set(scheduler="threads"):
        compute_all([analysis.speed(open_run(run))], lambda *tasks: reported.append(tasks))
    assert reported[-1][0] == reported[-1][1] > 0
