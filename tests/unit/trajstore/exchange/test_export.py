"""Exports to safetensors, HDF5, Zarr and new runs."""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
import tracemalloc
from functools import partial
from pathlib import Path
from typing import Any

import ml_dtypes  # noqa: F401  (NumPy knows bfloat16 once it is imported)
import numpy as np
import pytest
import xarray as xr
from disk import Disk
from exchange_runs import assert_same_run, write_run
from safetensors import safe_open

import trajstore
from trajstore.errors import (
    FormatError,
    InvalidArgument,
    RunExists,
    RunNotFound,
    VariableNotRecorded,
)
from trajstore.store.reading.run_info import information
from trajstore.store.writing.create import annotate_run

SmallRun = tuple[Path, dict[str, np.ndarray]]


def test_native_keeps_names_types_and_attributes(small_run: SmallRun, tmp_path: Path) -> None:
    path, bits = small_run
    done = trajstore.export(path, tmp_path / "f")
    assert (done.rows, done.tokens, done.notes) == (11, 10, ())
    assert done.bytes == (tmp_path / "f").stat().st_size
    (tmp_path / "other").touch()
    assert (tmp_path / "f").stat().st_mode == (tmp_path / "other").stat().st_mode
    with safe_open(tmp_path / "f", "numpy") as file:
        assert set(file.keys()) == {*bits, "step", "token", "is_dead", "token_count"}
        for name, array in bits.items():
            assert file.get_tensor(name).tobytes() == array.tobytes()
        metadata = file.metadata()
    assert json.loads(metadata["attributes"])["config"] == {"why": "a test"}
    assert json.loads(metadata["token_text"])[-1] == "é\n"
    back = trajstore.import_file(tmp_path / "f", tmp_path / "back.zarr")
    assert back.layout == "native"
    assert_same_run(path, tmp_path / "back.zarr")
    attributes = trajstore.open_run(tmp_path / "back.zarr").attrs
    original = trajstore.open_run(path).attrs
    assert attributes["config"] == original["config"]
    assert attributes["created"] == original["created"]


def test_a_changed_dataset_is_exported_as_it_is(small_run: SmallRun, tmp_path: Path) -> None:
    path, bits = small_run
    ds = trajstore.open_run(path).isel(token=[4, 1], step=slice(2, 9)).chunk(step=3)
    trajstore.export(ds, tmp_path / "f")
    with safe_open(tmp_path / "f", "numpy") as file:
        assert file.get_tensor("W").tobytes() == bits["W"][2:9, [4, 1]].tobytes()
        assert file.get_tensor("token").tolist() == [28, 7]
    with pytest.raises(InvalidArgument, match="no coordinate token"):
        trajstore.export(trajstore.open_run(path).isel(token=0), tmp_path / "g")
    with pytest.raises(VariableNotRecorded, match="nothing to export"):
        trajstore.export(trajstore.open_run(path)[["token", "step"]], tmp_path / "g")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"format": "csv"}, "got format='csv', expected 'safetensors' or 'hdf5'"),
        ({"layout": "1"}, "no layout '1'"),
        ({"format": "hdf5", "layout": "15.1a"}, "which is for safetensors files"),
        ({"block_rows": 3}, "got block_rows=3 with format safetensors, .*; .* format zarr or run"),
        ({"encoding": "delta", "format": "hdf5"}, "got encoding='delta' with format hdf5"),
        ({"fill_damaged": True, "format": "zarr"}, "got fill_damaged=True with format zarr"),
        ({"steps": "x"}, "got steps 'x', expected numbers"),
        ({"format": "zarr", "block_rows": 0}, "got block_rows=0, expected a whole number"),
        ({"format": "run", "variables": "grad"}, "expected at least one of W"),
        ({"format": "run", "memory": "100B"}, "memory"),
        ({"format": "zarr", "memory": "100B"}, "memory"),
        ({"file": "a.safetensors", "layout": "thimble-7"}, r"thimble-7 is .* hdf5; .* NAME\.h5"),
        ({"file": "a.zarr", "layout": "15.1a"}, r"NAME\.safetensors"),
        ({"file": "A.H5", "encoding": "compact"}, r"NAME\.zarr"),
    ],
)
def test_wrong_calls_leave_nothing(
    small_run: SmallRun, tmp_path: Path, options: dict[str, Any], message: str
) -> None:
    path, _ = small_run
    with contextlib.chdir(tmp_path), pytest.raises(InvalidArgument, match=message):
        trajstore.export(path, **{"file": "f"} | options)
    assert [each.name for each in tmp_path.iterdir()] == [path.name]


