"""Rows that are computed from other arrays: what happens where those are damaged or missing."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import xarray as xr
from zarr.storage import MemoryStore

from trajstore import RunWriter, open_run, repair, sample_run, verify
from trajstore.codec.computed_rows import cache
from trajstore.errors import FormatError, InvalidArgument

MATRICES = ("W", "grad", "exp_avg", "exp_avg_sq")
ROWS, BLOCK = 40, 16


@pytest.fixture(scope="module")
def history(tmp_path_factory: pytest.TempPathFactory) -> xr.Dataset:
    path = sample_run(tmp_path_factory.mktemp("sample") / "sample.zarr")
    return open_run(path).isel(step=slice(0, ROWS)).load()


@pytest.fixture(scope="module")
def written(history: xr.Dataset, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("replay") / "run.zarr"
    names = [str(name) for name in history.data_vars]
    with RunWriter.create(
        path,
        token=history.token.values,
        hidden=history.sizes["hidden"],
        variables={name: history[name].attrs["native_dtype"] for name in names},
        attributes={"optimizer": history.attrs["optimizer"]},
        block_rows=BLOCK,
        encoding="replay",
    ) as run:
        for row, step in enumerate(history.step.values):
            run.append(step=int(step), **{name: history[name].values[row] for name in names})
    return path


@pytest.fixture
def run(written: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(written, tmp_path / "run.zarr"))


@pytest.fixture(autouse=True)
def _no_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same rows of another copy would be found."""
    monkeypatch.setattr(cache, "_most", 0)


def damage(run: Path, name: str, block: int) -> None:
    shard = run / name / f"c.{block}.0.0"
    data = bytearray(shard.read_bytes())
    data[40] ^= 1
    shard.write_bytes(data)


def test_a_store_without_files_reads_the_same_bits(written: Path, history: xr.Dataset) -> None:
    from zarr.core.buffer import default_buffer_prototype

    buffer = default_buffer_prototype().buffer
    files = (path for path in written.rglob("*") if path.is_file())
    held = {str(path.relative_to(written)): buffer.from_bytes(path.read_bytes()) for path in files}
    ds = xr.open_zarr(MemoryStore(held))
    for name in MATRICES:
        assert ds[name].values.tobytes() == history[name].values.tobytes()
    picked = ds.W[5:35:3, [70, 3]].values
    assert picked.tobytes() == history.W[5:35:3, [70, 3]].values.tobytes()


def test_most_of_a_computed_array_is_its_key_rows(written: Path) -> None:
    size = {name: sum(f.stat().st_size for f in (written / name).glob("c*")) for name in MATRICES}
    assert all(10 * size[name] < size["grad"] for name in ("exp_avg", "exp_avg_sq"))


def test_a_missing_array_is_named(run: Path) -> None:
    shutil.rmtree(run / "grad")
    ds = xr.open_zarr(run)
    with pytest.raises(
        FormatError, match=r"^W, block . .* is computed from grad, which is missing"
    ):
        _ = ds.W.values
    assert ds.loss.shape == (ROWS,)


def test_a_damaged_array_is_named(run: Path, history: xr.Dataset) -> None:
    damage(run, "grad", 1)
    ds = open_run(run)
    with pytest.raises(FormatError, match=r"W, block 1.*grad, bytes 0 to .*: the checksum"):
        _ = ds.W[20].values
    assert ds.W[:BLOCK].values.tobytes() == history.W[:BLOCK].values.tobytes()


def test_a_repair_drops_the_rows_of_all_that_is_computed(run: Path, history: xr.Dataset) -> None:
    damage(run, "exp_avg", 1)
    (problem,) = verify(run).problems
    assert problem.array == "exp_avg"
    with pytest.raises(InvalidArgument, match=r"cannot drop exp_avg: .* computed together"):
        repair(run, drop_arrays=["exp_avg"])
    done = repair(run, yes=True, fill_damaged=True)
    assert done.rows == BLOCK
    assert verify(run).clean
    for name in MATRICES:
        assert open_run(run)[name].values.tobytes() == history[name].values[:BLOCK].tobytes()
