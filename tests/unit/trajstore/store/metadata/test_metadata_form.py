"""The form of the metadata: what cannot be is named with its place, wherever a run is opened."""

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
from crashing import TYPES, create, extend, recorded
from damage import codec, edit, put
from golden_runs import golden_metadata

from trajstore import RunWriter, open_run, verify
from trajstore.errors import FormatError
from trajstore.exchange.export_run import branch_run
from trajstore.store.metadata.metadata_form import (
    CONTENT,
    FINGERPRINT,
    REQUIRED,
    attribute_faults,
    listed_segments,
    root_faults,
    segments_attribute,
    trained_segments,
)
from trajstore.store.metadata.zarr_json import array_faults, facts_of, metadata_of

ROOT = golden_metadata()


@pytest.mark.parametrize(
    ("place", "value", "told"),
    [
        ("zarr_format", True, "zarr_format is True, expected 3"),
        ("attributes", ..., "attributes is missing, expected an object"),
        ("more", 1, "more is 1, expected no member of that name"),
        ("consolidated_metadata", "x", "consolidated_metadata is 'x', expected an object"),
        ("consolidated_metadata.metadata", None, "metadata is None, expected an object"),
    ],
)  # fmt: skip
def test_a_root_that_cannot_be(place: str, value: Any, told: str) -> None:
    root = copy.deepcopy(ROOT)
    assert list(root_faults(root)) == []
    put(root, place, value)
    assert [told in str(fault) for fault in root_faults(root)] == [True]


PARAMETER = {
    "name": "mix.bias", "shape": [8], "dtype": "float32", "variable": "params", "offset": 64,
    "group": None, "requires_grad": True,
}  # fmt: skip
MATRIX = {key: value for key, value in PARAMETER.items() if key != "offset"} | {"variable": "W"}


POSSIBLE = {
    "parameters": [MATRIX | {"tied": ["head.weight"]}, PARAMETER],
    "buffers": [{"name": "mean", "shape": [], "dtype": "int64", "offset": 0}],
    "model_config": {"class": "GPT2LMHeadModel", "transformers": "5.0", "config": {}},
    "segments": [{"step": 0, "config": {}}, {"step": 4, "config": {}}],
}
IMPOSSIBLE: dict[str, list[Any]] = {
    "runs": [{}, None, [], [[1, "5a"]], [[0, "no digits"]], [["0"]], [[0, ""]]],
    "parameters": [
        {}, [MATRIX | {"offset": 0}], [PARAMETER | {"variable": "W"}],
        [PARAMETER | {"shape": [-1]}],
        [PARAMETER | {"group": True}], [PARAMETER | {"requires_grad": 1}],
        [PARAMETER | {"tied": "head.weight"}], [PARAMETER | {"exp_avg_dtype": 1}],
    ],
    "buffers": [[{"name": "mean", "shape": [], "dtype": "int64"}]],
    "model_config": [{"class": "GPT2LMHeadModel", "config": {}}],
    "segments": [
        None, [], {}, [3], [{"step": 0}], [{"step": 1, "config": {}}], [{"step": 0, "config": 3}],
        [{"step": True, "config": {}}], [{"step": 0, "config": {}}, {"step": 0, "config": {}}],
        [{"step": 0, "config": {}, "more": 1}],
    ],
}  # fmt: skip


@pytest.mark.parametrize("name", IMPOSSIBLE)
def test_an_attribute_that_cannot_be_is_named(name: str) -> None:
    attributes = ROOT["attributes"] | POSSIBLE
    for possible in (ROOT["attributes"], attributes):
        assert list(attribute_faults(possible, REQUIRED)) == []
    for value in IMPOSSIBLE[name]:
        (fault,) = attribute_faults(attributes | {name: value})
        assert fault.member == f"attributes.{name}"
        assert ", expected a" in str(fault)


def resumed(run: Path) -> None:
    RunWriter.resume(run).close()


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("name", "place", "value", "opens", "told"),
    [
        ("", "attributes.committed_rows", None, (open_run, resumed),
         r"zarr\.json: attributes\.committed_rows is None, expected a number of rows; list"),
        ("", "consolidated_metadata.metadata.W.codecs.0.configuration.kind", 1,
         (open_run, resumed), r"zarr\.json: .*\.W\.codecs\.0\.configuration is {.*the settings"),
        ("", "consolidated_metadata.metadata.W.codecs.0.configuration.runs", 1, (xr.open_zarr,),
         r"zarr\.json: codecs\.0\.configuration\.runs is 1: 'int' object is not iterable"),
        ("", "consolidated_metadata.metadata.token.codecs.1.configuration.cname", "no",
         (open_run, resumed), r"zarr\.json: .*\.token\.codecs\.1\.configuration\.cname is 'no'"),
        ("", "consolidated_metadata.metadata.token", ..., (open_run, resumed),
         r"zarr\.json: .*\.metadata\.token is missing"),
        ("", "consolidated_metadata.metadata.step.attributes", ..., (open_run, resumed),
         r"zarr\.json: .*\.metadata\.step\.attributes is missing"),
        ("W", "shape", "x", (resumed,), r"W/zarr\.json: shape is 'x'"),
        ("", "folder", None, (open_run, resumed), r"zarr\.json is damaged: .*directory"),
        ("W", "folder", None, (resumed,), r"W/zarr\.json is damaged: .*directory"),
    ],
)  # fmt: skip
def test_every_reader_names_the_wrong_metadata(
    small_run: tuple[Path, Any],
    name: str,
    place: str,
    value: Any,
    opens: tuple[Callable[[Path], Any], ...],
    told: str,
) -> None:
    path = small_run[0] / name / "zarr.json"
    if place == "folder":
        path.unlink()
        path.mkdir()
    else:
        edit(path, lambda metadata: put(metadata, place, value))
    for opened in opens:
        with pytest.raises(FormatError, match=told):
            opened(small_run[0])


