"""Runs whose arrays zarr shards, read by the codec of blocks, with nothing on disk changed."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import xarray as xr
import zarr
from object_stores import copied

from trajstore import FormatError, RunWriter, open_run
from trajstore.codec.block_codec import BlockCodec
from trajstore.store.reading.block_view import as_blocks
from trajstore.store.reading.open_group import open_group
from trajstore.values.native_types import native_type, widen

DATA = Path(__file__).parents[3] / "data"
GOLDEN = sorted(path.name for path in DATA.glob("format1-*.zarr"))

_spec = importlib.util.spec_from_file_location("make_golden", DATA / "make_golden.py")
assert _spec is not None
assert _spec.loader is not None
golden = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(golden)

portable = pytest.mark.parametrize("small_run", ["portable"], indirect=True)


def codecs(group: zarr.Group, name: str) -> list[Any]:
    array = group[name]
    return list(array.metadata.codecs)  # type: ignore[union-attr]


def contents(path: Path) -> dict[str, bytes]:
    files = (file for file in path.rglob("*") if file.is_file())
    return {str(file.relative_to(path)): file.read_bytes() for file in files}


@pytest.mark.parametrize("name", GOLDEN)
@pytest.mark.parametrize("chunks", ["blocks", None])
def test_runs_of_format_1_are_read_bit_for_bit(name: str, chunks: Any) -> None:
    before = contents(DATA / name)
    ds = open_run(DATA / name, chunks=chunks)
    xr.testing.assert_identical(ds.load(), xr.open_zarr(DATA / name).load())
    for variable, dtype in golden.TYPES.items():
        expected = widen(golden.golden_bits(variable), native_type(dtype))
        assert ds[variable].values.tobytes() == np.ascontiguousarray(expected).tobytes()
    assert contents(DATA / name) == before


@pytest.mark.parametrize("name", GOLDEN)
def test_each_array_of_format_1_is_read_by_the_codec_of_blocks(name: str) -> None:
    found = open_group(DATA / name)
    group = as_blocks(found)
    for variable in (*golden.TYPES, "step"):
        (codec,) = codecs(group, variable)
        assert isinstance(codec, BlockCodec)
        assert (codec.array, codec.runs) == (variable, None)
        assert group[variable].shape == found[variable].shape  # type: ignore[union-attr]
        assert group[variable].attrs == found[variable].attrs
    assert codecs(group, "token") == codecs(found, "token")
    assert dict(group.attrs) == dict(found.attrs)


@portable
def test_portable_runs_are_read_bit_for_bit_and_by_their_labels(
    small_run: tuple[Path, dict[str, np.ndarray]],
) -> None:
    path, bits = small_run
    group = as_blocks(open_group(path))
    (codec,) = codecs(group, "W")
    assert isinstance(codec, BlockCodec)
    assert [list(entry) for entry in codec.runs or ()] == group.attrs["runs"]
    ds = open_run(path, chunks=None)
    xr.testing.assert_identical(ds.copy().load(), xr.open_zarr(path).load())
    assert (ds.W.values.view("u4") == bits["W"].astype("u4") << 16).all()
    (path / "W" / "c.1.0.0").write_bytes((path / "W" / "c.0.0.0").read_bytes())
    xr.open_zarr(path).W.load()  # zarr by itself does not notice
    with pytest.raises(FormatError, match=r"it is W, block 0, part 0 .* where W, block 1"):
        open_run(path).W.load()


@pytest.mark.parametrize("small_run", ["delta"], indirect=True)
def test_a_run_that_is_read_so_anyway_is_left_as_it_is(small_run: tuple[Path, Any]) -> None:
    group = open_group(small_run[0])
    assert as_blocks(group) is group


@portable
@pytest.mark.filterwarnings("ignore:Consolidated metadata")
def test_what_is_stored_otherwise_stays_with_zarr(small_run: tuple[Path, Any]) -> None:
    path, _ = small_run
    own = zarr.open_group(path, mode="a", use_consolidated=False)
    mask = own.create_array("mask", shape=(4, 4), chunks=(2, 2), shards=(4, 4), dtype="int64")
    mask[...] = np.arange(16).reshape(4, 4)
    # Also what is called as an array of the run, but lies deeper.
    own.create_group("backup").create_array("W", data=np.arange(16.0).reshape(4, 4))
    zarr.consolidate_metadata(path)
    group = as_blocks(open_group(path))
    assert isinstance(codecs(group, "W")[0], BlockCodec)
    for name in ("mask", "backup/W"):
        assert codecs(group, name) == codecs(own, name)
    assert (group["backup/W"][...] == np.arange(16).reshape(4, 4)).all()  # type: ignore[index]
    assert (group["mask"][...] == np.arange(16).reshape(4, 4)).all()  # type: ignore[index]


@portable
def test_without_consolidated_metadata_it_is_read_too(small_run: tuple[Path, Any]) -> None:
    """As another program may leave a run."""
    path, bits = small_run
    root = json.loads((path / "zarr.json").read_bytes())
    del root["consolidated_metadata"]
    (path / "zarr.json").write_text(json.dumps(root))
    group = as_blocks(open_group(path))
    assert isinstance(codecs(group, "W")[0], BlockCodec)
    values = np.asarray(group["W"][...])  # type: ignore[index]
    assert (values.view("u4") == bits["W"].astype("u4") << 16).all()


@portable
def test_portable_runs_at_addresses(small_run: tuple[Path, Any]) -> None:
    path, _ = small_run
    address = f"memory://portable/{path.name}"
    place = copied(path, address)
    far = open_run(address, chunks=None)
    xr.testing.assert_identical(open_run(path).load(), far.copy().load())
    (place / "W/c.1.0.0").unlink()
    with pytest.raises(FormatError, match=r"^W, block 1 .* is missing"):
        far.W.load()


@portable
def test_a_run_is_seen_as_it_grows(small_run: tuple[Path, Any]) -> None:
    path, bits = small_run
    early = open_run(path, chunks=None)
    rest: dict[str, Any] = {name: bits[name][0] for name in ("W", "grad", "logits")}
    with RunWriter.resume(path) as run:
        run.append(100, **rest, loss=np.float32(1))
    assert early.W[10].values.tobytes() == open_run(path).W[10].values.tobytes()
    assert open_run(path).sizes["step"] == 12
