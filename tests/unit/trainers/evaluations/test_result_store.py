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

from trajstore.trainers.evaluations import result as result_room
from trajstore.trainers.evaluations.result import ResultStore, step_dataset

pytestmark = pytest.mark.torch

ABOUT = {"run": "run.zarr", "function": "probe"}


def result(step: int) -> xr.Dataset:
    array = np.full((2, 3), step, np.float32)
    return step_dataset({"a": step / 2, "t": "x" * step, "m": (("row", "column"), array)}, step)


def add(path: Path, steps: Sequence[int], **options: Any) -> None:
    with ResultStore.open(path, ABOUT, **options) as store:
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


def test_results_are_written_while_others_are_computed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(result_room, "_WAITING_SECONDS", 0.0)
    with ResultStore.open(tmp_path / "out.zarr", ABOUT) as store:
        store.add(result(0))
        assert xr.open_zarr(tmp_path / "out.zarr").sizes["step"] == 1
        with (
            pytest.raises(RunLocked),
            ResultStore.open(tmp_path / "out.zarr", ABOUT),
        ):
            pass


def test_a_kill_while_results_are_appended_leaves_those_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Killed(BaseException):
        pass

    def killed(*_: Any, **__: Any) -> None:
        raise Killed

    path = tmp_path / "out.zarr"
    add(path, range(3))
    with monkeypatch.context() as patched:
        # After the arrays have grown, before the rows are counted.
        patched.setattr(result_room.zarr, "open_group", killed)
        store = ResultStore(path, ABOUT, result(0))
        store._written = 3
        store.add(result(3))
        with pytest.raises(Killed):
            store.flush()
    with ResultStore.open(path, ABOUT) as store:
        assert store.steps.tolist() == [0, 1, 2]
        store.add(result(3))
    assert xr.open_zarr(path)["t"].values.tolist() == ["", "x", "xx", "xxx"]


def test_a_store_of_something_else_stays(tmp_path: Path) -> None:
    add(tmp_path / "out.zarr", [0])
    with (
        pytest.raises(InvalidArgument, match="with function probe, got function other"),
        ResultStore.open(tmp_path / "out.zarr", {**ABOUT, "function": "other"}),
    ):
        pass
    add(tmp_path / "out.zarr", [5], overwrite=True)
    assert xr.open_zarr(tmp_path / "out.zarr")["step"].values.tolist() == [5]
    (tmp_path / "book").mkdir()
    for overwrite in (False, True):
        with (
            pytest.raises(RunExists, match="not the store of an evaluation"),
            ResultStore.open(tmp_path / "book", ABOUT, overwrite=overwrite),
        ):
            pass
