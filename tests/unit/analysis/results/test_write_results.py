from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import xarray as xr

from trajstore.analysis.results.write_results import describe, write_result
from trajstore.errors import InvalidArgument, RunExists


def result() -> xr.Dataset:
    return xr.Dataset({"speed": ("step", np.array([1.0, 3.0, np.nan]))}, {"step": [1, 2, 3]})


def test_a_result_is_described_in_numbers() -> None:
    found = describe(result())["speed"]
    assert (found["min"], found["mean"], found["max"], found["nan"]) == (1.0, 2.0, 3.0, 1)


def test_a_result_is_written_once_and_by_its_ending(tmp_path: Path) -> None:
    (file,) = write_result(result(), tmp_path / "speed.nc")
    with xr.open_dataset(file) as again:
        xr.testing.assert_identical(again.speed.drop_attrs(), result().speed)
    with pytest.raises(RunExists):
        write_result(result(), tmp_path / "speed.nc")
    with pytest.raises(InvalidArgument, match=r"\.zarr, \.nc, \.csv"):
        write_result(result(), tmp_path / "speed.txt")
