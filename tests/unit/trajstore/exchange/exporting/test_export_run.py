"""Runs as runs again, with blocks of another size."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import xarray as xr
import zarr
from compact_runs import RULE_ARRAYS, same_bits, sample_part
from exchange_runs import assert_same_run

import trajstore
from trajstore.errors import InvalidArgument
from trajstore.store.metadata.block_plan import plan
from trajstore.store.reading.run_info import information

SmallRun = tuple[Path, dict[str, np.ndarray]]


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


def test_a_run_is_the_same_after_replay_and_back(sample: Path, tmp_path: Path) -> None:
    source, small, back = (tmp_path / f"{name}.zarr" for name in ("source", "small", "back"))
    sample_part(sample, source, encoding="delta")
    attributes = {"segments": [{"step": 0, "config": {}}], "mine": {"why": "a test"}}
    zarr.open_group(source).attrs.update(attributes)
    done = trajstore.export(source, small, encoding="compact", block_rows=3)
    assert (done.format, done.notes) == ("run", ())
    trajstore.export(small, back, encoding="delta", block_rows=8)
    kinds = {name: array["kind"] for name, array in information(small)["arrays"].items()}
    assert {name for name in kinds if kinds[name] == "computed"} == {*RULE_ARRAYS}
    assert trajstore.verify(small).clean
    same_bits(source, small)
    ds = same_bits(source, back)
    own = ("runs", "content_digest", "fingerprint", "updated")
    before = xr.open_zarr(source).attrs
    assert {key: value for key, value in ds.attrs.items() if key not in own} == {
        key: value for key, value in before.items() if key not in own
    }
    assert before["mine"] == attributes["mine"]
    # Without it, the encoding stays; some tokens follow from their own gradients.
    trajstore.export(small, back, format="run", tokens=[3, 99], overwrite=True)
    part = xr.open_zarr(back).load()
    assert part.attrs["encoding"] == "compact"
    xr.testing.assert_equal(part.W, xr.open_zarr(source).W.sel(token=[3, 99]).load())


def test_an_export_notes_what_it_cannot_compute(sample: Path, tmp_path: Path) -> None:
    done = trajstore.export(
        sample, tmp_path / "out.zarr", encoding="compact", variables="W,loss", steps="0:9"
    )
    (note,) = done.notes
    assert note.endswith("the run does not hold exp_avg, exp_avg_sq, grad, lr")
    with pytest.raises(InvalidArgument, match="hdf5, which has no encoding"):
        trajstore.export(sample, tmp_path / "out.h5", format="hdf5", encoding="delta")
