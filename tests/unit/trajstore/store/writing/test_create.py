from __future__ import annotations

import shutil
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from disk import Disk

from trajstore import RunWriter, open_run, verify
from trajstore.errors import RunLocked
from trajstore.store.storage.lock import RunLock
from trajstore.store.writing.create import staged_file, staged_folder, staged_run


def write(path: Path, value: int, **options: Any) -> None:
    variables = {"W": "float32"}
    with RunWriter.create(path, token=[1, 2], hidden=3, variables=variables, **options) as run:
        run.append(step=0, W=np.full((2, 3), value, "f4"))


def value(path: Path) -> float:
    return float(open_run(path).W.values[0, 0, 0])


@pytest.fixture
def dead() -> int:
    """Number of a process that has ended."""
    process = subprocess.Popen(["true"])
    process.wait()
    return process.pid


@pytest.mark.parametrize("kind", [staged_file, staged_folder, staged_run])
def test_leftovers_of_killed_writers_are_removed(tmp_path: Path, kind: object, dead: int) -> None:
    target = tmp_path / "run.zarr"
    partial, old = (tmp_path / f".run.zarr.{dead}{end}" for end in (".partial", ".old"))
    partial.write_text("of a file")
    (old / "W").mkdir(parents=True)
    (tmp_path / ".run.zarr.lock").write_text("{}")
    with kind(target) as place:  # type: ignore[operator]
        assert not partial.exists()
        assert not old.exists()
        if kind is staged_run:
            write(place, 1)
    assert {path.name for path in tmp_path.iterdir()} <= {"run.zarr"}


@pytest.mark.parametrize("kind", [staged_file, staged_folder, staged_run])
def test_a_failure_leaves_nothing(tmp_path: Path, kind: object) -> None:
    def failing(place: Path) -> None:
        if kind is staged_run:
            write(place, 1)
        raise RuntimeError

    with pytest.raises(RuntimeError), kind(tmp_path / "run.zarr") as place:  # type: ignore[operator]
        failing(place)
    assert list(tmp_path.iterdir()) == []


def test_what_is_being_recorded_is_not_replaced(tmp_path: Path) -> None:
    run = tmp_path / "run.zarr"
    write(run, 1)
    with RunLock.acquire(run), pytest.raises(RunLocked), staged_run(run, overwrite=True):
        pass
    assert value(run) == 1


@pytest.mark.parametrize("at_once", [True, False])
def test_a_run_is_replaced_whole(
    tmp_path: Path, at_once: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not at_once:
        monkeypatch.setattr("trajstore.store.writing.create.exchange", lambda one, other: False)
    run = tmp_path / "run.zarr"
    write(run, 1)
    with staged_run(run, overwrite=True) as new:
        write(new, 2)
        assert value(run) == 1
    assert value(run) == 2

    def refuse() -> None:
        raise RuntimeError

    with pytest.raises(RuntimeError), staged_run(run, overwrite=True, on_place=refuse) as new:
        write(new, 3)
    assert value(run) == 2
    assert list(tmp_path.iterdir()) == [run]


@pytest.mark.parametrize("at_once", [True, False])
def test_what_is_replaced_stays_until_the_new_one_survives_a_loss_of_power(
    tmp_path: Path, at_once: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not at_once:
        monkeypatch.setattr("trajstore.store.writing.create.exchange", lambda one, other: False)
    run, file = tmp_path / "new" / "run.zarr", tmp_path / "other" / "file"
    disk = Disk(monkeypatch)
    survived: list[bool] = []
    remove = shutil.rmtree

    def watched(path: Path, **options: Any) -> None:
        survived.append(disk.survives(run, below=tmp_path))
        remove(path, **options)

    with staged_run(run) as new:
        write(new, 1, fsync=False)
    monkeypatch.setattr(shutil, "rmtree", watched)
    with staged_run(run, overwrite=True) as new:
        write(new, 2, fsync=False)
    write(run, 3, overwrite=True)
    assert survived == [True, True]
    with staged_file(file) as new:
        new.write_text("x")
    assert disk.survives(file, below=tmp_path)
    assert disk.early == []


def test_verify_names_what_the_dead_have_left(tmp_path: Path, dead: int) -> None:
    run = tmp_path / "run.zarr"
    write(run, 1)
    (tmp_path / ".run.zarr.lock").write_text("{}")
    folder = tmp_path / f".run.zarr.{dead}.partial"
    folder.mkdir()
    (folder / "piece").write_bytes(bytes(2048))
    notes = " ".join(verify(run).notes)
    assert f"{folder.name} (2 KiB)" in notes
    assert ".run.zarr.lock (2 B)" in notes