Digests = tuple[str, str]


def digests(path: Path) -> Digests:
    attributes = open_run(path).attrs
    return attributes[CONTENT], attributes[FINGERPRINT]


def history(path: Path, rows: int) -> list[Digests]:
    """Digests at each commit, of a run that is closed and gone on with after each row."""
    create(path).close()
    found = [digests(path)]
    for stop in range(1, rows + 1):
        with RunWriter.resume(path) as run:
            extend(run, stop)
        found.append(digests(path))
    return found


def test_each_row_has_its_digests_however_the_run_came_to_it(tmp_path: Path) -> None:
    """Recorded at once, resumed after each row, or cut to it. Each run has its own fingerprint."""
    path = tmp_path / "run.zarr"
    had = history(path, 6)
    assert len(set(had)) == 7
    for rows in (6, 5, 4, 0):
        # On threads and buffers nothing depends.
        other = digests(recorded(tmp_path / f"{rows}.zarr", rows, threads=3, buffers=1))
        assert (other[0] == had[rows][0], other[1] == had[rows][1]) == (True, False)
        run = RunWriter.resume(path, rows=rows)
        assert digests(path) == had[rows]  # while it is being recorded again, too
        run.close()
        assert digests(path) == had[rows]
        assert verify(path).clean


def branch(source: Path, rows: int) -> Path:
    path = source.with_name(f"branch-{rows}.zarr")
    branch_run(source, path, rows, types=TYPES, attributes={}, memory="64MiB")
    return path


def test_a_branch_of_a_branch_knows_all_whose_blocks_it_has(tmp_path: Path) -> None:
    source = recorded(tmp_path / "source.zarr", 10)
    first = branch(source, 6)
    with RunWriter.resume(first) as run:
        extend(run, 13)
    second = branch(first, 12)
    runs = [open_run(path).attrs["runs"] for path in (source, first, second)]
    assert [block for block, _ in runs[2]] == [0, 2, 3]
    assert runs[2][:2] == runs[1]
    assert runs[1][0] == runs[0][0]
    assert len({run for _, run in runs[2]}) == 3
    assert digests(second)[0] == digests(recorded(tmp_path / "whole.zarr", 12))[0]
    assert verify(second).clean
    third = branch(source, 2)
    RunWriter.resume(source, rows=2).close()
    found = zip(digests(third), digests(source), strict=True)
    assert [one == other for one, other in found] == [True, False]


def config(steps: int, **others: Any) -> dict[str, Any]:
    return {"training": {"steps": steps, **others}, "recording": {"memory": "1GiB"}}


def test_a_later_resume_replaces_what_came_after_it() -> None:
    resumed = [{"step": 4, "threads": 8}, {"step": 3}, {"step": 5, "threads": 6}]
    attributes = {"config": config(7), "provenance": {"threads": 2, "resumed": resumed}}
    found = trained_segments(attributes, 1, 7)
    assert [(one.first, one.last, one.threads) for one in found] == [(1, 5, 2), (5, 7, 6)]


def test_each_configuration_holds_until_the_next() -> None:
    attributes: dict[str, Any] = {"config": config(5)}
    for steps, step in ((8, 5), (12, 8), (9, 7)):
        attributes |= segments_attribute(attributes, config(steps), step)
        attributes["config"] = config(steps)
    listed = [(entry["step"], entry["config"]["training"]["steps"])
              for entry in listed_segments(attributes)]  # fmt: skip
    assert listed == [(0, 5), (5, 8), (7, 9)]
    found = trained_segments(attributes, 2, 7)
    assert [(one.first, one.last) for one in found] == [(2, 5), (5, 7)]


def test_only_what_is_trained_with_begins_a_segment() -> None:
    same = config(5, device="cpu") | {"recording": {"memory": "64MiB"}}
    assert segments_attribute({"config": config(5, device="auto")}, same, 3) == {}
    before = {"config": config(8)} | segments_attribute({"config": config(5)}, config(8), 5)
    changed = config(8) | {"recording": {"memory": "64MiB"}}
    assert segments_attribute(before, changed, 6)["segments"][-1] == {
        "step": 5,
        "config": changed,
    }


# The metadata file of an array is that of its facts, or the member that differs is refused.


Small = tuple[Path, dict[str, np.ndarray]]

GOLDEN = ROOT["consolidated_metadata"]["metadata"]


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
        ("attributes._Unsigned", "true", "_Unsigned is 'true', expected no attribute by"),
        ("attributes.dtype", "bool", "dtype is 'bool', expected no attribute by"),
        ("attributes.native_dtype", "int7", "native_dtype is 'int7', expected one of bfloat16"),
        ("fill_value", 0.0, "fill_value is 0.0, expected \"NaN\""),
        ("data_type", "float64", "data_type is 'float64', expected \"float32\""),
        ("dimension_names", "abc", "dimension_names is 'abc', expected ["),
        ("storage_transformers", 7, "storage_transformers is 7, expected []"),
    ],
)  # fmt: skip
def test_an_array_that_cannot_be(place: str, value: Any, told: str) -> None:
    metadata = copy.deepcopy(GOLDEN["W"])
    put(metadata, place, value)
    faults = array_faults(facts_of("W", metadata), metadata)
    assert [told in str(fault) for fault in faults] == [True]


def test_an_array_of_another_run_is_refused(small_run: Small) -> None:
    path, _ = small_run
    codec("W", "runs", [[0, "0" * 32]])(path)
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
