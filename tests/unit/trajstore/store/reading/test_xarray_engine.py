"""Runs as xarray opens them by itself, and as it copies them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import xarray as xr
import zarr
from one_block import divided_run

from trajstore import open_run
from trajstore.codec.block import ANYWHERE
from trajstore.codec.block_codec import BlockCodec
from trajstore.store.reading.open_run import TrajstoreBackend


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


def test_with_chunks_it_has_one_of_dask_for_each_object(small_run: tuple[Path, Any]) -> None:
    path, _ = small_run
    ds = xr.open_dataset(path, engine="trajstore", chunks={})
    assert ds.W.chunksizes == {"step": (4, 4, 3), "token": (10,), "hidden": (6,)}
    assert ds.loss.chunksizes == {"step": (4, 4, 3)}
    xr.testing.assert_identical(ds.load(), xr.open_zarr(path).load())


def test_dask_chunks_are_the_objects_of_a_block(tmp_path: Path) -> None:
    bits = divided_run(tmp_path / "run.zarr", large=False)
    W = open_run(tmp_path / "run.zarr").W
    assert W.chunks == ((4, 4, 3), (102, 102, 96), (3,))
    assert (W.values.view("u4") == bits.astype("u4") << 16).all()
    objects = sorted(file.name for file in (tmp_path / "run.zarr" / "W").glob("c.1.*"))
    assert objects == ["c.1.0.0", "c.1.1.0", "c.1.2.0"]


def test_variables_can_be_left_out(small_run: tuple[Path, Any]) -> None:
    path, _ = small_run
    for names in (["grad", "logits", "token_text"], "grad"):
        ds = xr.open_dataset(path, engine="trajstore", drop_variables=names)
        xr.testing.assert_identical(ds.load(), xr.open_zarr(path).drop_vars(names).load())


def test_it_takes_runs_for_its_own_and_nothing_else(
    small_run: tuple[Path, Any], tmp_path: Path
) -> None:
    engine = TrajstoreBackend()
    assert engine.guess_can_open(small_run[0])
    assert engine.guess_can_open(str(small_run[0]))
    zarr.create_group(tmp_path / "theirs.zarr")
    (tmp_path / "folder").mkdir()
    (tmp_path / "broken.zarr").mkdir()
    (tmp_path / "broken.zarr" / "zarr.json").write_text("{")
    (tmp_path / "list.zarr").mkdir()
    (tmp_path / "list.zarr" / "zarr.json").write_text('["attributes"]')
    (tmp_path / "file.nc").write_bytes(b"CDF")
    for other in ("theirs.zarr", "folder", "broken.zarr", "list.zarr", "file.nc", "nothing"):
        assert not engine.guess_can_open(tmp_path / other)
    assert not engine.guess_can_open("s3://bucket/run.zarr")
    for other in (b"bytes", 3, None, {}, open_run(small_run[0])):
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
        for name in expected.variables:
            assert ds[name].dtype == expected[name].dtype
            assert ds[name].values.tobytes() == expected[name].values.tobytes() or (
                expected[name].dtype.kind not in "fiu"
                and (ds[name].values == expected[name].values).all()
            ), name
    array = zarr.open_array(tmp_path / "copy.zarr" / "W")
    (codec,) = array.metadata.codecs
    if isinstance(codec, BlockCodec):
        data = (tmp_path / "copy.zarr" / "W" / "c" / "1" / "0" / "0").read_bytes()
        form = codec.form(array.chunks)
        assert form.read_tail(data[-form.tail_length :], (1, 0)).label.block == ANYWHERE


@pytest.mark.filterwarnings("ignore:Consolidated metadata")
def test_selections_can_be_written_with_xarray(small_run: tuple[Path, Any], tmp_path: Path) -> None:
    """Plain zarr keeps the encoding of the run, and says what to do."""
    for number, ds in enumerate((open_run(small_run[0]), open_run(small_run[0], chunks=None))):
        one, joined = ds.isel(step=5), xr.concat([ds.isel(step=[0]), ds.isel(step=[5])], "step")
        for name, selected in {"one": one, "token": ds.isel(token=1), "joined": joined}.items():
            selected.to_zarr(tmp_path / f"{name}{number}.zarr")
            written = xr.open_zarr(tmp_path / f"{name}{number}.zarr")
            xr.testing.assert_identical(written.compute(), selected.compute())
    plain = xr.open_zarr(small_run[0]).isel(step=5)
    with pytest.raises(ValueError, match=r"ds\.drop_encoding\(\)\.to_zarr"):
        plain.to_zarr(tmp_path / "plain.zarr")
    plain.drop_encoding().to_zarr(tmp_path / "plain.zarr", mode="w")
