"""Folds over blocks; memory does not grow with the number of steps, on one core or several."""

from __future__ import annotations

import dask.array as da
import numpy as np
import pytest
from held_arrays import BLOCK, held_at_most, made_of_blocks

from trajstore import analysis
from trajstore.analysis.scan.rows import fold


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
