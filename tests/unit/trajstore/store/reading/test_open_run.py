"""What is opened, here and at addresses, and what is said where nothing can read it."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
from functools import reduce
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import xarray as xr
import zarr
from damage import edit, put
from growing_runs import begin
from object_stores import copied, web_server
from zarr.storage import ZipStore

from trajstore import RunWriter, export, open_run, repair, verify
from trajstore.codec.block import ANYWHERE
from trajstore.codec.block_codec import BlockCodec
from trajstore.errors import (
    FormatError,
    InvalidArgument,
    ObjectStoreError,
    RunExists,
    RunNotFound,
)
from trajstore.schema import FORMAT, WITH_SETTINGS
from trajstore.store.reading.open_group import open_group
from trajstore.store.reading.open_run import TrajstoreBackend
from trajstore.store.reading.run_info import information
from trajstore.store.writing.create import annotate_run, check_target


def test_open_run_is_what_plain_xarray_opens(small_run: tuple[Path, Any]) -> None:
    path, _ = small_run
    plain = xr.open_zarr(path)
    ours = open_run(path)
    xr.testing.assert_identical(plain, ours)
    plain.is_dead.load()  # as the docstring says
    for ds in (plain, ours, xr.open_zarr(path, chunks=None)):
        assert ds.where(ds.is_dead, drop=True).sizes["token"] == 4
        assert ds.W.groupby("is_dead").mean().sizes["is_dead"] == 2
    for name in ("W", "grad", "logits", "loss"):
        assert plain[name].chunks is not None  # lazy
        assert ours[name].chunksizes["step"] == (4, 4, 3)
        assert ours[name].attrs["state"] == f"{'after' if name == 'W' else 'before'} the step"


def test_without_dask_a_selection_is_read_when_it_is_asked_for(small_run: tuple[Path, Any]) -> None:
    path, _ = small_run
    plain, ours, lazy = xr.open_zarr(path).load(), open_run(path, chunks=None), open_run(path)
    assert ours.W.chunks is None
    xr.testing.assert_identical(plain, ours.copy().load())
    for where in (
        {"token": 3},
        {"step": [9, 2, 2], "token": slice(None, None, -2)},
        {"step": xr.DataArray([1, 5], dims="at"), "token": xr.DataArray([2, 7], dims="at")},
        {"step": slice(4, 4)},
        {"token": np.array([3, 0, 3])},
    ):
        xr.testing.assert_identical(plain.isel(where), ours.isel(where))
    steps = {"step": [0, 20], "token": [63, 7]}
    xr.testing.assert_identical(plain.sel(steps), ours.sel(steps))
    asyncio.run(ours.copy().load_async())
    changed = open_run(path, chunks=None)
    changed.W[0] = 1.0  # in memory
    assert (changed.W[0] == 1.0).all()
    xr.testing.assert_identical(plain.W, open_run(path, chunks=None).W)
    # What is missing is noticed by who needs it, and only then.
    (path / "W" / "c.2.0.0").unlink()
    for ds in (ours, lazy):
        xr.testing.assert_identical(plain.W[:7, 3], ds.W[:7, 3].compute())
        with pytest.raises(FormatError, match=r"^W, block 2: .*is missing"):
            ds.W[:, 3].compute()


def test_dask_chunks_are_whole_inner_chunks(tmp_path: Path) -> None:
    sizes = {"token": np.arange(50_257), "hidden": 64}
    run = RunWriter.create(tmp_path / "run.zarr", variables={"W": "bfloat16"}, **sizes)
    run.close()
    ds, inner = open_run(run.path), run.layout.arrays["W"].chunk
    tokens = ds.W.chunksizes["token"]
    assert all(length % inner[1] == 0 for length in tokens[:-1])
    assert tokens[0] * ds.W.chunksizes["step"][0] * 64 * 4 <= 16 << 20


def test_a_zip_file_of_a_run_is_what_the_folder_is(small_run: tuple[Path, Any]) -> None:
    path, _ = small_run
    packed = Path(shutil.make_archive(str(path), "zip", path))
    folder = open_run(path)
    for chunks in ("blocks", None):
        ds = open_run(packed, chunks=chunks)
        xr.testing.assert_identical(ds, folder)
        assert ds.W[5].values.tobytes() == folder.W[5].values.tobytes()
    xr.testing.assert_identical(ds, xr.open_zarr(ZipStore(packed, mode="r")))
    xr.testing.assert_identical(ds, xr.open_dataset(packed, engine="trajstore"))
    xr.testing.assert_identical(ds.traj.grad_norms(), folder.traj.grad_norms())


def test_what_is_not_a_run_is_named(small_run: tuple[Path, Any], tmp_path: Path) -> None:
    outside = shutil.make_archive(str(tmp_path / "outside"), "zip", tmp_path, small_run[0].name)
    (tmp_path / "text.zip").write_bytes(b"text")
    (tmp_path / "folder").mkdir()
    zarr.create_group(tmp_path / "other.zarr")
    for name, error, message in (
        ("nothing.zarr", RunNotFound, "no run at"),
        ("folder", FormatError, "not a Zarr v3 group"),
        ("other.zarr", FormatError, "no trajstore_format"),
        ("outside.zip", FormatError, r"no.*zarr\.json at its top; pack .*zip -0r"),
        ("text.zip", FormatError, "not a zip file"),
    ):
        with pytest.raises(error, match=message):
            open_run(tmp_path / name)
    with pytest.raises(InvalidArgument, match="chunks='auto', expected 'blocks' or None"):
        open_run(tmp_path, chunks="auto")  # type: ignore[arg-type]
    with pytest.raises(FormatError, match="unpack a zip file first"):
        export(outside, outside + ".safetensors")


def test_a_damaged_root_names_the_repair(small_run: tuple[Path, Any]) -> None:
    path, _ = small_run
    root = path / "zarr.json"
    for text, fault in (
        (root.read_bytes()[:1000], " is damaged"),
        (b"{}", ": attributes is missing"),
    ):
        root.write_bytes(text)
        with pytest.raises(FormatError, match=rf"zarr\.json{fault}.*trajstore repair .*\.zarr$"):
            open_run(path)
        with pytest.raises(RunExists, match=r"is not a run .*trajstore repair .*\.zarr$"):
            check_target(path, overwrite=True)
    root.unlink()
    with pytest.raises(FormatError, match=r"has no zarr\.json; .*trajstore repair .*\.zarr$"):
        open_run(path)
    repair(path)
    assert open_run(path).sizes["step"]


@pytest.mark.parametrize("number", [FORMAT - 1, WITH_SETTINGS + 1])
def test_another_format_names_the_version_that_reads_it(
    small_run: tuple[Path, Any], number: int
) -> None:
    path, _ = small_run
    root = json.loads((path / "zarr.json").read_bytes())
    root["attributes"] |= {"trajstore_format": number, "trajstore_version": "9.1"}
    (path / "zarr.json").write_text(json.dumps(root))
    with pytest.raises(
        FormatError, match=rf"format {number}, .*open it with the trajstore 9\.1"
    ) as told:
        open_run(path)
    assert ("export it there to a .safetensors file" in str(told.value)) == (number < FORMAT)


@pytest.mark.parametrize("engine", ["trajstore", TrajstoreBackend, None])
def test_it_opens_a_run_also_where_nobody_names_it(
    small_run: tuple[Path, Any], engine: Any
) -> None:
    path, _ = small_run
    expected = xr.open_zarr(path).load()
    for given in (path, str(path)):
        ds = xr.open_dataset(given, engine=engine)
        assert ds.W.chunks is None
        assert not ds.W.variable._in_memory
        xr.testing.assert_identical(ds.load(), expected)
    lazy = xr.open_dataset(path, engine=engine, chunks={})
    assert lazy.W.chunksizes == {"step": (4, 4, 3), "token": (10,), "hidden": (6,)}
    assert lazy.loss.chunksizes == {"step": (4, 4, 3)}
    for names in (["grad", "logits", "token_text"], "grad"):
        part = xr.open_dataset(path, engine=engine, drop_variables=names)
        xr.testing.assert_identical(part.load(), expected.drop_vars(names))


def test_it_takes_runs_for_its_own_and_nothing_else(
    small_run: tuple[Path, Any], tmp_path: Path
) -> None:
    engine = TrajstoreBackend()
    assert all(engine.guess_can_open(kind(small_run[0])) for kind in (Path, str))
    zarr.create_group(tmp_path / "theirs.zarr")
    for name, root in (("broken.zarr", "{"), ("list.zarr", '["attributes"]'), ("folder", "")):
        (tmp_path / name).mkdir()
        (tmp_path / name / ("zarr.json" if root else "other")).write_text(root)
    (tmp_path / "file.nc").write_bytes(b"CDF")
    names = ("theirs.zarr", "folder", "broken.zarr", "list.zarr", "file.nc", "nothing")
    others = (b"bytes", 3, None, {}, open_run(small_run[0]), "s3://bucket/run.zarr")
    for other in (*(tmp_path / name for name in names), *others):
        assert not engine.guess_can_open(other)


@pytest.mark.filterwarnings("ignore:Consolidated metadata")
def test_a_copy_that_xarray_makes_reads_the_same(
    small_run: tuple[Path, Any], tmp_path: Path
) -> None:
    path, _ = small_run
    xr.open_zarr(path).to_zarr(tmp_path / "copy.zarr")
    expected = xr.open_zarr(path).load()
    for again in (xr.open_zarr, open_run):
        ds = again(tmp_path / "copy.zarr")
        xr.testing.assert_equal(ds.load(), expected)
        assert ds.W.values.tobytes() == expected.W.values.tobytes()
    array = zarr.open_array(tmp_path / "copy.zarr" / "W")
    (codec,) = array.metadata.codecs
    if isinstance(codec, BlockCodec):
        data = (tmp_path / "copy.zarr" / "W" / "c" / "1" / "0" / "0").read_bytes()
        form = codec.form(array.chunks)
        assert form.read_tail(data[-form.tail_length :], (1, 0)).label.block == ANYWHERE


@pytest.mark.filterwarnings("ignore:Consolidated metadata")
def test_selections_can_be_written_with_xarray(small_run: tuple[Path, Any], tmp_path: Path) -> None:
    """Plain zarr keeps the encoding of the run, and says what to do."""
    lazy, ds = open_run(small_run[0]), open_run(small_run[0], chunks=None)
    joined = xr.concat([ds.isel(step=[0]), ds.isel(step=[5])], "step")
    for number, selected in enumerate((lazy.isel(step=5), lazy.isel(token=1), joined)):
        selected.to_zarr(tmp_path / f"{number}.zarr")
        written = xr.open_zarr(tmp_path / f"{number}.zarr")
        xr.testing.assert_identical(written.compute(), selected.compute())
    plain = xr.open_zarr(small_run[0]).isel(step=5)
    with pytest.raises(ValueError, match=r"ds\.drop_encoding\(\)\.to_zarr"):
        plain.to_zarr(tmp_path / "plain.zarr")
    plain.drop_encoding().to_zarr(tmp_path / "plain.zarr", mode="w")


# Groups and addresses.


def test_an_address_without_a_run_is_refused(small_run: tuple[Path, Any]) -> None:
    with pytest.raises(RunNotFound, match="there is no run at memory://open/none"):
        open_group("memory://open/none")
    copied(small_run[0] / "W", "memory://open/array")
    with pytest.raises(FormatError, match="memory://open/array is not a Zarr v3 group"):
        open_group("memory://open/array")


@pytest.mark.parametrize(
    ("address", "told"),
    [
        ("file:///tmp/run.zarr", "an unknown kind of address, expected one of s3://, gs://"),
        ("s3://bucket", "names no run; expected SCHEME://BUCKET/KEY"),
        ("s3://user:secret@bucket/run.zarr", "credentials come from the environment"),
        ("hf://datasets/user/name", "names no run; expected hf://datasets/USER/NAME/RUN.zarr"),
        ("hf://user//run.zarr", "names no run; expected hf://"),
        ("s3://[bucket/run.zarr", "is not an address: Invalid IPv6 URL"),
        ("https://host/run.zarr?signature=1", "is not a supported address, expected SCHEME"),
    ],
)
def test_addresses_that_cannot_be(address: str, told: str) -> None:
    with pytest.raises(InvalidArgument, match=told):
        open_group(address)


ARRAYS = "consolidated_metadata.metadata"
LENGTH = f"{ARRAYS}.W.chunk_grid.configuration.chunk_shape.0"
HUGE = 1 << 40
SERIES = ("step", "W", "grad", "logits", "loss")
ROWS = {"attributes.committed_rows": HUGE} | {f"{ARRAYS}.{name}.shape.0": HUGE for name in SERIES}


def annotated(run: Path) -> None:
    annotate_run(run, token_text=["a"] * 10, overwrite=True)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (ROWS, r"step has shape \[1099511627776\], but its last block is not stored"),
        ({"attributes.committed_rows": HUGE}, "is 1099511627776, expected 11, the rows of its"),
        ({f"{ARRAYS}.W.shape.1": HUGE, f"{ARRAYS}.token.shape.0": HUGE},
         r"token\.chunk_grid\.configuration\.chunk_shape\.0 is 10, expected 1099511627776"),
        ({LENGTH: HUGE}, r"chunk_shape is \[1099511627776, 10, 6\], .* at most 274,877,906,944"),
        ({LENGTH: 1 << 30}, r"W\.codecs\.0\..*, expected at most 65,536 chunks in a block"),
        ({"attributes.config": reduce(lambda inner, _: {"a": inner}, range(200), {})},
         "nested more than 100 deep"),
        ({ARRAYS: {"../../x": {}}}, "an invalid name, '../../x'"),
        ("large", "at most 16,777,216"),
        ("pipe", "not a regular file"),
    ],
)  # fmt: skip
def test_what_is_out_of_all_proportion_is_refused(
    small_run: tuple[Path, Any], changes: Any, message: str
) -> None:
    metadata = small_run[0] / "zarr.json"
    if changes == "pipe":
        metadata.unlink()
        os.mkfifo(metadata)
    elif changes == "large":
        metadata.write_text(metadata.read_text() + " " * (17 << 20))
    else:
        edit(metadata, lambda root: [put(root, *change) for change in changes.items()])
    for opened in (open_group, open_run, RunWriter.resume, annotated):
        with pytest.raises(FormatError, match=message):
            opened(small_run[0])
    assert not verify(small_run[0]).clean
    if changes in (ROWS, "large"):  # the same at an address
        far = copied(metadata.parent, "memory://out/of/proportion.zarr")
        for read in (open_run, information, RunWriter.resume):
            with pytest.raises(FormatError, match=message):
                read(far)


def test_a_server_without_ends_or_ranges(small_run: tuple[Path, Any]) -> None:
    """As Azure is; most objects of this run are shorter than the end that is asked for."""
    path = small_run[0]
    with web_server(path.parent, ranges=r"bytes=\d") as (server, _):
        far = open_run(f"{server}/{path.name}", chunks=None).load()
        xr.testing.assert_identical(open_run(path).load(), far)
    told = pytest.raises(ObjectStoreError, match=r"^http://.*/c.*; runs are read in parts: copy")
    with web_server(path.parent, ranges="none") as (server, _), told:
        open_run(f"{server}/{path.name}").load()


@pytest.mark.parametrize(
    ("runs", "asked", "message"),
    [
        (["c.wte.weight"], "c.zarr", r"similar names: .*c\.wte\.weight\.zarr$"),
        (["c.wte.weight"], "other.zarr", r"at .*other\.zarr; runs in .*: c\.wte\.weight\.zarr$"),
        ("abcdef", "gatsby.zarr", r"; runs in .*: a\.zarr, b\.zarr, c\.zarr, d\.zarr, e\.zarr …$"),
        (["gatsby"], "gatsby.zar", r"did you mean 'gatsby\.zarr'\?"),
        ("ab", "", r"a folder of runs; pass .*a\.zarr, or all .*/\*\.zarr$"),
    ],
)
def test_runs_in_the_folder_are_named(
    tmp_path: Path, runs: list[str], asked: str, message: str
) -> None:
    for name in runs:
        begin(tmp_path / f"{name}.zarr").close()
    with pytest.raises(RunNotFound if asked else FormatError, match=message):
        open_group(tmp_path / asked)
