"""Runs as runs again, with blocks of another size."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from exchange_runs import assert_same_run

import trajstore
from trajstore.store.metadata.block_plan import plan

SmallRun = tuple[Path, dict[str, np.ndarray]]


def test_a_copy_says_how_the_run_was_recorded(tmp_path: Path) -> None:
    recording = {"parameter": "transformer.wte.weight"}
    with trajstore.RunWriter.create(
        tmp_path / "run.zarr",
        token=range(2),
        hidden=1,
        variables={"W": "float32"},
        attributes={"recording": recording},
    ) as run:
        run.append(step=0, W=np.zeros((2, 1), np.float32))
    trajstore.export(tmp_path / "run.zarr", tmp_path / "copy.zarr", format="run")
    assert trajstore.open_run(tmp_path / "copy.zarr").attrs["recording"] == recording


@pytest.mark.parametrize("block_rows", [1, 3, 8])
@pytest.mark.parametrize("spare_rows", [0, 100])
def test_blocks_of_any_size_within_any_memory(
    small_run: SmallRun, tmp_path: Path, block_rows: int, spare_rows: int
) -> None:
    path, _ = small_run
    variables = {"W": "bfloat16", "grad": "float16", "logits": "bfloat16", "loss": "float32"}
    sizes = {"tokens": 10, "hidden": 6, "block_rows": block_rows, "buffers": 1}
    layout = plan(variables, **sizes)  # type: ignore[arg-type]
    row = sum(array.row_bytes for array in layout.arrays.values())
    out = tmp_path / "out.zarr"
    trajstore.export(
        path,
        out,
        format="run",
        block_rows=block_rows,
        memory=layout.memory + spare_rows * row,
        overwrite=False,
    )
    assert_same_run(path, out)
    assert trajstore.open_run(out).attrs["block_rows"] == block_rows


def test_a_run_is_rechunked_in_place(small_run: SmallRun, tmp_path: Path) -> None:
    path, _ = small_run
    before = trajstore.open_run(path).load()
    trajstore.export(path, path, format="run", block_rows=11, overwrite=True)
    assert_same_run(before, path)
    assert [each.name for each in tmp_path.iterdir()] == [path.name]
