"""The metadata file of an array is that of its facts, or the member that differs is refused."""

from __future__ import annotations

import copy
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import xarray as xr
import zarr
from damage import edit, put
from golden_runs import golden_metadata

from trajstore import open_run
from trajstore.errors import FormatError
from trajstore.store.metadata.zarr_json import array_faults, facts_of, metadata_of

Small = tuple[Path, dict[str, np.ndarray]]

GOLDEN = golden_metadata()["consolidated_metadata"]["metadata"]


@pytest.mark.parametrize("name", GOLDEN)
def test_the_metadata_of_a_recorder_is_that_of_its_facts(name: str) -> None:
    facts = facts_of(name, GOLDEN[name])
    assert json.dumps(metadata_of(facts)) == json.dumps(GOLDEN[name])
    assert list(array_faults(facts, GOLDEN[name])) == []


@pytest.mark.parametrize(
    ("place", "value", "told"),
    [
        ("shape", None, "shape is None, expected 3 lengths"),
        ("shape.0", 1 << 48, "expected 3 lengths"),
        ("shape.2", 9, "shape is [7, 4, 9], expected lengths that blocks of [3, 4, 3] cover"),
        ("node_type", "group", 'node_type is \'group\', expected "array"'),
        ("chunk_grid", "regular", "chunk_grid.configuration.chunk_shape is missing, expected 3"),
        ("chunk_grid.configuration", ..., "chunk_grid.configuration.chunk_shape is missing"),
        ("chunk_grid.configuration.chunk_shape.0", 0, "is [0, 4, 3], expected 3 positive"),
        ("more", {"must_understand": True}, "more is {'must_understand': True}, expected"),
        ("codecs", {}, "codecs is {}, expected a list of objects"),
        ("codecs.0", [], "codecs is [[]], expected a list of objects with name and configuration"),
        ("codecs.0", "trajstore.block", "codecs.0.configuration is missing, expected an object"),
        ("codecs.0.configuration", 1, "codecs.0.configuration is 1, expected an object"),
        ("codecs.0.configuration.array", "grad", "configuration.array is 'grad', expected \"W\""),
        ("codecs.0.configuration.runs", [[0, 1]], "runs is [[0, 1]], expected a list of [block"),
        ("codecs.0.configuration", {"array": "W", "runs": [[0, "5a"]], "chunk_shape": [3, 4, 3],
         **{str(number): 0 for number in range(99)}}, "expected the settings of a codec"),
        ("codecs.0.configuration.chunk_shape", 3, "configuration.chunk_shape is 3, expected 3"),
        ("attributes.units", {}, "attributes.units is {}, expected no attribute by which xarray"),
        ("attributes.scale_factor", 2.0, "scale_factor is 2.0, expected no attribute by"),
        ("attributes._FillValue", "AAAAAAAA8D8=", "._FillValue is 'AAAAAAAA8D8=', expected"),
        ("attributes.units", "days since 2000-01-01", "expected no attribute by"),
        ("attributes.native_dtype", "int7", "native_dtype is 'int7', expected one of bfloat16"),
        ("dimension_names", "abc", "dimension_names is 'abc', expected ["),
        ("storage_transformers", 7, "storage_transformers is 7, expected []"),
    ],
)  # fmt: skip
def test_an_array_that_cannot_be(place: str, value: Any, told: str) -> None:
    metadata = copy.deepcopy(GOLDEN["W"])
    put(metadata, place, value)
    faults = array_faults(facts_of("W", metadata), metadata)
    assert [told in str(fault) for fault in faults] == [True]


def change(run: Path, name: str, changed: Callable[[dict[str, Any]], Any]) -> None:
    """Change an array's own metadata file, and its copy in the root."""
    edit(run / name / "zarr.json", changed)
    edit(run / "zarr.json", lambda root: changed(root["consolidated_metadata"]["metadata"][name]))


def test_an_array_of_another_run_is_refused(small_run: Small) -> None:
    path, _ = small_run
    other = [[0, "0" * 32]]
    change(path, "W", lambda d: d["codecs"][0]["configuration"].update(runs=other))
    with pytest.raises(FormatError, match=r"metadata\.W\.codecs\.0\.configuration\.runs\.0\.1 is"):
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
    with pytest.raises(FormatError, match=r"logits\.codecs is .*, expected no shards of zarr"):
        open_run(path)


@pytest.mark.parametrize("name", ["token", "is_dead", "token_text"])
def test_a_coordinate_without_values_is_refused(small_run: Small, name: str) -> None:
    path, _ = small_run
    (path / name / "c.0").unlink()
    with pytest.raises(FormatError, match=f"{name}/c.0 is missing"):
        open_run(path)


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
    with pytest.raises(FormatError, match=r"is_dead/.*attributes\.(dtype|scale_factor) is"):
        open_run(copy)
    del array.attrs["scale_factor"], array.attrs["dtype"]
    with pytest.raises(FormatError, match=r"is_dead/.*data_type is 'int8', expected"):
        open_run(copy)