@pytest.mark.parametrize("form", ["safetensors", "hdf5", "zarr", "run"])
def test_what_is_there_is_kept(small_run: SmallRun, tmp_path: Path, form: str) -> None:
    path, _ = small_run
    (tmp_path / "f").write_text("mine")
    for source in (path, tmp_path / "none"):  # it is refused before the run is opened
        with pytest.raises(RunExists):
            trajstore.export(source, tmp_path / "f", format=form)
    assert (tmp_path / "f").read_text() == "mine"
    if form not in ("zarr", "run"):
        trajstore.export(path, tmp_path / "f", format=form, overwrite=True)
        assert (tmp_path / "f").stat().st_size > 1000
        with pytest.raises(RunExists, match="is a folder"):
            trajstore.export(path, tmp_path, format=form, overwrite=True)
    with pytest.raises(RunNotFound):
        trajstore.export(tmp_path / "none", tmp_path / "g", format=form)


@pytest.mark.parametrize("form", ["safetensors", "hdf5", "zarr", "run"])
def test_an_interruption_leaves_nothing_and_no_rows_are_an_export(
    small_run: SmallRun, tmp_path: Path, form: str
) -> None:
    def interrupt(done: int, total: int) -> None:
        raise KeyboardInterrupt

    path, _ = small_run
    with pytest.raises(KeyboardInterrupt):
        trajstore.export(path, tmp_path / "f", format=form, on_progress=interrupt)
    assert [each.name for each in tmp_path.iterdir()] == [path.name]
    trajstore.RunWriter.resume(path, rows=0).close()
    assert trajstore.export(path, tmp_path / "file", format=form).rows == 0


def test_hdf5_of_few_variables_keeps_float32_that_is_bfloat16(
    small_run: SmallRun, tmp_path: Path
) -> None:
    pytest.importorskip("h5py")
    ds = trajstore.open_run(small_run[0]).load()[["W", "loss"]]
    ds.W.attrs["native_dtype"] = "float32"
    trajstore.export(ds, tmp_path / "f.h5", format="hdf5")
    done = trajstore.import_file(tmp_path / "f.h5", tmp_path / "back.zarr")
    assert (done.layout, done.variables) == ("hdf5", {"W": "float32", "loss": "float32"})
    assert_same_run(ds, tmp_path / "back.zarr")


def test_what_is_exported_and_imported_survives_a_loss_of_power(
    small_run: SmallRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, _ = small_run
    disk = Disk(monkeypatch)
    for format in ("safetensors", "zarr", "run"):
        trajstore.export(path, tmp_path / format / "f", format=format)
        assert disk.survives(tmp_path / format / "f", below=tmp_path), format
    trajstore.import_file(tmp_path / "safetensors" / "f", tmp_path / "new" / "run.zarr")
    assert disk.survives(tmp_path / "new" / "run.zarr", below=tmp_path)
    assert disk.early == []


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
    words = [sys.executable, "-W", "error", "-c", READ, str(out)]
    done = subprocess.run(words, capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "{'step': 11, 'token': 10, 'hidden': 6} bfloat16 é\n\n"
    tensorstore = pytest.importorskip("tensorstore")
    store = tensorstore.open(
        {"driver": "zarr3", "kvstore": {"driver": "file", "path": str(out / "W")}}
    ).result()
    assert ((store.read().result().view("u4") >> 16) == bits["W"]).all()


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


@pytest.mark.nightly
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


def test_an_export_to_zarr_is_no_run_and_only_it_is_overwritten(
    small_run: SmallRun, tmp_path: Path
) -> None:
    path, _ = small_run
    with pytest.raises(RunExists, match="is not an exported Zarr"):
        trajstore.export(path, path, format="zarr", overwrite=True)
    out = tmp_path / "out.zarr"
    trajstore.export(path, out, format="zarr")
    label = partial(annotate_run, token_text=["?"] * 10)
    for read in (trajstore.verify, trajstore.repair, trajstore.open_run, information, label):
        with pytest.raises(FormatError, match="a Zarr group, but not a run: it has no"):
            read(out)
    with pytest.raises(RunExists, match="already exists"):
        trajstore.export(path, out, format="zarr")
    trajstore.export(path, out, format="zarr", overwrite=True, steps=[4])
    assert xr.open_zarr(out).step.values.tolist() == [4]
    with pytest.raises(RunExists, match="is not a run"):
        trajstore.export(path, out, format="run", overwrite=True)
    assert sorted(each.name for each in tmp_path.iterdir()) == sorted([path.name, out.name])
