from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("pydantic")
from trajstore import RunWriter
from trajstore.errors import FormatError, InvalidArgument
from trajstore.trainers import preset
from trajstore.trainers.sweeps.sweep_folder import choose_threads, is_done, planned_rows, save_names
from trajstore.watching.followed_runs import SWEEP, swept_names

CONFIG = preset("gatsby").with_values(["training.steps=3"])


def write(path: Path, rows: int = 4, status: str = "complete") -> Path:
    run = RunWriter.create(
        path,
        token=[0],
        hidden=1,
        variables={"W": "float32"},
        config=CONFIG.model_dump(mode="json"),
        overwrite=True,
    )
    for step in range(rows):
        run.append(step=step, W=np.zeros((1, 1), "float32"))
    run.close(status)
    return path


def test_a_run_with_all_its_steps_is_done(tmp_path: Path) -> None:
    path = tmp_path / "run.zarr"
    assert not is_done(path, CONFIG, steps_given=True)
    write(path)
    assert is_done(path, CONFIG, steps_given=True)
    assert is_done(path, CONFIG.with_values(["recording.memory=2GiB"]), steps_given=True)
    longer = CONFIG.with_values(["training.steps=4"])
    assert not is_done(path, longer, steps_given=True)
    assert is_done(path, longer, steps_given=False), "a resumed run keeps its own number"
    assert not is_done(path, CONFIG.with_values(["optimizer.lr=1"]), steps_given=True)
    assert not is_done(write(path, status="interrupted"), CONFIG, steps_given=True)
    assert not is_done(write(path, rows=3), CONFIG, steps_given=True)
    assert not is_done(write(path, rows=0), CONFIG, steps_given=True)


def test_planned_rows_are_those_of_a_run() -> None:
    assert planned_rows(CONFIG) == 4
    assert planned_rows(CONFIG.with_values(["recording.every=2"])) == 3


def test_the_number_of_threads_is_chosen_once_per_sweep(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr("os.sched_getaffinity", lambda process: range(6), raising=False)
    folder = tmp_path / "runs"
    assert choose_threads(folder, 4, None, keep=False) == 1
    assert not folder.exists()
    assert choose_threads(folder, 2, None, keep=True) == 3
    assert choose_threads(folder, 1, None, keep=True) == 3, "also with other jobs"
    monkeypatch.setenv("OMP_NUM_THREADS", "4,2")  # of nested parallel regions
    assert choose_threads(tmp_path, 2, None, keep=False) == 3
    monkeypatch.setenv("OMP_NUM_THREADS", "5")
    assert choose_threads(folder, 1, 3, keep=True) == 3
    assert choose_threads(tmp_path / "others", 2, None, keep=True) == 5
    with pytest.raises(InvalidArgument, match="have 3 threads each"):
        choose_threads(folder, 1, 2, keep=True)
    (folder / SWEEP).write_text("{}")
    with pytest.raises(FormatError, match="has no valid number of threads"):
        choose_threads(folder, 1, None, keep=True)


def test_names_are_kept_beside_the_threads(tmp_path: Path) -> None:
    choose_threads(tmp_path, 1, 3, keep=True)
    save_names(tmp_path, ["b.zarr"])
    save_names(tmp_path, ["a.zarr", "b.zarr"])
    assert swept_names(tmp_path) == ["b.zarr", "a.zarr"]
    assert choose_threads(tmp_path, 1, None, keep=True) == 3
