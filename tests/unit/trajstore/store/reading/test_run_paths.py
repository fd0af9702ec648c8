from __future__ import annotations

from pathlib import Path

import pytest
from growing_runs import begin

from trajstore import RunWriter
from trajstore.errors import RunNotFound
from trajstore.store.reading.open_runs import run_paths


def made(path: Path) -> Path:
    begin(path).close()
    return path


def test_names_patterns_and_folders(tmp_path: Path) -> None:
    odd = made(tmp_path / "odd [1].zarr")
    assert run_paths([odd, odd, str(tmp_path / "*.zarr")]) == [str(odd)]
    runs = [made(tmp_path / "runs" / f"seed={seed}.zarr") for seed in (2, 10)]
    assert run_paths(tmp_path / "runs") == [str(run) for run in runs]
    assert run_paths(runs[0]) == [str(runs[0])]
    assert run_paths(tmp_path / "later.zarr") == [str(tmp_path / "later.zarr")]


def test_the_matrices_of_a_training_have_one_name(tmp_path: Path) -> None:
    matrices = {"E.weight": "un.E.weight.zarr", "W": "un.W.zarr", "V": "un.copy of V.zarr"}
    for parameter, name in matrices.items():
        with RunWriter.create(
            tmp_path / name, token=[0], hidden=1, variables={"W": "float32"},
            attributes={"recording": {"parameter": parameter}},
        ):  # fmt: skip
            pass
    (tmp_path / "un.notes.zarr").mkdir()  # it is no run
    name = tmp_path / "un.zarr"
    assert run_paths(name) == [str(tmp_path / "un.E.weight.zarr"), str(tmp_path / "un.W.zarr")]
    made(name)
    assert run_paths(name) == [str(name)]


def test_a_pattern_without_runs_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(RunNotFound, match=r"there is no run at .*none"):
        run_paths(tmp_path / "none*.zarr")
