"""Exports to safetensors, HDF5, Zarr, new runs and torch, and what they select."""

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
import tensorstore
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
    StepNotFound,
    VariableNotRecorded,
)
from trajstore.exchange.selection import select
from trajstore.store.reading.run_info import information
from trajstore.store.reading.tiled_reader import TiledRun, open_tiled
from trajstore.store.writing.create import annotate_run

SmallRun = tuple[Path, dict[str, np.ndarray]]


@pytest.fixture
def path(small_run: SmallRun) -> Path:
    """A run in `tmp_path`."""
    return small_run[0]


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
        ({"format": "csv"}, "got format='csv'"),
        ({"layout": "1"}, "no layout '1'"),
        ({"format": "hdf5", "layout": "15.1a"}, "for safetensors files"),
        ({"block_rows": 3}, "block_rows=3 .* format zarr or run"),
        ({"encoding": "delta", "format": "hdf5"}, "encoding='delta' with format hdf5"),
        ({"fill_damaged": True, "format": "zarr"}, "fill_damaged=True with"),
        ({"steps": "x"}, "got steps 'x'"),
        ({"format": "zarr", "block_rows": 0}, "got block_rows=0"),
        ({"format": "run", "variables": "grad"}, "at least one of W"),
        ({"format": "run", "memory": "100B"}, "memory"),
        ({"format": "zarr", "memory": "100B"}, "memory"),
        ({"file": "a.safetensors", "layout": "thimble-7"}, r"hdf5; .* NAME\.h5"),
        ({"file": "a.zarr", "layout": "15.1a"}, r"NAME\.safetensors"),
        ({"file": "A.H5", "encoding": "compact"}, r"NAME\.zarr"),
    ],
)
def test_wrong_calls_leave_nothing(
    path: Path, tmp_path: Path, options: dict[str, Any], message: str
) -> None:
    with contextlib.chdir(tmp_path), pytest.raises(InvalidArgument, match=message):
        trajstore.export(path, **{"file": "f"} | options)
    assert [each.name for each in tmp_path.iterdir()] == [path.name]


FORMS = ("safetensors", "hdf5", "zarr", "run")


def test_what_is_there_is_kept(path: Path, tmp_path: Path) -> None:
    file = tmp_path / "f"
    for form in FORMS:
        file.write_text("mine")
        for source in (path, tmp_path / "none"):  # it is refused before the run is opened
            with pytest.raises(RunExists):
                trajstore.export(source, file, format=form)
        assert file.read_text() == "mine"
        with pytest.raises(RunNotFound):
            trajstore.export(tmp_path / "none", tmp_path / "g", format=form)
        if form not in ("zarr", "run"):
            trajstore.export(path, file, format=form, overwrite=True)
            assert file.stat().st_size > 1000
            with pytest.raises(RunExists, match="is a folder"):
                trajstore.export(path, tmp_path, format=form, overwrite=True)


