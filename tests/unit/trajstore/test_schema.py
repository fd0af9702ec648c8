from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import xarray as xr

from trajstore import RunWriter, export, import_file, open_run, repair, verify
from trajstore.errors import InvalidArgument
from trajstore.schema import OPTIMIZER_STATE, VARIABLES, belongs, variables_of

KEPT = [{"name": "velocity", "of": "element"}, {"name": "rows", "of": "other"},
        {"name": "warmth", "of": "parameter", "type": "float"}]  # fmt: skip
NAMES = ("velocity", "params_velocity", "param_warmth", "param_kept")


def written(path: Path, rows: int = 5) -> Path:
    """A run with what an optimizer keeps, by its own names."""
    shapes = ((4, 3), (6,), (2,), (2,))
    lengths = dict(zip(NAMES, shapes, strict=True))
    types = dict.fromkeys(("W", *lengths), "float32")
    with RunWriter.create(
        path, token=np.arange(4), hidden=3, variables=types, parameter=("a", "b"),
        lengths={"element": 6}, attributes={OPTIMIZER_STATE: KEPT},
    ) as writer:  # fmt: skip
        for step in range(rows):
            values = {name: np.full(shape, step, "f4") for name, shape in lengths.items()}
            writer.append(step, W=np.full((4, 3), -step, "f4"), **values)
    return path


def test_names_of_an_optimizer_are_those_of_its_run(tmp_path: Path) -> None:
    assert variables_of({}) == tuple(VARIABLES)
    known = variables_of({OPTIMIZER_STATE: KEPT})
    assert known == (*VARIABLES, *NAMES)
    assert not belongs("rows", known)
    assert VARIABLES["params_velocity"].dims == ("step", "element")
    assert VARIABLES["params_sum"].units == "nat2"
    types, new = {"W": "float32", "velocity": "float32"}, tmp_path / "a.zarr"
    with pytest.raises(InvalidArgument, match="there is no variable 'velocity'"):
        RunWriter.create(new, token=[0], hidden=1, variables=types)
    untyped = {OPTIMIZER_STATE: [{"name": "x", "of": "parameter"}]}
    with pytest.raises(InvalidArgument, match="optimizer_state"):
        RunWriter.create(new, token=[0], hidden=1, variables={"W": "float32"}, attributes=untyped)


def test_a_lost_root_and_a_lost_metadata_file_are_found_and_repaired(tmp_path: Path) -> None:
    path = written(tmp_path / "run.zarr")
    ds = open_run(path).load()
    assert verify(path).clean
    for lost in ("zarr.json", "velocity/zarr.json", "param_kept/zarr.json"):
        (path / lost).unlink()
        assert not verify(path).clean, lost
        repair(path)
        assert verify(path).clean, lost
    (path / "velocity/c.0.0.0").write_bytes(b"")
    assert {problem.array for problem in verify(path).problems} == {"velocity"}
    xr.testing.assert_equal(ds.drop_vars("velocity"), open_run(path).drop_vars("velocity").load())


def test_files_and_copies_hold_them(tmp_path: Path) -> None:
    path = written(tmp_path / "run.zarr")
    ds = open_run(path).load()
    export(path, tmp_path / "run.safetensors")
    import_file(tmp_path / "run.safetensors", tmp_path / "back.zarr")
    export(path, tmp_path / "copy.zarr", format="run")
    with RunWriter.resume(path, rows=3) as writer:
        assert {*NAMES} <= {*writer.layout.arrays}
    for copy in ("back.zarr", "copy.zarr"):
        found = open_run(tmp_path / copy).load()
        for name in NAMES:
            np.testing.assert_array_equal(found[name], ds[name])
