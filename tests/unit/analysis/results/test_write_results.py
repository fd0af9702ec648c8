from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import xarray as xr
from disk import Disk
from safetensors import safe_open
from safetensors.numpy import load_file

from trajstore.analysis.results.write_results import describe, write_result
from trajstore.analysis.scan.result_variables import flag_attributes
from trajstore.errors import InvalidArgument, RunExists


def result() -> xr.Dataset:
    return xr.Dataset({"speed": ("step", np.array([1.0, 3.0, np.nan]))}, {"step": [1, 2, 3]})


def test_a_result_is_described_in_numbers() -> None:
    found = describe(result())["speed"]
    assert (found["min"], found["mean"], found["max"], found["nan"]) == (1.0, 2.0, 3.0, 1)


@pytest.mark.parametrize("in_memory", [0, 4])
def test_what_is_no_number_is_counted_and_not_averaged(
    in_memory: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("trajstore.analysis.results.write_results._IN_MEMORY", in_memory)
    since = xr.DataArray([-1, 4, 8, -1], dims="token", attrs=flag_attributes({-1: "never"}))
    kinds = ("gas", "solid")
    kind = xr.DataArray(np.int8([0, 1, 1, 1]), dims="token", attrs=flag_attributes(kinds, np.int8))
    found = describe(xr.Dataset({"since": since, "kind": kind}).chunk(token=3))
    assert [found["since"][name] for name in ("min", "mean", "max", "nan")] == [4, 6, 8, 0]
    assert found["since"]["flags"] == {"never": 2}
    assert found["kind"]["flags"] == {"gas": 1, "solid": 3}
    assert np.isnan([found["kind"][name] for name in ("min", "mean", "max")]).all()


def test_a_result_is_written_once_and_by_its_ending(tmp_path: Path) -> None:
    (file,) = write_result(result(), tmp_path / "speed.nc")
    with xr.open_dataset(file) as again:
        xr.testing.assert_identical(again.speed.drop_attrs(), result().speed)
    with pytest.raises(RunExists):
        write_result(result(), tmp_path / "speed.nc")
    with pytest.raises(InvalidArgument, match=r"\.zarr, \.nc, \.csv, \.safetensors"):
        write_result(result(), tmp_path / "speed.txt")


def test_a_result_is_written_for_scripts(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    ds = xr.Dataset(
        {
            "speed": (("step", "token"), rng.normal(size=(7, 5)), {"units": "1"}),
            "frozen": ("token", np.array([True, False, True, True, False])),
            "counts": (("step", "kind"), rng.integers(0, 9, (7, 2))),
            "total": ((), np.float32(3)),
            "none": (("step", "nothing"), np.empty((7, 0), "f4")),
        },
        {"step": np.arange(7), "token": np.arange(5, dtype="i4"), "kind": ["gas", "solid"]},
    ).chunk(step=3, token=2)
    (file,) = write_result(ds, tmp_path / "result.safetensors")
    held = load_file(file)
    assert set(held) == {"speed", "frozen", "counts", "total", "none", "step", "token"}
    for name, array in held.items():
        np.testing.assert_array_equal(array, ds[name].values)
        assert array.dtype == ds[name].dtype
    with safe_open(file, "numpy") as opened:
        metadata = {name: json.loads(text) for name, text in opened.metadata().items()}
    assert metadata["kind"] == ["gas", "solid"]
    assert metadata["dims"]["speed"] == ["step", "token"]
    assert metadata["attributes"]["speed"] == {"units": "1"}
    with pytest.raises(InvalidArgument, match="seen has type complex128"):
        write_result(xr.Dataset({"seen": ("x", [1j])}), tmp_path / "other.safetensors")
    assert [path.name for path in tmp_path.iterdir()] == ["result.safetensors"]


def test_a_result_stays_until_the_one_that_replaces_it_survives_a_loss_of_power(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "speed.zarr"
    write_result(result(), file)
    disk = Disk(monkeypatch)
    survived: list[bool] = []
    remove = shutil.rmtree

    def watched(path: Path, **options: Any) -> None:
        survived.append(disk.survives(file))
        remove(path, **options)

    monkeypatch.setattr(shutil, "rmtree", watched)
    write_result(result() + 1, file, overwrite=True)
    assert survived == [True]
    assert xr.open_zarr(file).speed.values[0] == 2.0
