"""Memory does not grow with the number of steps, on one core or several."""

from __future__ import annotations

import pytest
from held_arrays import BLOCK, held_at_most, made_of_blocks

from trajstore import analysis


@pytest.mark.parametrize("workers", [1, 2, 5])
@pytest.mark.parametrize("name", ["pca", "path_efficiency"])
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
