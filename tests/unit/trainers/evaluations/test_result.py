"""Results of steps: their form, and the store that they are appended to."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import xarray as xr
import zarr

from trajstore.errors import InvalidArgument, RunExists, RunLocked
from trajstore.schema import EVALUATION
from trajstore.trainers.evaluations.result import ResultStore, check_like, step_dataset


def test_every_kind_of_value_has_a_type_and_dimensions() -> None:
    weight = torch.nn.Parameter(torch.ones(2, dtype=torch.bfloat16))
    token = xr.DataArray(np.ones(3, np.float32), dims="token", coords={"token": [4, 5, 6]})
    result = {
        "count": 3,
        "mean": 0.5,
        "text": "a\0",
        "texts": (("layer",), ["\0", "b"]),
        "plain": np.zeros((2, 1)),
        "weight": weight,
        "named": (("layer",), [1, 2]),
        "cosine": token,
    }
    ds = step_dataset(result, 7)
    assert ds["step"].values == [7]
    assert {str(name): da.dims for name, da in ds.data_vars.items()} == {
        "count": ("step",),
        "mean": ("step",),
        "text": ("step",),
        "texts": ("step", "layer"),
        "plain": ("step", "plain_0", "plain_1"),
        "weight": ("step", "weight_0"),
        "named": ("step", "layer"),
        "cosine": ("step", "token"),
    }
    assert (ds["weight"].dtype, ds["count"].dtype.kind) == (np.float32, "i")
    assert ds["token"].values.tolist() == [4, 5, 6]
    assert ds["text"].values.tolist() == ["a\0"]  # with its final NUL
    assert ds["texts"].values.tolist() == [["\0", "b"]]
    with torch.no_grad():
        weight.zero_()
    assert ds["weight"].values.tolist() == [[1, 1]]  # a copy


@pytest.mark.parametrize(
    ("result", "message"),
    [
        (None, "step 7: the function returned NoneType, expected a dict"),
        ({}, "step 7: the function returned dict, expected a dict"),
        ({"loss": 1.0}, "returned loss, which is a name of a run"),
        ({"step": 1}, "returned step, which is a name of a run"),
        ({1: 1.0}, "got the name 1, expected a string"),
        ({"a": None}, "a is NoneType, expected a number"),
        ({"a": object()}, "a is object, expected"),
        ({"a": (("x", "y"), [1.0])}, "a is tuple, expected"),
        ({"a": (("x",), [1.0]), "b": (("x",), [1.0, 2.0])}, "do not fit together"),
    ],
)
def test_other_results_are_refused(result: Any, message: str) -> None:
    with pytest.raises(InvalidArgument, match=message):
        step_dataset(result, 7)


@pytest.mark.parametrize(
    ("later", "message"),
    [
        ({"b": 1.0}, "step 8: the function returned b, but a at the steps before"),
        ({"a": 1}, "a has type int64, but float64"),
        ({"a": (("x",), [1.0])}, r"a has dimensions \('x',\), but \(\)"),
    ],
)
def test_results_of_another_form_are_refused(later: Any, message: str) -> None:
    first = step_dataset({"a": 1.0}, 7)
    check_like(step_dataset({"a": 2.0}, 8), first)
    with pytest.raises(InvalidArgument, match=message):
        check_like(step_dataset(later, 8), first)


def test_results_with_another_coordinate_are_refused() -> None:
    ones = np.ones(2)
    steps = [
        step_dataset({"a": xr.DataArray(ones, dims="token", coords={"token": token})}, 7)
        for token in ([1, 2], [1, 3])
    ]
    with pytest.raises(InvalidArgument, match="the coordinate token differs"):
        check_like(steps[1], steps[0])


ABOUT = {"run": "run.zarr", "function": "probe"}


def result(step: int) -> xr.Dataset:
    array = np.full((2, 3), step, np.float32)
    return step_dataset({"a": step / 2, "t": "x" * step, "m": (("row", "column"), array)}, step)


def add(path: Path, steps: Sequence[int], about: Any = ABOUT, **options: Any) -> None:
    with ResultStore.open(path, about, **options) as store:
        for step in steps:
            store.add(result(step))


def test_appended_results_are_those_of_one_write(tmp_path: Path) -> None:
    add(tmp_path / "out.zarr", range(3))
    add(tmp_path / "out.zarr", range(3, 40))
    ds = xr.open_zarr(tmp_path / "out.zarr").load()  # no warning about metadata
    expected = xr.concat([result(step) for step in range(40)], "step")
    for name in expected.variables:
        assert ds[name].values.tolist() == expected[name].values.tolist()
        assert ds[name].dims == expected[name].dims
    assert ds["m"].dtype == np.float32
    assert ds.attrs == {EVALUATION: ABOUT}


def test_results_are_written_while_others_are_computed(tmp_path: Path) -> None:
    with ResultStore.open(tmp_path / "out.zarr", ABOUT) as store:
        store.waiting_seconds = 0
        store.add(result(0))
        assert xr.open_zarr(tmp_path / "out.zarr").sizes["step"] == 1
        with pytest.raises(RunLocked):
            add(tmp_path / "out.zarr", [])


def test_a_kill_while_results_are_appended_leaves_those_before(tmp_path: Path) -> None:
    path = tmp_path / "out.zarr"
    add(path, range(3))
    group = zarr.open_group(path, use_consolidated=False)
    for name, rows in (("m", 9), ("step", 5), ("t", 4)):
        group[name].resize((rows, *group[name].shape[1:]))
    group["m"][3:] = 7
    assert xr.open_zarr(path).load()["t"].values.tolist() == ["", "x", "xx"]
    add(path, [3])
    assert xr.open_zarr(path).load().equals(xr.concat(map(result, range(4)), "step"))


@pytest.mark.filterwarnings("ignore:Consolidated metadata is currently not part")
def test_a_store_of_the_version_before_is_continued_if_it_is_complete(tmp_path: Path) -> None:
    path = tmp_path / "out.zarr"
    before = xr.concat(map(result, range(3)), "step")
    before.attrs = {EVALUATION: ABOUT, "complete_rows": 3}
    before.to_zarr(path, zarr_format=3, consolidated=False)
    with pytest.raises(InvalidArgument, match=r"cannot be continued .*as if an older version was"):
        add(path, [3])
    zarr.consolidate_metadata(path)
    add(path, [3])
    ds = xr.open_zarr(path).load()
    assert ds["t"].values.tolist() == ["", "x", "xx", "xxx"]
    assert ds.attrs == {EVALUATION: ABOUT}


def test_a_store_of_something_else_stays(tmp_path: Path) -> None:
    add(tmp_path / "out.zarr", [0])
    with pytest.raises(InvalidArgument, match="with function probe, got function other"):
        add(tmp_path / "out.zarr", [], about={**ABOUT, "function": "other"})
    add(tmp_path / "out.zarr", [5], overwrite=True)
    assert xr.open_zarr(tmp_path / "out.zarr")["step"].values.tolist() == [5]
    (tmp_path / "book").mkdir()
    for overwrite in (False, True):
        with pytest.raises(RunExists, match="not the store of an evaluation"):
            add(tmp_path / "book", [], overwrite=overwrite)
