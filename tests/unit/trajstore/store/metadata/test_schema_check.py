"""Arrays that would be read as something else than was recorded are refused, by name."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import xarray as xr
import zarr
from damage import edit

from trajstore import FormatError, open_run

Small = tuple[Path, dict[str, np.ndarray]]


def change(run: Path, name: str, changed: Callable[[dict[str, Any]], Any]) -> None:
    """Change an array's own document, and its copy in the root."""
    edit(run / name / "zarr.json", changed)
    edit(run / "zarr.json", lambda root: changed(root["consolidated_metadata"]["metadata"][name]))


@pytest.mark.parametrize(
    ("name", "members", "message"),
    [
        ("W", {"attributes": {"scale_factor": 2.0}}, "its attribute scale_factor makes"),
        ("is_dead", {"attributes": {"add_offset": 1}}, "its attribute add_offset makes"),
        ("loss", {"attributes": {"_FillValue": "AAAAAAAA8D8="}}, "its attribute _FillValue makes"),
        ("step", {"attributes": {"units": "days since 2000-01-01"}}, "reads it as times"),
        ("W", {"attributes": {"native_dtype": "int7"}}, "native_dtype is 'int7'"),
        ("W", {"dimension_names": ["step", "token", "head"]}, "its dimensions are"),
        ("token", {"data_type": "int64"}, "its type is int64, expected int32"),
    ],
)
@pytest.mark.filterwarnings("ignore")
def test_what_changes_values_is_refused(
    small_run: Small, name: str, members: dict[str, Any], message: str
) -> None:
    path, _ = small_run

    def changed(document: dict[str, Any]) -> None:
        for key, value in members.items():
            document[key] = document[key] | value if isinstance(value, dict) else value

    change(path, name, changed)
    with pytest.raises(FormatError, match=f"^{name} differs from what was recorded: .*{message}"):
        open_run(path)


def test_an_array_of_another_run_is_refused(small_run: Small) -> None:
    path, _ = small_run
    other = [[0, "0" * 32]]
    change(path, "W", lambda d: d["codecs"][0]["configuration"].update(runs=other))
    with pytest.raises(FormatError, match="belongs to another array or another run"):
        open_run(path)


@pytest.mark.filterwarnings("ignore:Consolidated metadata")
def test_an_array_that_zarr_has_sharded_is_refused(small_run: Small) -> None:
    """Nothing says whose blocks it holds; what is no array of a run is left to zarr."""
    path, _ = small_run
    group = zarr.open_group(path, mode="a", use_consolidated=False)
    sharded = {"shape": (11, 10), "chunks": (4, 5), "shards": (4, 10), "dtype": "float32"}
    group.create_array("mask", **sharded, dimension_names=("step", "token"))
    zarr.consolidate_metadata(path)
    assert open_run(path).W.shape == (11, 10, 6)
    group.create_array(
        "logits", **sharded, overwrite=True, dimension_names=("step", "token"),
        attributes={"native_dtype": "float32"},
    )  # fmt: skip
    zarr.consolidate_metadata(path)
    with pytest.raises(FormatError, match=r"^logits differs .*: zarr sharded it"):
        open_run(path)


@pytest.mark.parametrize("name", ["token", "is_dead", "token_text"])
def test_a_coordinate_without_values_is_refused(small_run: Small, name: str) -> None:
    path, _ = small_run
    (path / name / "c.0").unlink()
    with pytest.raises(FormatError, match=f"^{name} differs from what was recorded: .* missing"):
        open_run(path)


@pytest.mark.filterwarnings("ignore")
def test_a_copy_that_xarray_made_is_opened(small_run: Small, tmp_path: Path) -> None:
    path, _ = small_run
    source, copy = xr.open_zarr(path).load(), tmp_path / "copy.zarr"
    source.to_zarr(copy)
    assert xr.open_zarr(copy).equals(source)
    assert open_run(copy).equals(source)


def test_a_mask_in_a_copy_of_an_older_xarray_is_a_mask(small_run: Small, tmp_path: Path) -> None:
    """Which has it as int8; of other numbers that attribute is still refused."""
    path, _ = small_run
    mask, copy = xr.open_zarr(path).is_dead.values, tmp_path / "copy.zarr"
    shutil.copytree(path, copy)
    shutil.rmtree(copy / "is_dead")
    edit(copy / "zarr.json", lambda root: root.pop("consolidated_metadata"))
    array = zarr.open_group(copy, mode="r+").create_array(
        "is_dead", data=mask.astype("i1"), dimension_names=("token",)
    )
    array.attrs["dtype"] = "bool"
    found = open_run(copy).is_dead
    assert found.dtype == bool
    np.testing.assert_array_equal(found, mask)
    array.attrs["scale_factor"] = 2
    with pytest.raises(FormatError, match=r"is_dead .* its attribute (dtype|scale_factor) makes"):
        open_run(copy)
    del array.attrs["scale_factor"], array.attrs["dtype"]
    with pytest.raises(FormatError, match=r"is_dead .* its type is int8, expected bool"):
        open_run(copy)
