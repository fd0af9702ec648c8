from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import xarray as xr

from trajstore.analysis.results.write_results import describe, write_result
from trajstore.analysis.scan.flags import flag_attributes
from trajstore.errors import InvalidArgument, RunExists


def result() -> xr.Dataset:
    return xr.Dataset({"speed": ("step", np.array([1.0, 3.0, np.nan]))}, {"step": [1, 2, 3]})


def test_a_result_is_described_in_numbers() -> None:
    found = describe(result())["speed"]
    assert (found["min"], found["mean"], found["max"], found["nan"]) == (1.0, 2.0, 3.0, 1)


def test_what_is_no_number_is_counted_and_not_averaged() -> None:
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
    with pytest.raises(InvalidArgument, match=r"\.zarr, \.nc, \.csv"):
        write_result(result(), tmp_path / "speed.txt")