@pytest.mark.parametrize("form", FORMS)
def test_an_interruption_leaves_nothing_and_no_rows_are_an_export(
    path: Path, tmp_path: Path, form: str
) -> None:
    def interrupt(done: int, total: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        trajstore.export(path, tmp_path / "f", format=form, on_progress=interrupt)
    assert [each.name for each in tmp_path.iterdir()] == [path.name]
    trajstore.RunWriter.resume(path, rows=0).close()
    assert trajstore.export(path, tmp_path / "file", format=form).rows == 0


def test_hdf5_keeps_float32_that_is_bfloat16(path: Path, tmp_path: Path) -> None:
    ds = trajstore.open_run(path).load()[["W", "loss"]]
    ds.W.attrs["native_dtype"] = "float32"
    trajstore.export(ds, tmp_path / "f.h5", format="hdf5")
    done = trajstore.import_file(tmp_path / "f.h5", tmp_path / "back.zarr")
    assert (done.layout, done.variables) == ("hdf5", {"W": "float32", "loss": "float32"})
    assert_same_run(ds, tmp_path / "back.zarr")


def test_what_is_exported_and_imported_survives_a_loss_of_power(
    path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk = Disk(monkeypatch)
    for format in ("safetensors", "zarr", "run"):
        trajstore.export(path, tmp_path / format / "f", format=format)
        assert disk.survives(tmp_path / format / "f", below=tmp_path), format
    trajstore.import_file(tmp_path / "safetensors" / "f", tmp_path / "new" / "run.zarr")
    assert disk.survives(tmp_path / "new" / "run.zarr", below=tmp_path)
    assert disk.early == []


@pytest.mark.nightly
def test_a_write_that_fails_names_the_file(path: Path, tmp_path: Path) -> None:
    """In a process, as HDF5 crashed at its end."""
    code = (
        "import resource, sys\n"
        "from click.testing import CliRunner\n"
        "from trajstore.cli.main import main\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (2000, 2000))\n"
        "for file in sys.argv[2:]:\n"
        "    done = CliRunner().invoke(main, ['export', sys.argv[1], '-o', file])\n"
        "    print(done.exit_code, ' '.join(done.stderr.split()))\n"
    )
    files = [str(tmp_path / name) for name in ("f.safetensors", "f.zarr", "f.h5")]
    # The limit also holds for the modules that Python compiles: without -B they would be cut.
    words = [sys.executable, "-B", "-c", code, str(path), *files]
    done = subprocess.run(words, capture_output=True, text=True, check=True)
    for line, file in zip(done.stdout.splitlines(), files, strict=True):
        assert line.startswith("1 ")
        assert f"the operating system reported an error {file}: File too large" in line
    assert list(tmp_path.iterdir()) == [path]


CODECS = {"transpose", "bytes", "blosc", "zstd", "vlen-utf8"}
TYPES = {"float32", "int64", "int32", "bool", "string"}


def test_an_export_to_zarr_has_codecs_and_types_of_plain_zarr(
    small_run: SmallRun, tmp_path: Path
) -> None:
    path, bits = small_run
    ds, out = xr.open_zarr(path), tmp_path / "out.zarr"
    chunked = ds.assign(W=ds.W.variable.chunk(token=3))  # its coordinates have one chunk
    trajstore.export(chunked, out, format="zarr", block_rows=3)
    assert_same_run(path, out)
    metadata = json.loads((out / "zarr.json").read_text())
    arrays = metadata["consolidated_metadata"]["metadata"]
    assert {codec["name"] for array in arrays.values() for codec in array["codecs"]} <= CODECS
    assert {array["data_type"] for array in arrays.values()} <= TYPES
    assert arrays["W"]["chunk_grid"]["configuration"]["chunk_shape"] == [3, 10, 6]
    assert metadata["attributes"]["config"] == {"why": "a test"}
    assert not {"trajstore_format", "runs", "fingerprint"} & set(metadata["attributes"])
    trajstore.export(ds.isel(step=[]), tmp_path / "none.zarr", format="zarr")
    assert xr.open_zarr(tmp_path / "none.zarr").W.shape == (0, *ds.W.shape[1:])
    store = tensorstore.open(
        {"driver": "zarr3", "kvstore": {"driver": "file", "path": str(out / "W")}}
    ).result()
    assert ((store.read().result().view("u4") >> 16) == bits["W"]).all()


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


def test_an_export_to_zarr_is_no_run_and_only_it_is_overwritten(path: Path, tmp_path: Path) -> None:
    with pytest.raises(RunExists, match="is not an exported Zarr"):
        trajstore.export(path, path, format="zarr", overwrite=True)
    out = tmp_path / "out.zarr"
    trajstore.export(path, out, format="zarr")
    label = partial(annotate_run, token_text=["?"] * 10)
    for read in (trajstore.verify, trajstore.repair, trajstore.open_run, information, label):
        with pytest.raises(FormatError, match="a Zarr group, but not a run: it has no"):
            read(out)
    trajstore.export(path, out, format="zarr", overwrite=True, steps=[4])
    assert xr.open_zarr(out).step.values.tolist() == [4]
    with pytest.raises(RunExists, match="is not a run"):
        trajstore.export(path, out, format="run", overwrite=True)
    assert sorted(each.name for each in tmp_path.iterdir()) == sorted([path.name, out.name])


@pytest.fixture(scope="module")
def source(_small_run: SmallRun) -> TiledRun:
    """Steps 0, 2, … 20; tokens 0, 7, … 63, every third dead."""
    return open_tiled(_small_run[0])


@pytest.mark.parametrize(
    ("steps", "expected"),
    [
        (None, range(0, 21, 2)), ("0:6", [0, 2, 4]), (":5", [0, 2, 4]), ("16:", [16, 18, 20]),
        ("0:20:10", [0, 10]), ("::6", [0, 6, 12, 18]), ("2::6", [2, 8, 14, 20]),
        ("20,4, 0:3", [0, 2, 4, 20]), (4, [4]), (np.int64(4), [4]), (slice(0, 5), [0, 2, 4]),
        ([20, 4], [4, 20]), (np.array([8]), [8]),
    ],
)  # fmt: skip
def test_steps_are_chosen_by_their_numbers(source: TiledRun, steps: Any, expected: Any) -> None:
    rows = select(source, steps=steps).rows
    assert source.steps[rows].tolist() == list(expected)


def test_tokens_by_population_ids_and_file_and_variables(source: TiledRun, tmp_path: Path) -> None:
    ids = source.coordinates["token"]
    chosen = {name: select(source, tokens=name).tokens for name in ("dead", "live")}
    assert ids[chosen["dead"]].tolist() == [0, 21, 42, 63]
    assert ids[chosen["live"]].tolist() == [7, 14, 28, 35, 49, 56]
    assert select(source, tokens="all").tokens is None
    listed = tmp_path / "ids.txt"
    listed.write_text("14, 7\n63\n")
    for tokens in ("14,7,63", [63, 14, 7], np.array([7, 14, 63, 7]), listed, str(listed)):
        assert ids[select(source, tokens=tokens).tokens].tolist() == [7, 14, 63]
    assert select(source, variables="loss, W").variables == ("W", "loss")
    assert select(source, variables=["grad"]).variables == ("grad",)


@pytest.mark.parametrize(
    ("selected", "error", "message"),
    [
        *(({"steps": steps}, InvalidArgument, "step") for steps in
          ("", "1:2:3:4", "-3:", "::0", "1,,2", "21:", slice(-4, None))),
        *(({"tokens": tokens}, InvalidArgument, "token") for tokens in
          ("5", "none-such.txt", [], "99999999999999999999")),
        ({"steps": "3"}, StepNotFound, r"step 3 was not recorded; .* 0 to 20"),
        ({"tokens": [999]}, InvalidArgument, r"token 999 was .* holds \d+ ids, from \d+ to"),
        ({"variables": "exp_avg"}, VariableNotRecorded, "exp_avg was not recorded"),
        ({"variables": "weights"}, InvalidArgument, "no variable 'weights'"),
    ],
    ids=str,
)  # fmt: skip
def test_what_the_run_does_not_hold_is_refused(
    source: TiledRun, selected: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        select(source, **selected)


@pytest.mark.torch
def test_tensors_have_every_bit_and_own_their_memory(small_run: SmallRun) -> None:
    import torch

    path, bits = small_run
    made = trajstore.to_torch(path)
    assert made["step"].tolist() == list(range(0, 21, 2))
    assert made["token"].tolist() == list(range(0, 70, 7))
    for name, dtype in {"W": torch.bfloat16, "grad": torch.float16, "loss": torch.float32}.items():
        assert made[name].dtype == dtype
        signed = {2: torch.int16, 4: torch.int32}[made[name].itemsize]
        assert (made[name].view(signed).numpy().view(bits[name].dtype) == bits[name]).all()
    ds = trajstore.open_run(path).load()
    before = ds.W.values.copy()
    made = trajstore.to_torch(ds, steps="4:12:4", tokens="dead", variables="W")
    assert set(made) == {"step", "token", "W"}
    W = made["W"]
    assert W.shape == (2, 4, 6)
    assert W.is_contiguous()
    # No view of something larger: a view would keep all of it alive.
    assert W.untyped_storage().nbytes() == W.numel() * 2
    assert (W.view(torch.int16).numpy().view("u2") == bits["W"][[2, 4]][:, [0, 3, 6, 9]]).all()
    W.zero_()
    assert (ds.W.values.view("u4") == before.view("u4")).all()
