from __future__ import annotations

from pathlib import Path

import pytest
from watched_runs import begin

from trajstore.errors import RunNotFound
from trajstore.store.reading.run_paths import run_paths


def made(path: Path) -> Path:
    begin(path).close()
    return path


def test_names_patterns_and_folders(tmp_path: Path) -> None:
    odd = made(tmp_path / "odd [1].zarr")
    assert run_paths([odd, odd, str(tmp_path / "*.zarr")]) == [str(odd)]
    runs = [made(tmp_path / "runs" / f"seed={seed}.zarr") for seed in (2, 10)]
    (tmp_path / "runs" / "sweep.json").write_text("{}")
    assert run_paths(tmp_path / "runs") == [str(run) for run in runs], "the runs of a sweep"
    assert run_paths(runs[0]) == [str(runs[0])]
    assert run_paths(tmp_path / "later.zarr") == [str(tmp_path / "later.zarr")]


def test_what_matches_nothing_is_told(tmp_path: Path) -> None:
    with pytest.raises(RunNotFound, match=r"there is no run at .*none"):
        run_paths(tmp_path / "none*.zarr")
