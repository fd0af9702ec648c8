"""Rows that hold something of every example of a step: through the store, and in and out of it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import xarray as xr

import trajstore
from trajstore import RunWriter, analysis, open_run, repair, verify
from trajstore.errors import InvalidArgument
from trajstore.exchange.export_run import branch_run

ROWS, EXAMPLES, POSITIONS, HIDDEN = 10, 4, 6, 3
TYPES = {
    "W": "bfloat16",
    "hidden_trace": "float32",
    "batch": "float64",
    "example_loss": "float32",
    "hidden_states": "bfloat16",
}


def rows() -> dict[str, Any]:
    rng = np.random.default_rng(0)
    made = {
        "W": rng.integers(0, 1 << 14, (ROWS, 5, HIDDEN)).astype("u2"),
        "hidden_trace": rng.normal(size=ROWS).astype("f4"),
        "batch": rng.integers(0, 1 << 52, (ROWS, EXAMPLES)).astype("f8"),
        "example_loss": rng.normal(size=(ROWS, EXAMPLES)).astype("f4"),
        "hidden_states": rng.integers(0, 1 << 14, (ROWS, EXAMPLES, POSITIONS, HIDDEN)).astype("u2"),
    }
    for name in ("hidden_trace", "batch", "example_loss"):
        made[name][0] = np.nan
    made["hidden_states"][0] = 0x7FC0
    return made


def write(path: Path, first: int = 0, stop: int = ROWS) -> None:
    values = rows()
    sizes = {"examples": EXAMPLES, "positions": POSITIONS, "hidden": HIDDEN}
    with RunWriter.create(path, token=range(5), variables=TYPES, block_rows=4, **sizes) as run:
        for row in range(first, stop):
            run.append(row, **{name: values[name][row] for name in TYPES})


def agree(path: Path, at: slice = slice(None)) -> xr.Dataset:
    ds = open_run(path)
    for name, kept in rows().items():
        wide = (
            kept.astype("u4") << 16 if kept.dtype == np.uint16 else kept.view(f"u{kept.itemsize}")
        )
        stored = ds[name].values
        assert np.array_equal(stored.view(f"u{stored.itemsize}"), wide[at]), name
    return ds


def test_bits_pass_through_the_store(tmp_path: Path) -> None:
    path = tmp_path / "run.zarr"
    write(path)
    ds = agree(path)
    assert ds.batch.dims == ("step", "example")
    assert ds.hidden_states.dims == ("step", "example", "position", "hidden")
    xr.testing.assert_identical(xr.open_zarr(path).load(), ds.load())
    assert verify(path).clean
    trajstore.export(path, tmp_path / "part.zarr", format="run", steps="2:9", block_rows=3)
    agree(tmp_path / "part.zarr", slice(2, 9))


@pytest.mark.parametrize("form", ["safetensors", "hdf5"])
def test_files_of_whole_runs_hold_them(tmp_path: Path, form: str) -> None:
    if form == "hdf5":
        pytest.importorskip("h5py")
    write(tmp_path / "run.zarr")
    file = trajstore.export(tmp_path / "run.zarr", tmp_path / "file", format=form)
    trajstore.import_file(file, tmp_path / "again.zarr")
    ds = open_run(tmp_path / "run.zarr")
    compared = analysis.compare(ds, agree(tmp_path / "again.zarr"))
    assert compared.first_difference.to_series().to_dict() == dict.fromkeys(ds, -1)


def test_a_branch_and_a_cut_run_keep_them(tmp_path: Path) -> None:
    path, branch = tmp_path / "run.zarr", tmp_path / "branch.zarr"
    write(path)
    wider = TYPES | {"W": "float32"}
    branch_run(path, branch, 7, types=wider, attributes={}, memory="1GiB")
    agree(branch, slice(0, 7))
    assert verify(branch).clean
    next((branch / "hidden_states").glob("c.1.*")).unlink()
    assert not verify(branch).clean
    repair(branch)
    agree(branch, slice(0, 4))


def test_files_that_say_no_more_than_a_name_are_not_taken_for_them(tmp_path: Path) -> None:
    h5py = pytest.importorskip("h5py")
    write(tmp_path / "run.zarr")
    file = trajstore.export(tmp_path / "run.zarr", tmp_path / "run.h5", format="hdf5")
    with h5py.File(file, "a") as opened:
        del opened["trajstore_json"]  # now it is a file of any program
    done = trajstore.import_file(file, tmp_path / "again.zarr")
    assert set(done.variables) == {"W", "hidden_trace"}
    assert any("omitted: " in note and "hidden_states" in note for note in done.notes)


def test_lengths_of_examples_and_positions_are_required(tmp_path: Path) -> None:
    sizes = {"token": range(5), "hidden": HIDDEN, "variables": TYPES}
    with pytest.raises(InvalidArgument, match="hidden_states: got no length of the dimension posi"):
        RunWriter.create(tmp_path / "run.zarr", examples=EXAMPLES, **sizes)


def test_compare_leaves_out_what_has_other_examples(tmp_path: Path) -> None:
    write(tmp_path / "run.zarr")
    ds = open_run(tmp_path / "run.zarr")
    compared = analysis.compare(ds, ds.isel(example=slice(2)))
    assert compared["variable"].values.tolist() == ["W", "hidden_trace"]
    other = ds.assign(hidden_states=ds.hidden_states.where(ds.step != 6, 0))
    assert analysis.compare(ds, other).first_difference.sel(variable="hidden_states") == 6
