"""Which dask arrays are known to be an array of a run, and which are something else."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import cloudpickle
import dask.array as da
import numpy as np
import pytest
import xarray as xr
from damage import wide_run

from trajstore import FormatError, open_run
from trajstore.store.reading.lazy_source import stored_source

SHAPE = (11, 300, 3)


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return wide_run(tmp_path / "run.zarr")


WAYS: dict[str, Callable[[Path], xr.Dataset]] = {
    "xr.open_zarr": xr.open_zarr,
    "without dask": lambda path: xr.open_zarr(path, chunks=None).chunk(step=4),
    "as it is": lambda path: xr.open_zarr(path, chunks={}),
    "larger chunks": lambda path: xr.open_zarr(path, chunks={"step": 8}),
    "the engine": lambda path: xr.open_dataset(path, engine="trajstore", chunks={}),
    "open_run": open_run,
    "open_run without dask": lambda path: open_run(path, chunks=None).chunk(step=3),
}


@pytest.mark.parametrize("way", WAYS)
def test_what_is_read_as_it_is_stored_is_known(tmp_path: Path, way: str) -> None:
    run = wide_run(tmp_path / "run.zarr")
    grad = WAYS[way](run).grad
    found = stored_source(grad.data)
    assert found is not None
    assert (found.path, found.name, found.shape) == (run, "grad", SHAPE)
    np.testing.assert_array_equal(found.values(()), grad.values)
    key = slice(2, 9), slice(3, 30), 2
    again = cloudpickle.loads(cloudpickle.dumps(found))
    np.testing.assert_array_equal(again.norms(*key), found.norms(*key))


CHANGES: dict[str, Callable[[xr.DataArray], xr.DataArray]] = {
    "some rows": lambda W: W[2:],
    "one token": lambda W: W[:, [3]],
    "another order": lambda W: W.transpose("token", "step", "hidden"),
    "calculated": lambda W: W * 1,
    "cast": lambda W: W.astype("f8"),
    "other chunks": lambda W: W.chunk(step=1),
    "computed": lambda W: W.compute().chunk(step=4),
    "kept": lambda W: W.persist(),
    "filled": lambda W: W.fillna(0),
    "joined": lambda W: xr.concat([W, W], "step"),
}


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("open_it", [xr.open_zarr, open_run])
def test_whatever_is_done_to_it_makes_it_something_else(
    run: Path, open_it: Callable[[Path], xr.Dataset], change: str
) -> None:
    assert stored_source(CHANGES[change](open_it(run).grad).data) is None


@pytest.mark.parametrize("key", [slice(1, None), [0, 2], np.arange(11) < 3], ids=str)
@pytest.mark.parametrize("open_it", [xr.open_zarr, open_run])
def test_a_selection_before_dask_is_something_else(
    run: Path, open_it: Callable[..., xr.Dataset], key: Any
) -> None:
    grad = open_it(run, chunks=None).grad
    assert stored_source(grad.isel(step=key).chunk(step=4).data) is None
    assert stored_source(grad.isel(token=[3, 1]).chunk(step=4).data) is None


def test_what_xarray_decodes_is_not_what_is_stored(run: Path) -> None:
    ds = xr.open_zarr(run, chunks=None, decode_cf=False)
    assert stored_source(ds.grad.chunk(step=4).data) is not None
    ds.grad.attrs["scale_factor"] = 2.0
    decoded = xr.decode_cf(ds)
    assert stored_source(decoded.grad.chunk(step=4).data) is None


def test_who_reads_in_a_way_of_his_own_gets_something_else(run: Path) -> None:
    known = open_run(run).grad.data

    def doubled(source: Any, key: Any, *_: Any, **__: Any) -> Any:
        return np.asarray(source[key]) * 2

    source = known.dask[f"original-{known.name}"]
    made = da.from_array(source, known.chunks, getitem=doubled, name="own", meta=known._meta)
    assert stored_source(made) is None


def test_values_that_were_loaded_are_not_read_again(run: Path) -> None:
    ds = xr.open_zarr(run, chunks=None)
    ds.grad.load()
    ds.grad[0] = 5
    assert stored_source(ds.grad.chunk(step=4).data) is None


def test_a_copy_under_another_name_is_left_to_the_codec(run: Path) -> None:
    """Which refuses it: its label says where it belongs."""
    shutil.copytree(run / "grad", run / "other")
    copy = xr.open_zarr(run, consolidated=False).other
    assert stored_source(copy.data) is None
    with pytest.raises(FormatError, match="where other belongs"):
        copy.compute()


def test_arrays_in_memory_are_no_run() -> None:
    assert stored_source(xr.DataArray(np.zeros(SHAPE)).chunk().data) is None
