from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import trajstore
from trajstore.errors import FormatError
from trajstore.formats.open_file import common_numbers, numbers_of_steps, open_file

DEAD = np.array([True, False, False, True])
FLAGS = np.array([1, 0, 3, 0], "u1").view(bool)  # no labels, so any byte is allowed


def test_what_differs_and_what_does_not() -> None:
    files_of_numbers = [
        {"seed": 1, "note": "a"},
        {"seed": 1, "note": "b", "loss": 2, "lr": "0.5", "a.b": 1},
        {"seed": 1, "loss": 3.5, "lr": "0.25", "a.b": 2},
    ]
    assert common_numbers(files_of_numbers) == {"seed": 1}
    series, left = numbers_of_steps(files_of_numbers, "file {}".format)
    assert {key: rows.tolist() for key, rows in series.items()} == {
        "loss": [2, 3.5],
        "lr": [0.5, 0.25],
    }
    assert left == {"note": "not a number, and it differs between files"}
    files_of_numbers[2].pop("loss")
    series, left = numbers_of_steps(files_of_numbers, "file {}".format)
    assert np.isnan(series["loss"][1])
    assert left["loss of file 2"] == "missing, so NaN in the run"
    with_large = [{"n": 1 << 63}, {"n": 2}]
    assert numbers_of_steps(with_large, str) == ({}, {"n": "a number too large"})


def files(path: Path) -> Path:
    path.mkdir()
    for step in (0, 10, 20):
        W = np.full((4, 3), step, "f4")
        loss = {"loss": np.float32(5 - step / 10)} if step else {}
        np.savez(
            path / f"step_{step:05}.npz",
            W=W, dead_mask=DEAD, vocab_size=4, learning_rate=1e-3, step=step, **loss,
            odd=np.array([None]), flags=FLAGS,
        )  # fmt: skip
    np.savez(path / "step_final.npz", W=W)
    (path / "notes_3.md").write_text("mine")
    return path


def test_masks_and_numbers_in_each_file(tmp_path: Path) -> None:
    done = trajstore.import_file(files(tmp_path / "steps"), tmp_path / "run.zarr")
    ds = trajstore.open_run(done.path).load()
    assert ds.step.values.tolist() == [0, 10, 20]
    assert (ds.is_dead.values == DEAD).all()
    assert np.allclose(ds.loss.values, [np.nan, 4, 3], equal_nan=True)
    assert ds.attrs["optimizer"]["hyperparameters"]["initial_lr"] == 1e-3
    left = {line.name: line.why for line in done.table if not line.kind}
    assert "flags" in left
    assert left["step_final.npz"] == "no step in its name"
    assert left["notes_3.md"] == "not a file of arrays"
    assert "Python objects" in left["odd of step_00000.npz and 2 more files"]
    assert any("step_final.npz" in note for note in done.notes)


def test_many_unread_files_are_counted(tmp_path: Path) -> None:
    np.save(tmp_path / "W_0.npy", np.ones((4, 3), "f4"))
    for number in range(30):
        (tmp_path / f"log-{number}.txt").write_text("")
    with open_file(tmp_path) as file:
        assert len(file.unread) == 21
        assert file.unread["10 more files"] == "also not files of steps"


def test_masks_that_differ_from_file_to_file(tmp_path: Path) -> None:
    path = files(tmp_path / "steps")
    np.savez(path / "step_00010.npz", W=np.ones((4, 3), "f4"), dead_mask=~DEAD, vocab_size=4,
             learning_rate=1e-3, step=10, loss=np.float32(1), flags=FLAGS)  # fmt: skip
    with pytest.raises(FormatError, match=r"dead_mask .* differs between files"):
        trajstore.import_file(path, tmp_path / "run.zarr")
