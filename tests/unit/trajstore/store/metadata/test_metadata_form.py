"""The form of the root: what cannot be is named with its place, wherever a run is opened."""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import xarray as xr
from damage import put

from trajstore import RunWriter, open_run
from trajstore.errors import FormatError
from trajstore.store.metadata.metadata_form import REQUIRED, attribute_faults, root_faults

ROOT = json.loads(
    Path(__file__).parents[4].joinpath("data", "format3-delta.zarr", "zarr.json").read_bytes()
)


def test_the_root_of_a_recorder_has_no_faults() -> None:
    assert list(root_faults(ROOT)) == []
    assert list(attribute_faults(ROOT["attributes"], REQUIRED)) == []


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
    put(root, place, value)
    assert [told in str(fault) for fault in root_faults(root)] == [True]


@pytest.mark.parametrize(
    "value", [{}, None, [], [[1, "5a"]], [[0, "no digits"]], [["0"]], [[0, ""]]]
)
def test_a_root_that_does_not_say_whose_it_is(value: Any) -> None:
    (fault,) = attribute_faults(ROOT["attributes"] | {"runs": value})
    assert str(fault).startswith(f"attributes.runs is {value!r}, expected a list of [block")


PARAMETER = {
    "name": "mix.bias", "shape": [8], "dtype": "float32", "variable": "params", "offset": 64,
    "group": None, "requires_grad": True,
}  # fmt: skip
MATRIX = {key: value for key, value in PARAMETER.items() if key != "offset"} | {"variable": "W"}


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("parameters", {}),
        ("parameters", [MATRIX | {"offset": 0}]),
        ("parameters", [PARAMETER | {"variable": "W"}]),
        ("parameters", [PARAMETER | {"shape": [-1]}]),
        ("parameters", [PARAMETER | {"group": True}]),
        ("parameters", [PARAMETER | {"requires_grad": 1}]),
        ("parameters", [PARAMETER | {"tied": "head.weight"}]),
        ("parameters", [PARAMETER | {"exp_avg_dtype": 1}]),
        ("buffers", [{"name": "mean", "shape": [], "dtype": "int64"}]),
        ("model_config", {"class": "GPT2LMHeadModel", "config": {}}),
    ],
)
def test_a_model_that_cannot_be(name: str, value: Any) -> None:
    possible = {
        "parameters": [MATRIX | {"tied": ["head.weight"]}, PARAMETER],
        "buffers": [{"name": "mean", "shape": [], "dtype": "int64", "offset": 0}],
        "model_config": {"class": "GPT2LMHeadModel", "transformers": "5.0", "config": {}},
    }
    attributes = ROOT["attributes"] | possible
    assert list(attribute_faults(attributes, REQUIRED)) == []
    (fault,) = attribute_faults(attributes | {name: value})
    assert fault.member == f"attributes.{name}"


def resumed(run: Path) -> None:
    RunWriter.resume(run).close()


@pytest.mark.parametrize(("name", "opens"), [("", open_run), ("", resumed), ("W", resumed)])
def test_a_folder_in_the_place_of_a_metadata_is_named(
    small_run: tuple[Path, Any], name: str, opens: Callable[[Path], Any]
) -> None:
    path = small_run[0] / name / "zarr.json"
    path.unlink()
    path.mkdir()
    with pytest.raises(FormatError, match=r"zarr\.json cannot be read: .*directory"):
        opens(small_run[0])


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("name", "place", "value", "opens", "told"),
    [
        ("", "attributes.committed_rows", None, (open_run, resumed),
         r"zarr\.json: attributes\.committed_rows is None, expected a number of rows; list"),
        ("", "consolidated_metadata.metadata.W.codecs.0.configuration.kind", 1,
         (open_run, resumed), r"zarr\.json: .*metadata\.W\.codecs\.0\.configuration\.kind is 1"),
        ("", "consolidated_metadata.metadata.W.codecs.0.configuration.runs", 1, (xr.open_zarr,),
         r"zarr\.json: codecs\.0\.configuration\.runs is 1: 'int' object is not iterable"),
        ("", "consolidated_metadata.metadata.token.codecs.1.configuration.cname", "no",
         (open_run, resumed), r"zarr\.json: .*\.token\.codecs\.1\.configuration\.cname is 'no'"),
        ("", "consolidated_metadata.metadata.token", ..., (open_run, resumed),
         r"zarr\.json: .*\.metadata\.token is missing"),
        ("", "consolidated_metadata.metadata.step.attributes", ..., (open_run, resumed),
         r"zarr\.json: .*\.metadata\.step\.attributes is missing"),
        ("W", "shape", "x", (resumed,), r"W/zarr\.json: shape is 'x'"),
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
    metadata = json.loads(path.read_bytes())
    put(metadata, place, value)
    path.write_text(json.dumps(metadata))
    for opened in opens:
        with pytest.raises(FormatError) as caught:
            opened(small_run[0])
        assert re.search(told, str(caught.value))
