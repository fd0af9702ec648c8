"""Two worker processes; one is killed."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

import dask
import numpy as np
import pytest

from trajstore import RunWriter, analysis, open_run
from trajstore.analysis.scan.block_tasks import compute_all

distributed = pytest.importorskip("distributed")


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
