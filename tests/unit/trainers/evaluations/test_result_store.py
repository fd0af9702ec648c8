from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import xarray as xr

from trajstore.errors import InvalidArgument, RunExists, RunLocked
from trajstore.schema import EVALUATION

pytest.importorskip("torch")

from trajstore.trainers.evaluations.result import ResultStore, step_dataset

pytestmark = pytest.mark.torch

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
    assert ds.attrs == {EVALUATION: ABOUT, "complete_rows": 40}


def test_results_are_written_while_others_are_computed(tmp_path: Path) -> None:
    with ResultStore.open(tmp_path / "out.zarr", ABOUT, waiting_seconds=0) as store:
        store.add(result(0))
        assert xr.open_zarr(tmp_path / "out.zarr").sizes["step"] == 1
        with pytest.raises(RunLocked):
            add(tmp_path / "out.zarr", [])


def test_a_kill_while_results_are_appended_leaves_those_before(
    tmp_path: Path,
) -> None:
    path = tmp_path / "out.zarr"
    add(path, range(3))
    uncounted = result(3).assign_attrs({EVALUATION: ABOUT, "complete_rows": 3})
    uncounted.to_zarr(path, append_dim="step", consolidated=False)
    with ResultStore.open(path, ABOUT) as store:
        assert store.steps.tolist() == [0, 1, 2]
        store.add(result(3))
    assert xr.open_zarr(path)["t"].values.tolist() == ["", "x", "xx", "xxx"]


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
