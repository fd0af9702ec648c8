"""Runs as ordinary Zarr, which is read without trajstore."""

from __future__ import annotations

import json
import subprocess
import sys
import tracemalloc
from pathlib import Path

import numpy as np
import pytest
import xarray as xr
from exchange_runs import assert_same_run, write_run

import trajstore
from trajstore.errors import RunExists
from trajstore.store.reading.run_info import information
from trajstore.store.writing.create import annotate_run

SmallRun = tuple[Path, dict[str, np.ndarray]]

CODECS = {"transpose", "bytes", "blosc", "zstd", "vlen-utf8"}
READ = """
import sys, xarray as xr
class Hidden:
    def find_spec(self, name, path=None, target=None):
        if name.split('.')[0] == 'trajstore': raise ImportError(name)
sys.meta_path.insert(0, Hidden())
ds = xr.open_zarr(sys.argv[1]).load()
assert 'trajstore' not in sys.modules
print(dict(ds.sizes), ds.W.native_dtype, str(ds.token_text.values[9]))
"""


def test_an_export_to_zarr_is_read_without_trajstore(small_run: SmallRun, tmp_path: Path) -> None:
    path, bits = small_run
    out = tmp_path / "out.zarr"
    trajstore.export(path, out, format="zarr", block_rows=3)
    assert_same_run(path, out)
    metadata = json.loads((out / "zarr.json").read_text())
    arrays = metadata["consolidated_metadata"]["metadata"]
    assert {codec["name"] for array in arrays.values() for codec in array["codecs"]} <= CODECS
    assert arrays["W"]["chunk_grid"]["configuration"]["chunk_shape"] == [3, 10, 6]
    assert metadata["attributes"]["config"] == {"why": "a test"}
    assert not {"trajstore_format", "runs", "fingerprint"} & set(metadata["attributes"])
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", READ, str(out)],
        capture_output=True,
        text=True,
        cwd=tmp_path,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == "{'step': 11, 'token': 10, 'hidden': 6} bfloat16 é\n\n"
    tensorstore = pytest.importorskip("tensorstore")
    store = tensorstore.open(
        {"driver": "zarr3", "kvstore": {"driver": "file", "path": str(out / "W")}}
    ).result()
    assert ((store.read().result().view("u4") >> 16) == bits["W"]).all()


def test_an_export_to_zarr_is_not_a_run(small_run: SmallRun, tmp_path: Path) -> None:
    out = tmp_path / "out.zarr"
    trajstore.export(small_run[0], out, format="zarr")
    for read in (trajstore.verify, trajstore.repair, trajstore.open_run, information):
        with pytest.raises(
            trajstore.errors.FormatError, match="a Zarr group, but not a run: it has no"
        ):
            read(out)
    with pytest.raises(
        trajstore.errors.FormatError, match="a Zarr group, but not a run: it has no"
    ):
        annotate_run(out, token_text=["?"] * 10)


def test_datasets_without_rows_and_with_other_chunks_along_token(
    small_run: SmallRun, tmp_path: Path
) -> None:
    path, _ = small_run
    ds, out = xr.open_zarr(path), tmp_path / "out.zarr"
    chunked = ds.assign(W=ds.W.variable.chunk(token=3))  # its coordinates have one chunk
    trajstore.export(chunked, out, format="zarr")
    assert_same_run(path, out)
    trajstore.export(ds.isel(step=[]), out, format="zarr", overwrite=True)
    assert xr.open_zarr(out).W.shape == (0, *ds.W.shape[1:])


def test_memory_does_not_grow_with_the_run(tmp_path: Path) -> None:
    path = tmp_path / "run.zarr"
    write_run(path, {"W": "float32"}, rows=256, tokens=2000, hidden=8, block_rows=16)
    trajstore.export(path, tmp_path / "first.zarr", format="zarr")  # imports what it needs
    tracemalloc.start()
    try:
        trajstore.export(path, tmp_path / "out.zarr", format="zarr", memory="2MiB")
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 12 << 20  # of 16 MiB of values, and what xarray takes
    assert xr.open_zarr(tmp_path / "out.zarr").W.chunks[0] == (16,) * 16


def test_only_an_export_is_overwritten(small_run: SmallRun, tmp_path: Path) -> None:
    path, _ = small_run
    with pytest.raises(RunExists, match="is not an exported Zarr"):
        trajstore.export(path, path, format="zarr", overwrite=True)
    out = tmp_path / "out.zarr"
    trajstore.export(path, out, format="zarr")
    with pytest.raises(RunExists, match="already exists"):
        trajstore.export(path, out, format="zarr")
    trajstore.export(path, out, format="zarr", overwrite=True, steps=[4])
    assert xr.open_zarr(out).step.values.tolist() == [4]
    with pytest.raises(RunExists, match="is not a run"):
        trajstore.export(path, out, format="run", overwrite=True)
    assert sorted(each.name for each in tmp_path.iterdir()) == sorted([path.name, out.name])
